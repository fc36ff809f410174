// ullage head-loss CASE.json [--dtype D] [--chunk N] [--implementation I] [--reference] [--rows]
//                  [--metrics]
#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <iterator>
#include <memory>
#include <optional>
#include <string>

#include "runtime/head_case_run.h"
#include "runtime/head_config_json.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

struct Options {
  std::string path, dtype = "f64", implementation = "auto";
  runtime::HeadCaseOptions run;
  runtime::HeadCaseOutputs outputs;
};

std::optional<std::string> read_all(std::istream& stream) {
  try {
    std::string text{std::istreambuf_iterator<char>(stream), {}};
    if (stream.bad()) return std::nullopt;
    return text;
  } catch (const std::ios_base::failure&) {  // a directory, for instance
    return std::nullopt;
  }
}

std::optional<std::string> document(const std::string& path) {
  if (path == "-") return read_all(std::cin);
  std::ifstream file(path, std::ios::binary);
  if (!file) return std::nullopt;
  return read_all(file);
}

int refuse(const Status& status) {
  std::puts(runtime::head_result_to_json(status, status, {}).c_str());
  return kExitError;
}

// A case that is refused says so in its place; only a document as a whole is an error.
int run(Options options) {
  const Result<DType> dtype = runtime::dtype_from_name(options.dtype);
  if (!dtype) return refuse(dtype.status());
  options.run.dtype = *dtype;
  const Result<lossk::Implementation> implementation =
      runtime::implementation_from_name(options.implementation);
  if (!implementation) return refuse(implementation.status());
  options.run.limits.implementation = *implementation;
  const std::optional<std::string> text = document(options.path);
  if (!text) {
    return refuse({kHeadBadConfig, "cannot read '" + options.path +
                                       "'; accepted: a JSON file, or "
                                       "- for standard input"});
  }
  const Result<runtime::HeadCases> cases = runtime::head_cases_from_json(*text);
  if (!cases) return refuse(cases.status());
  if (cases->listed) std::puts("{\"cases\": [");
  for (size_t i = 0; i < cases->cases.size(); ++i) {
    const Result<runtime::HeadCase>& head = cases->cases[i];
    const Result<reference::HeadResult> result = head
                                                     ? runtime::run_head_case(*head, options.run)
                                                     : Result<reference::HeadResult>(head.status());
    std::string line = runtime::head_result_to_json(head, result, options.outputs);
    if (i + 1 < cases->cases.size()) line += ",";
    std::puts(line.c_str());
  }
  if (cases->listed) std::puts("]}");
  return 0;
}

}  // namespace

void add_head_loss(CLI::App& program, int& exit_code) {
  const auto options = std::make_shared<Options>();
  CLI::App* verb = program.add_subcommand(
      "head-loss", "Losses and gradients at the head for a case, or {\"cases\": [...]}");
  verb->add_option("case", options->path, "A JSON file; - reads standard input")->required();
  verb->add_option("--dtype", options->dtype, "Of matrices: f64 (default), f32, bf16, f16");
  verb->add_option("--chunk", options->run.limits.chunk, "Rows at a time (default: as planned)");
  verb->add_option("--implementation", options->implementation, "auto (default), fused, per_term");
  verb->add_flag("--reference", options->run.reference, "By the float64 oracle");
  verb->add_flag("--rows", options->outputs.rows,
                 "Also token_loss, lse, label_log_prob, entropy, argmax and correct");
  verb->add_flag("--metrics", options->outputs.metrics, "Also the metrics of grpo and gspo terms");
  verb->callback([options, &exit_code] { exit_code = run(*options); });
}

}  // namespace ullage::apps
