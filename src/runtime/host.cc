#include "runtime/host.h"

#include <sched.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <limits>

#include "cpu/instruction_set.h"

namespace ullage::runtime {
namespace {

// What follows "key ... :" in a file of such lines (/proc/cpuinfo, /proc/meminfo); empty if absent.
std::string field(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const size_t colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const size_t value = line.find_first_not_of(" \t", colon + 1);
    return value == std::string::npos ? std::string() : line.substr(value);
  }
  return {};
}

int64_t meminfo_bytes(std::string_view key) {
  return std::strtoll(field("/proc/meminfo", key).c_str(), nullptr, 10) * 1024;
}

// cgroup v2; "max", or no such file, is no limit.
int64_t cgroup_limit_bytes() {
  std::ifstream file("/sys/fs/cgroup/memory.max");
  int64_t bytes = 0;
  return file >> bytes ? bytes : std::numeric_limits<int64_t>::max();
}

int allowed_threads() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Host probe_host() {
  Host host;
  host.cpu = field("/proc/cpuinfo", "model name");
  if (host.cpu.empty()) host.cpu = "unknown";
  host.n_threads = allowed_threads();
  host.instruction_sets = cpu::instruction_sets();
  host.memory_bytes = std::min(meminfo_bytes("MemTotal"), cgroup_limit_bytes());
  host.available_bytes = std::min(meminfo_bytes("MemAvailable"), host.memory_bytes);
  return host;
}

}  // namespace ullage::runtime
