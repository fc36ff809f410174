// One run of a plan on the CPU.
#pragma once

#include <cstddef>
#include <span>

#include "cpu/worker_pool.h"
#include "plan/head_plan.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk {

// The inputs and outputs were checked, and the workspace is layout.workspace_bytes. Allocates
// nothing.
void run_head(const HeadLayout& layout, const Inputs& inputs, const Outputs& outputs,
              std::span<std::byte> workspace, cpu::WorkerPool& pool);

}  // namespace ullage::lossk
