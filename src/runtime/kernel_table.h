// The kernels of this build in order of preference, and what each needs.
#pragma once

#include <string>
#include <vector>

#include "ullage/status.h"

namespace ullage {

struct KernelEntry {
  std::string name;       // "head_cpu_avx3"
  std::string operation;  // "head"
  std::string required;
  std::string supported;  // what it computes
  std::string missing;    // empty where it runs here
};

// Best first.
std::vector<KernelEntry> kernel_table();

// The kernel a plan of the losses gets: the first that runs here, or the one that the environment
// variable ULLAGE_FORCE_KERNEL names (698 where there is none of that name, or it does not run
// here). Makes the CPU kernels of the process use its instruction set: call it where no kernel
// runs.
Result<std::string> choose_head_kernel();

}  // namespace ullage
