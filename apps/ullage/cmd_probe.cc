// ullage probe [--json]
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "runtime/device_presence.h"
#include "runtime/functions.h"
#include "runtime/host.h"
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

void print_json(const runtime::Host& host) {
  const nlohmann::ordered_json out = {
      {"version", runtime::version()},
      {"cpu", {{"name", host.cpu}, {"threads", host.n_threads}}},
      {"instruction_sets", host.instruction_sets},
      {"memory_bytes", host.memory_bytes},
      {"available_bytes", host.available_bytes},
      {"cuda",
       {{"kernels_compiled", residentk::resident_gpu_kernels_compiled()},
        {"devices", runtime::cuda_device_count()},
        {"session_possible", residentk::resident_available()}}}};
  fmt::print("{}\n", out.dump(2));
}

}  // namespace

void add_probe(CLI::App& program, int& exit_code) {
  const auto json = std::make_shared<bool>(false);
  CLI::App* verb = program.add_subcommand("probe", "What is on this machine");
  verb->add_flag("--json", *json, "One JSON document");
  verb->callback([json, &exit_code] {
    const runtime::Host host = runtime::probe_host();
    *json ? print_json(host) : print_text(host);
    exit_code = 0;
  });
}

}  // namespace ullage::apps
