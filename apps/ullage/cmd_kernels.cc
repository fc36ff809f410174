// ullage kernels [--json]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/kernel_table.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

void print_text() {
  for (const KernelEntry& kernel : kernel_table()) {
    fmt::print("{}\n", kernel.name);
    fmt::print("  computes  {}\n", kernel.supported);
    fmt::print("  required  {}\n", kernel.required);
    fmt::print("  missing   {}\n", kernel.missing.empty() ? "nothing" : kernel.missing);
  }
}

void print_json() {
  auto out = nlohmann::ordered_json::array();
  for (const KernelEntry& kernel : kernel_table()) {
    out.push_back({{"name", kernel.name},
                   {"operation", kernel.operation},
                   {"supported", kernel.supported},
                   {"required", kernel.required},
                   {"missing", kernel.missing}});
  }
  fmt::print("{}\n", out.dump(2));
}

}  // namespace

void add_kernels(CLI::App& program, int& exit_code) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* verb = program.add_subcommand(
      "kernels", "The kernels of this build, best first; ULLAGE_FORCE_KERNEL pins one");
  verb->add_flag("--json", *json, "One JSON document");
  verb->callback([json, &exit_code] {
    *json ? print_json() : print_text();
    exit_code = 0;
  });
}

}  // namespace ullage::apps
