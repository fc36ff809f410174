// From a plan and filled parameters to kernels on a stream. Without CUDA in the build it answers
// 621.
#pragma once

#include <vector>

#include "cuda/linear_head/params.h"
#include "ullage/status.h"

struct CUstream_st;

namespace ullage::lossk::cuda {

// `rows` carries the terms and the row vectors; what it says of logits is not used.
Status launch_linear_head(const HeadParams& rows, const LinearParams& linear, CUstream_st* stream);

// What the filter of the last run left out of each row, and the tiles that it kept of each group of
// kChunkRows rows. Waits for the stream.
Status read_filter(const LinearParams& linear, std::vector<SkippedMass>& rows,
                   std::vector<int>& counts, CUstream_st* stream);

}  // namespace ullage::lossk::cuda
