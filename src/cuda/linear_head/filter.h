// The filter's kernels on a stream.
#pragma once

#include "cuda/linear_head/part.h"
#include "ullage/status.h"

struct CUstream_st;

namespace ullage::lossk::cuda {

// Marks what the gradients of a part leave out, and lists what d_hidden takes.
Status start_filter(const LinearParams& r, const Part& part, CUstream_st* stream);

// Lists the groups of rows that each cluster tile of d_weight takes, `m_tiles` of them.
Status start_group_lists(const LinearParams& r, int m_tiles, int groups, CUstream_st* stream);

}  // namespace ullage::lossk::cuda
