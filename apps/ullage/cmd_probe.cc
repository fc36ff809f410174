// ullage probe [--json]
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/device_presence.h"
#include "runtime/functions.h"
#include "runtime/host.h"
#include "runtime/session_plan.h"
#include "ullage/residentk/probe.h"
#include "units.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

void print_text(const runtime::Host& host) {
  fmt::print("ullage {}\n", runtime::version());
  fmt::print("  cpu       {}, {} threads\n", host.cpu, host.n_threads);
  fmt::print("  kernels   {}\n", fmt::join(host.instruction_sets, ", "));
  fmt::print("  memory    {}, {} available\n", human_bytes(host.memory_bytes),
             human_bytes(host.available_bytes));
  if (!residentk::resident_gpu_kernels_compiled()) {
    fmt::print("  cuda      not compiled in; {} devices here\n", runtime::cuda_device_count());
  } else {
    fmt::print("  cuda      compiled in; {} devices here\n", runtime::cuda_device_count());
  }
}

}  // namespace

void add_probe(CLI::App& program, int& exit_code) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* verb = program.add_subcommand("probe", "What is on this machine");
  verb->add_flag("--json", *json, "One JSON document");
  verb->callback([json, &exit_code] {
    if (*json) {
      fmt::print("{}\n", nlohmann::ordered_json::parse(runtime::probe_json()).dump(2));
    } else {
      print_text(runtime::probe_host());
    }
    exit_code = 0;
  });
}

}  // namespace ullage::apps
