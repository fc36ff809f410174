// The program's verbs. A verb NAME is one file, cmd_NAME.cc, that defines add_NAME, and one line in
// this list.
#pragma once

namespace CLI {
class App;
}

namespace ullage::apps {

#define ULLAGE_VERBS(X) \
  X(exec)               \
  X(functions)          \
  X(head_loss)          \
  X(kernels)            \
  X(loss)               \
  X(plan)               \
  X(probe)

// Hangs the verb's subcommand on the program. Its callback runs the verb and leaves the exit code:
// 0 when it did what was asked, 2 on an error.
#define ULLAGE_DECLARE_VERB(name) void add_##name(CLI::App& program, int& exit_code);
ULLAGE_VERBS(ULLAGE_DECLARE_VERB)
#undef ULLAGE_DECLARE_VERB

inline constexpr int kExitError = 2;

}  // namespace ullage::apps
