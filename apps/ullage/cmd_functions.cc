// ullage functions [--json | --markdown]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <memory>
#include <string>

#include "runtime/functions.h"
#include "verbs.h"

namespace ullage::apps {

void add_functions(CLI::App& program, int& exit_code) {
  struct Options {
    bool json = false;
    bool markdown = false;
  };
  const auto options = std::make_shared<Options>();
  CLI::App* verb = program.add_subcommand("functions", "List the contract functions");
  CLI::Option* json = verb->add_flag("--json", options->json, "The whole table as JSON");
  verb->add_flag("--markdown", options->markdown, "What docs/functions.md holds")->excludes(json);
  verb->callback([options, &exit_code] {
    const std::string text = options->json       ? runtime::functions_json() + '\n'
                             : options->markdown ? runtime::functions_markdown()
                                                 : runtime::functions_text();
    const bool written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
    exit_code = written ? 0 : kExitError;
  });
}

}  // namespace ullage::apps
