// From a plan and filled parameters to kernels on a stream. Without CUDA in the build it answers
// 621.
#pragma once

#include "cuda/linear_head/params.h"
#include "ullage/status.h"

struct CUstream_st;

namespace ullage::lossk::cuda {

// `rows` carries the terms and the row vectors; what it says of logits is not used.
Status launch_linear_head(const HeadParams& rows, const LinearParams& linear, CUstream_st* stream);

}  // namespace ullage::lossk::cuda
