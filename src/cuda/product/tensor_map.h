// How the copy engine sees a matrix. Needs a CUDA driver, found through the runtime.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ullage::cuda {

// A [rows][cols] bf16 matrix, columns adjacent, row_stride a multiple of 8, 16-byte aligned; the
// box one copy brings.
bool encode_bf16_map(CUtensorMap* map, const void* data, int64_t rows, int64_t cols,
                     int64_t row_stride, int box_cols, int box_rows);

}  // namespace ullage::cuda
