// What is on this machine, for plans and for people.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace ullage::runtime {

struct Host {
  std::string cpu;                                 // the processor's own name, or "unknown"
  int n_threads = 1;                               // that this process may run at once
  std::vector<std::string_view> instruction_sets;  // of the CPU kernels, best first
  int64_t memory_bytes = 0;                        // this process may have: the machine's, or a
                                                   // control group's limit where that is less
  int64_t available_bytes = 0;                     // free now, or easily freed
};

Host probe_host();

}  // namespace ullage::runtime
