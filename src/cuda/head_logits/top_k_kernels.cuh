// The kernels around the rows' own where a teacher gives its k likeliest ids.
#pragma once

#include "cuda/head_logits/top_k.cuh"

namespace ullage::lossk::cuda {

inline constexpr int kGatherThreads = 256, kPatchWarps = 8;

// The largest of a lane's columns and the sum of their powers of two beside it.
struct OthersSum {
  float max = minus_infinity<float>(), sum = 0;

  __device__ void add(const HeadParams& p, const float (&x)[8]) {
    using ullage::cuda::ptx::exp2_approx;
    using ullage::cuda::ptx::max_nan;
    float most = max;
#pragma unroll
    for (int i = 0; i < 8; ++i) most = max_nan(most, x[i]);
    if (most == minus_infinity<float>()) return;
    const float reference = most * p.log2_scale;
    if (most > max) sum *= exp2_approx(reference_of(max, p.log2_scale) - reference);
    max = most;
    float e[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) e[i] = exp2_approx(fmaf(x[i], p.log2_scale, -reference));
    sum += tree_sum(e);
  }
  // To the warp's.
  __device__ OthersSum warp_total(const HeadParams& p) const {
    OthersSum total;
    total.max = warp_max(max);
    const float by = max == minus_infinity<float>()
                         ? 0.0f
                         : max * p.log2_scale - reference_of(total.max, p.log2_scale);
    total.sum = warp_sum(sum * ullage::cuda::ptx::exp2_approx(by));
    return total;
  }
};

// A block a row. Refuses ids outside the vocabulary, ids given twice and log-probabilities above 0;
// keeps the ids' logits and what the gradient holds there; sums the other columns. Shared memory: a
// bit a column, in whole words.
template <class T>
__global__ void __launch_bounds__(kGatherThreads)
    gather_top_k(const __grid_constant__ HeadParams p) {
  extern __shared__ unsigned top_k_columns[];
  __shared__ OthersSum of_warps[kGatherThreads / 32];
  static_assert(sizeof of_warps <= kTopKSumsBytes);
  const int64_t row = p.first_row + blockIdx.x;
  if (!row_counts(p, row, stored_label(p, row))) return;
  const int lane = threadIdx.x % 32, warp = ullage::cuda::ptx::warp_of_block();
  const int64_t words = (p.vocab + 31) / 32;
  for (int64_t i = threadIdx.x; i < words; i += blockDim.x) top_k_columns[i] = 0;
  __syncthreads();
  const T* const logits = static_cast<const T*>(p.logits) + blockIdx.x * p.logits_stride;
  const T* const held = static_cast<const T*>(p.gradient) + blockIdx.x * p.gradient_stride;
  for (int b = threadIdx.x; b < p.top_k; b += blockDim.x) {
    const int64_t id = top_k_id(p, row, b);
    bool taken = id >= 0 && id < p.vocab && top_k_log_p(p, row, b) <= 0;
    if (taken) {
      const unsigned bit = 1u << id % 32;
      taken = (atomicOr(&top_k_columns[id / 32], bit) & bit) == 0;
    }
    if (!taken) report(p, row, Fault::kTopK);
    const bool there = id >= 0 && id < p.vocab;
    p.top_k_logits[row * p.top_k + b] = there ? to_float(logits[id]) : 0.0f;
    if (p.gradient != nullptr && p.accumulate) {
      p.top_k_held[row * p.top_k + b] = there ? to_float(held[id]) : 0.0f;
    }
  }
  __syncthreads();
  if (!p.wants_others) return;
  OthersSum mine;
  const bool aligned = is_aligned(logits);
  for (int64_t column = threadIdx.x * kLaneColumns; column < p.vocab;
       column += int64_t{kGatherThreads} * kLaneColumns) {
    const int valid = static_cast<int>(min(p.vocab - column, int64_t{kLaneColumns}));
    const unsigned taken = top_k_columns[column / 32] >> column % 32 & 0xffu;
    float x[8];
    unpack(load_vector(logits + column, valid, aligned), x);
    if (p.softcap > 0) soften(p, x, valid);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (taken >> i & 1) x[i] = minus_infinity<float>();
    }
    mine.add(p, x);
  }
  mine = mine.warp_total(p);
  if (lane == 0) of_warps[warp] = mine;
  __syncthreads();
  if (warp != 0) return;
  OthersSum all;
  if (lane < kGatherThreads / 32) all = of_warps[lane];
  all = all.warp_total(p);
  if (lane == 0) {
    p.top_k_others[row * 2] = reference_of(all.max, p.log2_scale);
    p.top_k_others[row * 2 + 1] = log2f(all.sum);
  }
}

// A warp a row: the k columns of its gradient, from the kept logits.
template <class T>
__global__ void __launch_bounds__(32 * kPatchWarps)
    patch_top_k(const __grid_constant__ HeadParams p) {
  const int64_t at = int64_t{blockIdx.x} * kPatchWarps + threadIdx.x / 32, row = p.first_row + at;
  const int lane = threadIdx.x % 32;
  if (at >= p.n_rows) return;
  const int64_t label = stored_label(p, row);
  if (!row_counts(p, row, label)) return;
  const RowWord& word = static_cast<const RowWord*>(p.row_words)[row];
  const RowInputs in = load_row_vectors(p, row, label);
  T* const gradient = static_cast<T*>(p.gradient) + at * p.gradient_stride;
  TopKLoss totals[kMaxTerms];
  for (int t = 0; t < p.n_terms; ++t) {
    if (p.terms[t].top_k) totals[t] = top_k_loss(p, p.terms[t], row, word.sums, lane);
  }
  for (int b = lane; b < p.top_k; b += 32) {
    const int64_t id = top_k_id(p, row, b);
    if (id < 0 || id >= p.vocab) continue;
    const float stored = top_k_logits_of(p, row)[b];
    const float x = p.softcap > 0 ? softcapped(p, stored) : stored;
    const float log_p = top_k_log_p(p, row, b), log_q = log_q_of(p, word.sums, stored);
    float g = word.scales.student *
              ullage::cuda::ptx::exp2_approx(fmaf(x, p.log2_scale, -word.sums.reference));
    if (word.c.uniform != 0) g -= word.c.uniform * float_at(p.class_weights, id, 1);
    if (id == word.label) g -= word.c.label;
    for (int t = 0; t < p.n_terms; ++t) {
      const TermParams& term = p.terms[t];
      if (!term.top_k || term.weight == 0 || !term_counts(p, term, row, in)) continue;
      const float slope = p.census->gain[t] * in.upstream * term.scale * term.loss_scale;
      g += slope * top_k_delta(p, term, totals[t], log_p, log_q);
    }
    if (p.softcap > 0) {
      const float tanh_value = x * p.inverse_softcap;
      g *= fmaf(-tanh_value, tanh_value, 1.0f);
    }
    if (p.accumulate) g += p.top_k_held[row * p.top_k + b];
    gradient[id] = from_float<T>(g);
  }
}

}  // namespace ullage::lossk::cuda
