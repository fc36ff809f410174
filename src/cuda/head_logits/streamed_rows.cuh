// head_rows_sm80_streamed: a block a row, read where it lies. Three reads of a row, of which the
// second and third hit L1 or L2 while (rows at work) x (row bytes) fit it: 108 blocks of 297 KiB on
// an A100 do.
#pragma once

#include "cuda/head_logits/row_process.cuh"

namespace ullage::lossk::cuda {

template <class Kind>
struct StreamedStrips {
  using T = typename Kind::Element;

  const HeadParams& p;
  int64_t row;
  float* partials;  // [n_partials][kMaxStrips], shared
  int warp, lane, n_warps;

  __device__ int first() const { return warp * p.strips_per_warp; }
  __device__ int last() const { return min(first() + p.strips_per_warp, p.n_strips); }

  __device__ StreamedStrip<T> columns_at(const void* data, int64_t stride, int from, int n) const {
    const T* columns = static_cast<const T*>(data) + (row - p.first_row) * stride +
                       int64_t{from} * p.strip_columns;
    return {columns, n, is_aligned(columns)};
  }
  __device__ StreamedStrip<T> student(int strip) const {
    return columns_at(p.logits, p.logits_stride, strip, columns_of(p, strip));
  }
  __device__ StreamedStrip<T> teacher(int strip) const {
    return columns_at(p.teacher, p.teacher_stride, strip, columns_of(p, strip));
  }
  __device__ StreamedStrip<T> student_span() const {
    return columns_at(p.logits, p.logits_stride, first(), columns_between(p, first(), last()));
  }
  __device__ StreamedStrip<T> teacher_span() const {
    return columns_at(p.teacher, p.teacher_stride, first(), columns_between(p, first(), last()));
  }
  __device__ T* gradient_span() const {
    return static_cast<T*>(p.gradient) + (row - p.first_row) * p.gradient_stride +
           int64_t{first()} * p.strip_columns;
  }
  __device__ bool gradient_aligned() const { return is_aligned(gradient_span()); }
  __device__ void gradient_written() {}

  __device__ void publish_sum(SumPartial which, int strip, float value) {
    if (lane == 0) partials[which * kMaxStrips + strip] = value;
  }
  __device__ void publish_extra(ExtraPartial which, int strip, float value) {
    if (lane == 0) partials[(kSums<Kind::kFamily> + which) * kMaxStrips + strip] = value;
  }
  __device__ void finish_sums() { __syncthreads(); }
  __device__ void finish_extras() { __syncthreads(); }
  __device__ const float* sums(SumPartial which) const { return partials + which * kMaxStrips; }
  __device__ const float* extras(ExtraPartial which) const {
    return partials + (kSums<Kind::kFamily> + which) * kMaxStrips;
  }
  __device__ float gain() const {
    ullage::cuda::ptx::wait_for_previous_kernel();
    return lane < p.n_terms ? p.census->gain[lane] : 0.0f;
  }
};

template <class Kind>
__global__ void __launch_bounds__(512, 2) streamed_rows(const __grid_constant__ HeadParams p) {
  extern __shared__ __align__(16) float streamed_partials[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int n_warps = static_cast<int>(blockDim.x) / 32;
  for (int64_t row = p.first_row + blockIdx.x; row < end_row(p); row += gridDim.x) {
    const int64_t label = stored_label(p, row);
    StreamedStrips<Kind> strips{p, row, streamed_partials, warp, lane, n_warps};
    if (!row_counts(p, row, label)) {
      ullage::cuda::ptx::wait_for_previous_kernel();
      clear_row<typename Kind::Element>(p, row, strips.first(), strips.last(), warp == 0);
      continue;
    }
    const RowInputs in = load_row_inputs<typename Kind::Element>(p, row, label);
    process_row<Kind>(p, row, in, strips, lane, warp == 0);
    __syncthreads();  // every warp has read this row's partials
  }
}

struct StreamedRows {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&streamed_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
