#include <CLI/CLI.hpp>
#include <cstdio>
#include <exception>
#include <string>

#include "runtime/functions.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

int run(int argc, char** argv) {
  int exit_code = 0;
  CLI::App program(
      "Losses at the head of a language model, and resident decode sessions, in a known amount of "
      "memory",
      "ullage");
  program.set_version_flag("--version", "ullage " + std::string(runtime::version()));
  program.require_subcommand(1);
#define ULLAGE_ADD_VERB(name) add_##name(program, exit_code);
  ULLAGE_VERBS(ULLAGE_ADD_VERB)
#undef ULLAGE_ADD_VERB
  try {
    program.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return program.exit(error) == 0 ? 0 : kExitError;  // --help and --version come this way too
  }
  return exit_code;
}

}  // namespace
}  // namespace ullage::apps

int main(int argc, char** argv) {
  try {
    return ullage::apps::run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "ullage: %s\n", error.what());
    return ullage::apps::kExitError;
  }
}
