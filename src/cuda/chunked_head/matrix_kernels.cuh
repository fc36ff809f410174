// The small kernels between the products: rows copied, columns summed, sums rounded.
#pragma once

#include "cuda/chunked_head/params.h"
#include "cuda/head_logits/element.cuh"
#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

// One block a row: hidden states from row `first` on to `to` [rows][d], zeros where the row is
// ignored, for its NaN times a gradient of 0 would be NaN in d_weight. Any type of T's size.
template <class T>
__global__ void __launch_bounds__(256)
    chunked_hidden_rows(const __grid_constant__ HeadParams p, const T* hidden, int64_t stride,
                        int64_t d_model, T* to) {
  const int64_t row = p.first_row + blockIdx.x;
  const bool counts = row_counts(p, row, stored_label(p, row));
  const T* const from = hidden + row * stride;
  T* const out = to + blockIdx.x * d_model;
  for (int64_t k = threadIdx.x; k < d_model; k += blockDim.x) out[k] = counts ? from[k] : T{};
}

// One block a row of `to` [rows][stride]: the bias, rounded. The products add to it.
template <class T>
__global__ void __launch_bounds__(256)
    chunked_bias_rows(RowFloats bias, int64_t vocab, T* to, int64_t stride) {
  T* const out = to + blockIdx.x * stride;
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x) {
    out[j] = from_float<T>(bias.data[j * bias.stride]);
  }
}

// sum[j * sum_stride] (+)= factor * sum over rows of g[row][j], a thread a column, in row order:
// one chain whatever the chunk.
template <class T>
__global__ void __launch_bounds__(256)
    chunked_column_sums(const T* g, int64_t stride, int64_t rows, int64_t vocab, float factor,
                        bool keeps_old, float* sum, int64_t sum_stride) {
  const int64_t column = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (column >= vocab) return;
  float total = keeps_old ? sum[column * sum_stride] : 0;
#pragma unroll 8
  for (int64_t row = 0; row < rows; ++row) {
    total += factor * to_float(g[row * stride + column]);
  }
  sum[column * sum_stride] = total;
}

// One block a row: the float32 sums [rows][cols], plus what `to` holds when accumulating, rounded
// once.
template <class T>
__global__ void __launch_bounds__(256)
    chunked_round_rows(const float* sums, int64_t cols, T* to, int64_t stride, bool accumulate) {
  const float* const from = sums + blockIdx.x * cols;
  T* const out = to + blockIdx.x * stride;
  for (int64_t k = threadIdx.x; k < cols; k += blockDim.x) {
    const float before = accumulate ? to_float(out[k]) : 0;
    out[k] = from_float<T>(from[k] + before);
  }
}

}  // namespace ullage::lossk::cuda
