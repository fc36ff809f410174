// The small kernels around the fused head's products: per row, one pass over its tile sums, its
// hidden states and its label's row of the weight; none over the logits.
#pragma once

#include <cuda_bf16.h>

#include "cuda/head_logits/row_process.cuh"
#include "cuda/linear_head/params.h"
#include "cuda/product/epilogues.cuh"

namespace ullage::lossk::cuda {

using ullage::cuda::BlockedMatrix;
using ullage::cuda::kBlockColumns;
using ullage::cuda::sm90::kIgnoredRow;
using ullage::cuda::sm90::kNoLabel;

__device__ inline float4 load_bf16x4(const void* base, int64_t element) {
  const uint2 words =
      *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(base) + element);
  const float2 low = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(words.x));
  const float2 high = __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(words.y));
  return {low.x, low.y, high.x, high.y};
}
__device__ inline void store_bf16x4(void* base, int64_t element, float4 v) {
  *reinterpret_cast<uint2*>(static_cast<__nv_bfloat16*>(base) + element) = {
      ullage::cuda::sm90::pack_bf16(v.x, v.y), ullage::cuda::sm90::pack_bf16(v.z, v.w)};
}

inline constexpr int kColumnWarps = 8;

// A warp a row. Rows that share a label form a chain in row order; n_tok^2 compares of cached
// words.
__global__ void __launch_bounds__(32 * kColumnWarps)
    linear_columns(const __grid_constant__ HeadParams p, const __grid_constant__ LinearParams r) {
  const int64_t row = int64_t{blockIdx.x} * kColumnWarps + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (row >= p.n_tok) return;
  int mine = static_cast<int>(label_column(p, row));
  if (mine < 0) mine = row_counts(p, row, stored_label(p, row)) ? kNoLabel : kIgnoredRow;
  if (lane == 0) r.columns[row] = mine;
  if (r.next_row == nullptr) return;
  bool leads = mine >= 0;
  int64_t following = -1;
  for (int64_t base = 0; mine >= 0 && base < p.n_tok && following < 0; base += 32) {
    const int64_t other = base + lane;
    const unsigned equal = __ballot_sync(~0u, other < p.n_tok && label_column(p, other) == mine);
    // Bit i is row base + i.
    const int64_t at = row - base;
    const unsigned before = at >= 32 ? ~0u : at <= 0 ? 0u : (1u << at) - 1;
    const unsigned after = at < 0 ? ~0u : at >= 31 ? 0u : ~0u << (at + 1);
    if (equal & before) leads = false;
    if (equal & after) following = base + __ffs(equal & after) - 1;
  }
  if (lane == 0) {
    r.next_row[row] = static_cast<int>(following);
    r.leads[row] = leads;
    if (leads && r.label_slots != nullptr) r.label_slots[mine] = static_cast<int>(row);
  }
}

// Brings the tiles of row `row` of e whose shift is not the row's to it. `thread` of `threads`
// share the work.
__device__ inline void settle_row(const BlockedMatrix& e, int64_t row, const Pair* partial,
                                  int n_tiles, float shift, int thread, int threads) {
  constexpr int kTileBlocks = LogitsTile::kN / kBlockColumns;
  for (int tile = 0; tile < n_tiles; ++tile) {
    if (partial[tile].sum == 0 || partial[tile].shift == shift) continue;
    const float factor = expf(partial[tile].shift - shift);
    const int first = tile * kTileBlocks, end = min(first + kTileBlocks, e.n_blocks);
    for (int j = thread; j < (end - first) * kBlockColumns; j += threads) {
      __nv_bfloat16& value = static_cast<__nv_bfloat16*>(
          e.block(first + j / kBlockColumns))[row * kBlockColumns + j % kBlockColumns];
      value = __float2bfloat16(__bfloat162float(value) * factor);
    }
  }
}

// place_in_group for a row whose exponentials are relative to `shift` of scale * z: sums.sum
// becomes what the group's is relative to it, which may be infinite.
__device__ inline float place_shifted_in_group(const HeadParams& p, int64_t row,
                                               const RowInputs& in, float shift, RowSums& sums,
                                               float log_prob) {
  if (p.group_shift.data == nullptr) return place_in_group(p, row, in, sums, log_prob);
  const float group = float_at(p.group_shift, row, 0), most = group * p.scale;
  const float rest = float_at(p.group_log_sum, row, 0) + fmaf(group, p.scale, -most);
  sums.reference = most * kLog2E;
  sums.log2_sum = rest * kLog2E;
  sums.sum = expf((most - shift) + rest);
  return float_at(p.group_label_log_prob, row, 0);
}

// The shift and log-sum of such a row, or its group's.
__device__ inline void write_own_shift(const HeadParams& p, int64_t row, bool ignored, float shift,
                                       const RowSums& sums) {
  if (ignored) {
    write_shift(p, row, 0, 0);
  } else if (p.group_shift.data != nullptr) {
    write_shift(p, row, float_at(p.group_shift, row, 0), float_at(p.group_log_sum, row, 0));
  } else {
    const float unscaled = shift / p.scale;
    const float off = sums.sum > 0 ? fmaf(unscaled, p.scale, -shift) : 0;
    write_shift(p, row, unscaled, logf(sums.sum) - off);
  }
}

// One block a row of the part that starts at `first_row`, whose exponentials are the rows of e from
// `e_row` on: from the tiles' sums to the terms and to the two factors of the row's gradient. The
// order of the sum over tiles depends on the vocabulary alone.
__global__ void __launch_bounds__(128)
    linear_rows(const __grid_constant__ HeadParams p, const __grid_constant__ LinearParams r,
                const __grid_constant__ BlockedMatrix e, int64_t e_row, int64_t first_row,
                bool gradients) {
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
    float log_prob = 0, shift = 0;
    bool differ = false, finite = true;
    if (column != kIgnoredRow) {
      shift = minus_infinity<float>();
      for (int tile = lane; tile < n_tiles; tile += 32) {
        // A tile of -inf alone sums to 0 and has no say.
        if (partial[tile].sum != 0) shift = ullage::cuda::ptx::max_nan(shift, partial[tile].shift);
      }
      shift = warp_max(shift);
      float sum = 0;
      for (int tile = lane; tile < n_tiles; tile += 32) {
        const Pair at = partial[tile];
        if (at.sum == 0) continue;
        differ |= at.shift != shift;
        sum += at.shift == shift ? at.sum : at.sum * expf(at.shift - shift);
      }
      sums.sum = warp_sum(sum);
      sums.log2_sum = log2f(sums.sum);
      sums.reference = shift * kLog2E;
      differ = __any_sync(~0u, differ);
      in = load_row_vectors(p, row, stored_label(p, row));
      if (column >= 0) log_prob = (r.label_logit[local] - shift) - logf(sums.sum);
      finite = sums.sum < INFINITY && shift < INFINITY;
      if (p.is_shard) log_prob = place_shifted_in_group(p, row, in, shift, sums, log_prob);
      const float gain = lane < p.n_terms ? p.census->gain[lane] : 0;
      c = evaluate_terms<Family::kLabels>(p, row, in, sums, gain, log_prob, lane, true);
    } else if (lane < p.n_terms) {
      p.row_losses[lane * p.n_tok + row] = 0;
    }
    if (lane == 0) {
      write_row(p, row, column != kIgnoredRow && is_reported(p, in), in, sums, log_prob);
      write_own_shift(p, row, column == kIgnoredRow, shift, sums);
      if (!finite) report(p, row, Fault::kNonFinite);
      const float scale = column == kIgnoredRow ? 0.f : c.p / sums.sum;
      r.softmax_scale[row] = scale;
      // q_y P - L with q_y - 1 taken whole, so that a label near certainty keeps its digits.
      if (r.row_shift != nullptr) r.row_shift[row] = shift;
      if (r.filter.threshold > 0)
        r.filter.inverse_sum[row] = column == kIgnoredRow ? 0.f : 1 / sums.sum;
      r.label_gain[row] = column >= 0 ? fmaf(c.p, expm1f(log_prob), c.p - c.label) : 0.f;
      shared_shift = shift;
      shared_scale = scale;
      shared_differ = differ;
    }
  }
  __syncthreads();
  if (!gradients) return;
  if (shared_differ && r.layout.strip == 0) {
    settle_row(e, e_row + local, partial, n_tiles, shared_shift, threadIdx.x, blockDim.x);
  }
  if (r.scaled_hidden == nullptr) return;
  const float scale = shared_scale;
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    float4 x = {0, 0, 0, 0};
    if (column != kIgnoredRow) x = load_bf16x4(r.hidden, row * r.hidden_stride + i);
    store_bf16x4(r.scaled_hidden, (e_row + local) * r.d_model + i,
                 {scale * x.x, scale * x.y, scale * x.z, scale * x.w});
  }
}

// A warp a row: its exponentials of one strip, `columns` wide, relative to the row's shift.
__global__ void __launch_bounds__(256)
    linear_settle_strip(const __grid_constant__ LinearParams r,
                        const __grid_constant__ BlockedMatrix e, int64_t columns) {
  const int64_t row = int64_t{blockIdx.x} * (blockDim.x / 32) + threadIdx.x / 32;
  if (row >= r.n_tok || r.columns[row] == kIgnoredRow) return;
  const Pair* const partial = r.partial + row * r.layout.strip_tiles;
  const int n_tiles = static_cast<int>((columns + LogitsTile::kN - 1) / LogitsTile::kN);
  const int lane = threadIdx.x % 32;
  bool differ = false;
  for (int tile = lane; tile < n_tiles; tile += 32)
    differ |= partial[tile].sum != 0 && partial[tile].shift != r.row_shift[row];
  if (!__any_sync(~0u, differ)) return;
  settle_row(e, row, partial, n_tiles, r.row_shift[row], lane, 32);
}

// The share of its softmax that row `local` of the part has in a tile, its label's column apart,
// which is not among the exponentials: a bound from above. NaN counts as all.
__device__ inline float share_of(const LinearParams& r, int64_t first_row, int64_t local,
                                 int tile) {
  const int64_t row = first_row + local;
  const Pair sums = r.partial[local * r.layout.n_tiles + tile];
  const float inverse = r.filter.inverse_sum[row], shift = r.row_shift[row];
  if (inverse == 0 || sums.sum == 0) return 0;
  float share = sums.sum * inverse * (sums.shift == shift ? 1 : expf(sums.shift - shift));
  const int column = r.columns[row];
  if (column >= 0 && column / LogitsTile::kN == tile) {
    // Two ways to the same exponential agree to 2^-21.
    const float label = expf(r.label_logit[local] - shift) * inverse;
    share = fmaxf(share - label, 0.0f) + 0x1p-20f * label;
  }
  return share <= 1 ? share : 1;
}

// A thread a column tile, a block row a group of rows: a tile is kept if any row has more there
// than the threshold.
__global__ void __launch_bounds__(128)
    linear_mark_tiles(const __grid_constant__ LinearParams r, int64_t first_row, int64_t rows,
                      int64_t e_row) {
  const int tile = blockIdx.x * 128 + threadIdx.x, n_tiles = r.layout.n_tiles;
  if (tile >= n_tiles) return;
  const int64_t first = blockIdx.y * kChunkRows, end = min(first + kChunkRows, rows);
  bool kept = false;
  for (int64_t local = first; local < end && !kept; ++local) {
    kept = share_of(r, first_row, local, tile) > r.filter.threshold;
  }
  r.filter.kept[(e_row / kChunkRows + blockIdx.y) * n_tiles + tile] = kept;
}

// A warp a row: what of its softmax lies in tiles left out.
__global__ void __launch_bounds__(256)
    linear_skipped_mass(const __grid_constant__ LinearParams r, int64_t first_row, int64_t rows,
                        int64_t e_row) {
  const int64_t local = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (local >= rows) return;
  const int lane = threadIdx.x % 32, n_tiles = r.layout.n_tiles;
  const uint8_t* const kept = r.filter.kept + (e_row + local) / kChunkRows * n_tiles;
  float share = 0;
  for (int tile = lane; tile < n_tiles; tile += 32) {
    if (kept[tile] == 0) share += share_of(r, first_row, local, tile);
  }
  share = warp_sum(share);
  if (lane != 0) return;
  const int64_t row = first_row + local;
  const float sum = r.filter.inverse_sum[row] == 0 ? 0 : 1 / r.filter.inverse_sum[row];
  r.filter.skipped[row] = {share, share * fabsf(r.softmax_scale[row]) * sum};
}

// A warp: where `kept(i)`, i from 0 to n - 1, into a list in ascending order; its length.
template <class Kept>
__device__ inline int list_kept(int n, int* entries, const Kept& kept) {
  const int lane = threadIdx.x % 32;
  int count = 0;
  for (int base = 0; base < n; base += 32) {
    const unsigned votes = __ballot_sync(~0u, base + lane < n && kept(base + lane));
    if (votes >> lane & 1) entries[count + __popc(votes & ((1u << lane) - 1))] = base + lane;
    count += __popc(votes);
  }
  return count;
}

// A warp a group of a part's rows: the column tiles that d_hidden takes.
__global__ void __launch_bounds__(32)
    linear_list_tiles(const __grid_constant__ LinearParams r, int64_t first_row, int64_t e_row) {
  const int n_tiles = r.layout.n_tiles;
  const uint8_t* const kept = r.filter.kept + (e_row / kChunkRows + blockIdx.x) * n_tiles;
  const int count = list_kept(n_tiles, r.filter.tile_entries + int64_t{blockIdx.x} * n_tiles,
                              [&](int tile) { return kept[tile] != 0; });
  if (threadIdx.x == 0) r.filter.tile_counts[first_row / kChunkRows + blockIdx.x] = count;
}

// A warp a cluster tile of d_weight, the first at `first_column`: the groups of rows that it takes.
__global__ void __launch_bounds__(32)
    linear_list_groups(const __grid_constant__ LinearParams r, int64_t first_column, int groups) {
  constexpr int kColumns = GradientTile::kM * GradientTile::kClusterM;
  const int n_tiles = r.layout.n_tiles;
  const int64_t column = first_column + int64_t{blockIdx.x} * kColumns;
  const int first = static_cast<int>(column / LogitsTile::kN);
  const int end = min(static_cast<int>((column + kColumns - 1) / LogitsTile::kN) + 1, n_tiles);
  const int count =
      list_kept(groups, r.filter.group_entries + int64_t{blockIdx.x} * groups, [&](int group) {
        bool kept = false;
        for (int tile = first; tile < end; ++tile)
          kept |= r.filter.kept[int64_t{group} * n_tiles + tile] != 0;
        return kept;
      });
  if (threadIdx.x == 0) r.filter.group_counts[blockIdx.x] = count;
}

// One block a row: d_hidden = softmax_scale * (sum of the vocabulary's slices, ascending) +
// label_gain * weight[label], rounded once.
__global__ void __launch_bounds__(256)
    linear_hidden_gradient(const __grid_constant__ LinearParams r, int64_t first_row,
                           int64_t rows) {
  const int local = blockIdx.x;
  const int64_t row = first_row + local;
  const int column = r.columns[row];
  const float scale = r.softmax_scale[row], gain = r.label_gain[row];
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    float4 out = {0, 0, 0, 0};
    if (r.accumulate) out = load_bf16x4(r.d_hidden, row * r.d_hidden_stride + i);
    if (column != kIgnoredRow) {
      float4 sum = {0, 0, 0, 0};
      for (int slice = 0; slice < r.layout.vocab_slices; ++slice) {
        const float4 part =
            *reinterpret_cast<const float4*>(r.slices + (slice * rows + local) * r.d_model + i);
        sum = {sum.x + part.x, sum.y + part.y, sum.z + part.z, sum.w + part.w};
      }
      if (column >= 0) {
        const float4 w = load_bf16x4(r.weight, column * r.weight_stride + i);
        out = {fmaf(gain, w.x, out.x), fmaf(gain, w.y, out.y), fmaf(gain, w.z, out.z),
               fmaf(gain, w.w, out.w)};
      }
      out = {fmaf(scale, sum.x, out.x), fmaf(scale, sum.y, out.y), fmaf(scale, sum.z, out.z),
             fmaf(scale, sum.w, out.w)};
    }
    store_bf16x4(r.d_hidden, row * r.d_hidden_stride + i, out);
  }
}

// d_weight[label] += label_gain * hidden over the rows that share a label, in row order and in
// float64: a frequent label is the one sum of the head that grows with n_tok. One block a label, so
// no two blocks touch one row of d_weight. Labels outside [first_column, first_column + columns)
// are left to others; d_weight_sum starts at first_column. Rows that wait in label_sums are
// rounded.
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
      const float4 x = load_bf16x4(r.hidden, row * r.hidden_stride + i);
      sum[0] = fma(gain, static_cast<double>(x.x), sum[0]);
      sum[1] = fma(gain, static_cast<double>(x.y), sum[1]);
      sum[2] = fma(gain, static_cast<double>(x.z), sum[2]);
      sum[3] = fma(gain, static_cast<double>(x.w), sum[3]);
    }
    const float4 after = {static_cast<float>(sum[0]), static_cast<float>(sum[1]),
                          static_cast<float>(sum[2]), static_cast<float>(sum[3])};
    if (r.label_sums != nullptr) {
      store_bf16x4(r.d_weight_rounded, column * r.d_weight_rounded_stride + i, after);
    } else {
      *reinterpret_cast<float4*>(out + i) = after;
    }
  }
}

// One block a vocabulary row from `first_column` on, where d_weight_sum starts: the float32 sum,
// plus what the caller's buffer holds when accumulating, rounded once.
__global__ void __launch_bounds__(256)
    linear_round_weight(const __grid_constant__ LinearParams r, int64_t first_column) {
  const int64_t row = blockIdx.x;
  for (int64_t i = 4 * threadIdx.x; i < r.d_model; i += 4 * blockDim.x) {
    float4 sum = *reinterpret_cast<const float4*>(r.d_weight_sum + row * r.d_weight_sum_stride + i);
    if (r.accumulate) {
      const float4 old =
          load_bf16x4(r.d_weight_rounded, (first_column + row) * r.d_weight_rounded_stride + i);
      sum = {sum.x + old.x, sum.y + old.y, sum.z + old.z, sum.w + old.w};
    }
    store_bf16x4(r.d_weight_rounded, (first_column + row) * r.d_weight_rounded_stride + i, sum);
  }
}

}  // namespace ullage::lossk::cuda
