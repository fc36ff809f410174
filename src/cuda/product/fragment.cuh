// How a consumer warpgroup's accumulators map to a [128][kN] tile, and stores that fill whole
// sectors from them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace ullage::cuda::sm90 {

// Row within the tile of acc[half][4 j + 2 pair], for the thread of a 128-thread warpgroup.
__device__ __forceinline__ int fragment_row(int thread, int half, int pair) {
  return half * 64 + (thread / 32) * 16 + (thread % 32) / 4 + pair * 8;
}

// Each of the 4 threads of a quad holds columns {2 t, 2 t + 1} of four 8-column blocks; afterwards
// thread t holds all 8 columns of block t. A 4 x 4 transpose of 32-bit words in four shuffles.
__device__ __forceinline__ uint4 quad_transpose(uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3,
                                                int thread) {
  const bool odd = thread & 1, high = thread & 2;
  uint32_t x = __shfl_xor_sync(0xffffffffu, odd ? w0 : w1, 1);
  uint32_t y = __shfl_xor_sync(0xffffffffu, odd ? w2 : w3, 1);
  if (odd) {
    w0 = x, w2 = y;
  } else {
    w1 = x, w3 = y;
  }
  x = __shfl_xor_sync(0xffffffffu, high ? w0 : w2, 2);
  y = __shfl_xor_sync(0xffffffffu, high ? w1 : w3, 2);
  if (high) {
    w0 = x, w1 = y;
  } else {
    w2 = x, w3 = y;
  }
  return {w0, w1, w2, w3};
}

// Two values rounded to T, bf16 or f16, in one word.
template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  if constexpr (std::is_same_v<T, __half>) {
    const __half2 pair = __floats2half2_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  } else {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const uint32_t&>(pair);
  }
}

}  // namespace ullage::cuda::sm90
