// What a run's workspace must be, and what its status word said.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "contract/head_validate.h"
#include "cuda/head_logits/params.h"

struct CUstream_st;

namespace ullage::lossk::cuda {

Status check_workspace(std::span<const std::byte> workspace, int64_t needed_bytes);

// Waits for the stream; 586, 625, 692, 693 or 694 with the first refused row, or 620.
Status report_census(const Census* device, const LabelRange& labels, CUstream_st* stream);

}  // namespace ullage::lossk::cuda
