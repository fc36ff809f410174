// The small kernels around the fused head's products: per row, one pass over its tile sums, its
// hidden states and its label's row of the weight; none over the logits.
#pragma once

#include "cuda/head_logits/element.cuh"
#include "cuda/head_logits/row_process.cuh"
#include "cuda/linear_head/params.h"
#include "cuda/product/epilogues.cuh"

namespace ullage::lossk::cuda {

using ullage::cuda::BlockedMatrix;
using ullage::cuda::kBlockColumns;
using ullage::cuda::sm90::kIgnoredRow;
using ullage::cuda::sm90::kNoLabel;

// Four adjacent numbers of type T, bf16 or f16; `element` is a multiple of 4.
template <class T>
__device__ inline float4 load_four(const void* base, int64_t element) {
  const uint2 words = *reinterpret_cast<const uint2*>(static_cast<const T*>(base) + element);
  const T* const x = reinterpret_cast<const T*>(&words);
  return {to_float(x[0]), to_float(x[1]), to_float(x[2]), to_float(x[3])};
}
template <class T>
__device__ inline void store_four(void* base, int64_t element, float4 v) {
  *reinterpret_cast<uint2*>(static_cast<T*>(base) + element) = {
      ullage::cuda::sm90::pack<T>(v.x, v.y), ullage::cuda::sm90::pack<T>(v.z, v.w)};
}

// A row from its tiles: `others` is the sum of all exponentials but the label's, relative to
// `shift`, which is that of the tiles; sum, log_prob: the label among them, relative to `top`.
struct RowTotals {
  float shift, others, top, sum, log_prob;
};

// A label beyond e^kFar times the shift of the others is what its row's sum is relative to, so that
// nothing overflows.
inline constexpr float kFar = 64;

// With the label's a = scale * z, where the row has one here: its log-probability is
// -log1p(others / e^a), which keeps its digits near 0. Nothing but -inf adds up to 0.
__device__ inline RowTotals with_label(float shift, float others, bool has_label, float a) {
  if (!has_label) return {shift, others, shift, others, 0};
  const bool beyond = a - shift > kFar;
  const float top = beyond ? a : shift;
  const float rest = beyond ? others * expf(shift - top) : others;
  const float sum = a == minus_infinity<float>() ? rest : rest + expf(a - top);
  const float odds = rest * expf(top - a);
  // Where that overflows the label adds nothing to the sum.
  return {shift, others, top, sum, odds < INFINITY ? -log1pf(odds) : (a - top) - logf(rest)};
}

// What a row's stored exponentials are relative to. bf16 takes them as they are. f16 wants a sum
// between 2^8 and 2^20, so that softmax_scale * unit * hidden has the range of hidden (run.cc), and
// exponentials below 2^16: where the sum is not, the largest step of e^4 at which it stays below
// e^13.8 and the others' below e^11.
template <class T>
__device__ inline float stored_shift(const RowTotals& row) {
  if constexpr (std::is_same_v<T, __half>) {
    const bool fits = row.top == row.shift && row.sum >= 0x1p8f && row.sum <= 0x1p20f;
    if (!fits && row.sum > 0 && row.sum < INFINITY) {
      const float others = row.others > 0 ? logf(row.others) + (row.shift - row.top) : -INFINITY;
      return row.top + 4 * rintf(fmaxf(logf(row.sum) - 11.8f, others - 9) / 4);
    }
  }
  return row.shift;
}

// Brings the tiles of row `row` of e whose shift is not the row's to it. `thread` of `threads`
// share the work.
template <class T>
__device__ inline void settle_row(const BlockedMatrix& e, int64_t row, const Pair* partial,
                                  int n_tiles, float shift, int thread, int threads) {
  constexpr int kTileBlocks = LogitsTile::kN / kBlockColumns;
  for (int tile = 0; tile < n_tiles; ++tile) {
    if (partial[tile].sum == 0 || partial[tile].shift == shift) continue;
    const float factor = expf(partial[tile].shift - shift);
    const int first = tile * kTileBlocks, end = min(first + kTileBlocks, e.n_blocks);
    for (int j = thread; j < (end - first) * kBlockColumns; j += threads) {
      T& value = static_cast<T*>(
          e.block(first + j / kBlockColumns))[row * kBlockColumns + j % kBlockColumns];
      value = from_float<T>(to_float(value) * factor);
    }
  }
}

// place_in_group for a row whose exponentials are relative to `shift` of scale * z: sums.sum
// becomes what the group's is relative to it, which may be infinite.
__device__ inline float place_shifted_in_group(const HeadParams& p, int64_t row,
                                               const RowInputs& in, float shift, RowSums& sums,
                                               float log_prob) {
  if (p.group_shift.data == nullptr) return log_prob_of_shard(in, sums, log_prob);
  const float group = float_at(p.group_shift, row, 0), most = group * p.scale;
  const float rest = float_at(p.group_log_sum, row, 0) + fmaf(group, p.scale, -most);
  sums.reference = most * kLog2E;
  sums.log2_sum = rest * kLog2E;
  sums.sum = expf((most - shift) + rest);
  return group_log_prob(p, row, in);
}

// The shift and log-sum of such a row, or its group's.
__device__ inline void report_shift(const HeadParams& p, int64_t row, float shift,
                                    const RowSums& sums, RowReport& to) {
  if (p.group_shift.data != nullptr) {
    to.shift = float_at(p.group_shift, row, 0);
    to.log_sum = float_at(p.group_log_sum, row, 0);
  } else {
    to.shift = shift / p.scale;
    const float off = sums.sum > 0 ? fmaf(to.shift, p.scale, -shift) : 0;
    to.log_sum = logf(sums.sum) - off;
  }
}

// Row `row` of hidden times its softmax_scale and the unit, as row `to` of scaled_hidden. Ignored
// rows are not read.
template <class T>
__device__ inline void scale_row(const LinearParams& r, int64_t row, int64_t to,
                                 float softmax_scale) {
  const bool ignored = r.columns[row] == kIgnoredRow;
  const float scale = softmax_scale * r.unit;
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    float4 x = {0, 0, 0, 0};
    if (!ignored) x = load_four<T>(r.hidden, row * r.hidden_stride + i);
    store_four<T>(r.scaled_hidden, to * r.d_model + i,
                  {scale * x.x, scale * x.y, scale * x.z, scale * x.w});
  }
}

template <class T>
__global__ void __launch_bounds__(128)
    linear_scale_rows(const __grid_constant__ LinearParams r, int64_t first_row) {
  const int64_t row = first_row + blockIdx.x;
  scale_row<T>(r, row, blockIdx.x, r.softmax_scale[row]);
}

// One block a row of the part that starts at `first_row`, in its group at `group_row`, whose
// exponentials are the rows of e from `e_row` on: from the tiles' sums to the terms and to the two
// factors of the row's gradient. The order of the sum over tiles depends on the vocabulary alone.
// `stored`: the exponentials are there.
template <class T>
__global__ void __launch_bounds__(128)
    linear_rows(const __grid_constant__ HeadParams p, const __grid_constant__ LinearParams r,
                const __grid_constant__ BlockedMatrix e, int64_t e_row, int64_t group_row,
                int64_t first_row, bool stored, bool gradients) {
  __shared__ float shared_shift, shared_scale;
  __shared__ bool shared_differ;
  const int local = blockIdx.x, lane = threadIdx.x;
  const int64_t row = first_row + local;
  const int column = r.columns[row];
  const int n_tiles = r.layout.n_tiles;
  const Pair* const partial = r.partial + int64_t{local} * n_tiles;
  if (threadIdx.x < 32) {
    RowInputs in;
    RowSums sums;
    RowCoefficients c;
    RowTotals totals = {};
    float log_prob = 0, kept_shift = 0;
    bool differ = false, finite = true;
    if (column != kIgnoredRow) {
      float shift = minus_infinity<float>();
      for (int tile = lane; tile < n_tiles; tile += 32) {
        // A tile of -inf alone sums to 0 and has no say.
        if (partial[tile].sum != 0) shift = ullage::cuda::ptx::max_nan(shift, partial[tile].shift);
      }
      shift = warp_max(shift);
      float others = 0;
      for (int tile = lane; tile < n_tiles; tile += 32) {
        const Pair at = partial[tile];
        if (at.sum == 0) continue;
        others += at.shift == shift ? at.sum : at.sum * expf(at.shift - shift);
      }
      totals =
          with_label(shift, warp_sum(others), column >= 0, column >= 0 ? r.label_logit[local] : 0);
      sums.sum = totals.sum;
      sums.log2_sum = log2f(sums.sum);
      sums.reference = totals.top * kLog2E;
      in = load_row_vectors(p, row, stored_label(p, row));
      log_prob = totals.log_prob;
      finite = sums.sum < INFINITY && totals.top < INFINITY;
      kept_shift = stored_shift<T>(totals);
      for (int tile = lane; tile < n_tiles; tile += 32)
        differ |= partial[tile].sum != 0 && partial[tile].shift != kept_shift;
      differ = __any_sync(~0u, differ);
      // After all that the shard's own sum decides.
      if (p.is_shard) log_prob = place_shifted_in_group(p, row, in, totals.top, sums, log_prob);
      const float gain = lane < p.n_terms ? p.census->gain[lane] : 0;
      c = evaluate_terms<Family::kLabels>(p, row, in, sums, gain, log_prob, lane, true);
    } else if (lane < p.n_terms) {
      p.row_losses[lane * p.n_tok + row] = 0;
    }
    const bool ignored = column == kIgnoredRow;
    RowReport said = row_report(p, row, !ignored && is_reported(p, in), in, sums, log_prob);
    if (!ignored) report_shift(p, row, totals.top, sums, said);
    write_outputs(p, row, said, lane);
    if (lane == 0) {
      if (!finite) report(p, row, Fault::kNonFinite);
      const float sum =
          kept_shift == totals.top ? sums.sum : sums.sum * expf(totals.top - kept_shift);
      const float scale = ignored ? 0.f : c.p / sum;
      r.softmax_scale[row] = scale;
      // q_y P - L with q_y - 1 taken whole, so that a label near certainty keeps its digits.
      if (r.row_shift != nullptr) r.row_shift[row] = kept_shift;
      if (r.filter.threshold > 0) r.filter.inverse_sum[row] = ignored ? 0.f : 1 / sum;
      r.label_gain[row] = column >= 0 ? fmaf(c.p, expm1f(log_prob), c.p - c.label) : 0.f;
      shared_shift = kept_shift;
      shared_scale = scale;
      shared_differ = differ;
    }
  }
  __syncthreads();
  if (stored && shared_differ)
    settle_row<T>(e, e_row + local, partial, n_tiles, shared_shift, threadIdx.x, blockDim.x);
  if (gradients && r.scaled_hidden != nullptr && !r.layout.strips)
    scale_row<T>(r, row, group_row + local, shared_scale);
}

// A warp a row of a slab: its exponentials of one range of the vocabulary, `columns` wide, relative
// to the row's shift.
template <class T>
__global__ void __launch_bounds__(256) linear_settle_strip(const __grid_constant__ LinearParams r,
                                                           const __grid_constant__ BlockedMatrix e,
                                                           int64_t first_row, int64_t columns) {
  const int64_t local = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  const int64_t row = first_row + local;
  if (local >= e.rows || r.columns[row] == kIgnoredRow) return;
  const int n_tiles = static_cast<int>((columns + LogitsTile::kN - 1) / LogitsTile::kN);
  const Pair* const partial = r.partial + local * n_tiles;
  const int lane = threadIdx.x % 32;
  bool differ = false;
  for (int tile = lane; tile < n_tiles; tile += 32)
    differ |= partial[tile].sum != 0 && partial[tile].shift != r.row_shift[row];
  if (!__any_sync(~0u, differ)) return;
  settle_row<T>(e, local, partial, n_tiles, r.row_shift[row], lane, 32);
}

// One block a row: d_hidden = softmax_scale * (sum of the vocabulary's slices, ascending) +
// label_gain * weight[label], rounded once.
template <class T>
__global__ void __launch_bounds__(256)
    linear_hidden_gradient(const __grid_constant__ LinearParams r, int64_t first_row,
                           int64_t rows) {
  const int local = blockIdx.x;
  const int64_t row = first_row + local;
  const int column = r.columns[row];
  const float scale = r.softmax_scale[row], gain = r.label_gain[row];
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    float4 out = {0, 0, 0, 0};
    if (r.accumulate) out = load_four<T>(r.d_hidden, row * r.d_hidden_stride + i);
    if (column != kIgnoredRow) {
      float4 sum = {0, 0, 0, 0};
      for (int slice = 0; slice < r.layout.vocab_slices; ++slice) {
        const float4 part =
            *reinterpret_cast<const float4*>(r.slices + (slice * rows + local) * r.d_model + i);
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
      }
      if (column >= 0) {
        const float4 w = load_four<T>(r.weight, column * r.weight_stride + i);
        out = {fmaf(gain, w.x, out.x), fmaf(gain, w.y, out.y), fmaf(gain, w.z, out.z),
               fmaf(gain, w.w, out.w)};
      }
      out = {fmaf(scale, sum.x, out.x), fmaf(scale, sum.y, out.y), fmaf(scale, sum.z, out.z),
             fmaf(scale, sum.w, out.w)};
    }
    store_four<T>(r.d_hidden, row * r.d_hidden_stride + i, out);
  }
}

// d_weight[label] += label_gain * hidden over the rows that share a label, in row order and in
// float64: a frequent label is the one sum of the head that grows with n_tok. One block a label, so
// no two blocks touch one row of d_weight. Labels outside [first_column, first_column + columns)
// are left to others; d_weight_sum starts at first_column. Rows that wait in label_sums are
// rounded.
template <class T>
__global__ void __launch_bounds__(256)
    linear_label_gradient(const __grid_constant__ LinearParams r, int64_t first_column,
                          int64_t columns) {
  const int64_t head = blockIdx.x;
  const int64_t column = r.columns[head] - first_column;
  if (!r.leads[head] || column < 0 || column >= columns) return;
  float* const out = r.label_sums != nullptr ? r.label_sums + head * r.d_model
                                             : r.d_weight_sum + column * r.d_weight_sum_stride;
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    const float4 before = *reinterpret_cast<const float4*>(out + i);
    double sum[4] = {before.x, before.y, before.z, before.w};
    for (int64_t row = head; row >= 0; row = r.next_row[row]) {
      const double gain = r.label_gain[row];
      const float4 x = load_four<T>(r.hidden, row * r.hidden_stride + i);
      sum[0] = fma(gain, static_cast<double>(x.x), sum[0]);
      sum[1] = fma(gain, static_cast<double>(x.y), sum[1]);
      sum[2] = fma(gain, static_cast<double>(x.z), sum[2]);
      sum[3] = fma(gain, static_cast<double>(x.w), sum[3]);
    }
    const float4 after = {static_cast<float>(sum[0]), static_cast<float>(sum[1]),
                          static_cast<float>(sum[2]), static_cast<float>(sum[3])};
    if (r.label_sums != nullptr) {
      store_four<T>(r.d_weight_rounded, column * r.d_weight_rounded_stride + i, after);
    } else {
      *reinterpret_cast<float4*>(out + i) = after;
    }
  }
}

// One block a vocabulary row from `first_column` on, where d_weight_sum starts: the float32 sum,
// plus what the caller's buffer holds when accumulating, rounded once.
template <class T>
__global__ void __launch_bounds__(256)
    linear_round_weight(const __grid_constant__ LinearParams r, int64_t first_column) {
  const int64_t row = blockIdx.x;
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    float4 sum = *reinterpret_cast<const float4*>(r.d_weight_sum + row * r.d_weight_sum_stride + i);
    if (r.accumulate) {
      const float4 old =
          load_four<T>(r.d_weight_rounded, (first_column + row) * r.d_weight_rounded_stride + i);
      sum = {sum.x + old.x, sum.y + old.y, sum.z + old.z, sum.w + old.w};
    }
    store_four<T>(r.d_weight_rounded, (first_column + row) * r.d_weight_rounded_stride + i, sum);
  }
}

}  // namespace ullage::lossk::cuda
