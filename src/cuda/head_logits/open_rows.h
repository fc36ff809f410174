// A logits plan opened for whoever makes the logits himself, some rows at a time.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/head_logits/launch.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::lossk::cuda {

struct OpenRows {
  HeadParams params;  // of the kernels around the rows
  std::vector<RowPass> passes;
};

// What `plan.run` would launch with. `workspace` is the plan's and starts with the census. Matrices
// that `inputs` and `outputs` lack are the caller's to fill in, with the window of rows they hold.
OpenRows open_rows(const CudaHeadPlan& plan, const Inputs& inputs, const Outputs& outputs,
                   std::byte* workspace);

}  // namespace ullage::lossk::cuda
