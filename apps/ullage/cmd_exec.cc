// ullage exec MODULE FUNCTION [ARGS | -] [--args-file FILE]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include "runtime/functions.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

struct Options {
  std::string module;
  std::string function;
  std::string args = "[]";
  std::string args_file;
};

std::optional<std::string> read_all(std::istream& stream) {
  try {
    return std::string{std::istreambuf_iterator<char>(stream), {}};
  } catch (const std::ios_base::failure&) {  // a directory, for instance
    return std::nullopt;
  }
}

// The JSON text of the arguments, or nothing where the named file cannot be read.
std::optional<std::string> arguments(const Options& options) {
  if (options.args == "-" || options.args_file == "-") return read_all(std::cin);
  if (options.args_file.empty()) return options.args;
  std::ifstream file(options.args_file, std::ios::binary);
  if (!file) return std::nullopt;
  return read_all(file);
}

int run(const Options& options) {
  const std::optional<std::string> args = arguments(options);
  if (!args) {
    std::puts(runtime::error_json("args_file", "cannot read '" + options.args_file + "'",
                                  "a file with a JSON array of arguments")
                  .c_str());
    return kExitError;
  }
  const runtime::Execution execution = runtime::execute(options.module, options.function, *args);
  std::puts(execution.json.c_str());
  return execution.ran ? 0 : kExitError;
}

}  // namespace

void add_exec(CLI::App& program, int& exit_code) {
  const auto options = std::make_shared<Options>();
  CLI::App* verb = program.add_subcommand("exec", "Run a contract function on JSON arguments");
  verb->add_option("module", options->module, "For instance residentk.contract")->required();
  verb->add_option("function", options->function, "For instance residentk_dispatch_budget")
      ->required();
  CLI::Option* inline_args = verb->add_option(
      "args", options->args, "A JSON array, for instance '[28]'; - reads standard input");
  verb->add_option("--args-file", options->args_file,
                   "A file with the JSON array; - reads standard input")
      ->excludes(inline_args);
  verb->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace ullage::apps
