// How the copy engine sees a matrix. Needs a CUDA driver, found through the runtime.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace ullage::cuda {

// A [rows][cols] matrix of 16-bit numbers, columns adjacent, row_stride a multiple of 8, 16-byte
// aligned; the box one copy brings.
bool encode_map(CUtensorMap* map, const void* data, int64_t rows, int64_t cols, int64_t row_stride,
                int box_cols, int box_rows);

// The same as [ranges][blocks][rows][64], blocks of adjacent rows, ranges range_stride elements
// apart (a multiple of 8), 16-byte aligned; a copy brings 64 rows of a block.
bool encode_block_map(CUtensorMap* map, const void* data, int64_t ranges, int64_t blocks,
                      int64_t rows, int64_t range_stride);

// An f32 [slices][rows][cols] tensor, slices adjacent, row_stride a multiple of 4, 16-byte aligned;
// a copy stores 64 rows of 32 columns.
bool encode_sum_map(CUtensorMap* map, float* data, int64_t slices, int64_t rows, int64_t cols,
                    int64_t row_stride);

// The same of one matrix of 16-bit numbers, row_stride a multiple of 8; a copy stores 64 rows of 64
// columns.
bool encode_store_map(CUtensorMap* map, void* data, int64_t rows, int64_t cols, int64_t row_stride);

}  // namespace ullage::cuda
