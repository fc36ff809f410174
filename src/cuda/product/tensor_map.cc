#include "cuda/product/tensor_map.h"

#include <array>

namespace ullage::cuda {
namespace {

using Encode = CUresult (*)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                            const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                            CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                            CUtensorMapFloatOOBfill);

// The driver's function, found through the runtime so that nothing links libcuda.
Encode encoder() {
  static const Encode function = [] {
    void* entry = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault,
                                         &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess) {
      entry = nullptr;
    }
    return reinterpret_cast<Encode>(entry);
  }();
  return function;
}

// Sizes and the box from the innermost dimension on; strides in bytes, of all but the innermost.
bool encode(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, const void* data,
            std::array<int64_t, 4> sizes, std::array<int64_t, 3> strides, std::array<int, 4> box) {
  if (encoder() == nullptr) return false;
  cuuint64_t size[4], stride[3];
  cuuint32_t extent[4], step[4];
  for (cuuint32_t i = 0; i < rank; ++i) {
    size[i] = static_cast<cuuint64_t>(sizes[i]);
    extent[i] = static_cast<cuuint32_t>(box[i]);
    step[i] = 1;
    if (i + 1 < rank) stride[i] = static_cast<cuuint64_t>(strides[i]);
  }
  return encoder()(map, type, rank, const_cast<void*>(data), size, stride, extent, step,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                   CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool encode_map(CUtensorMap* map, const void* data, int64_t rows, int64_t cols, int64_t row_stride,
                int box_cols, int box_rows) {
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, data, {cols, rows}, {row_stride * 2},
                {box_cols, box_rows});
}

bool encode_block_map(CUtensorMap* map, const void* data, int64_t ranges, int64_t blocks,
                      int64_t rows, int64_t range_stride) {
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, {64, rows, blocks, ranges},
                {128, rows * 128, range_stride * 2}, {64, 64, 1, 1});
}

bool encode_store_map(CUtensorMap* map, void* data, int64_t rows, int64_t cols,
                      int64_t row_stride) {
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, data, {cols, rows, 1},
                {row_stride * 2, rows * row_stride * 2}, {64, 64, 1});
}

bool encode_sum_map(CUtensorMap* map, float* data, int64_t slices, int64_t rows, int64_t cols,
                    int64_t row_stride) {
  return encode(map, CU_TENSOR_MAP_DATA_TYPE_FLOAT32, 3, data, {cols, rows, slices},
                {row_stride * 4, rows * row_stride * 4}, {32, 64, 1});
}

}  // namespace ullage::cuda
