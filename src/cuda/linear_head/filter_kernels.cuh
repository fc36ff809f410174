// What the gradients leave out: tiles marked, the mass of them, and lists of what is kept.
#pragma once

#include "cuda/head_logits/row_process.cuh"
#include "cuda/linear_head/params.h"

namespace ullage::lossk::cuda {

// The share of its softmax that row `local` of the part has in a tile, its label's column apart.
// NaN counts as all.
__device__ inline float share_of(const LinearParams& r, int64_t first_row, int64_t local,
                                 int tile) {
  const int64_t row = first_row + local;
  const Pair sums = r.partial[local * r.layout.n_tiles + tile];
  const float inverse = r.filter.inverse_sum[row], shift = r.row_shift[row];
  if (inverse == 0 || sums.sum == 0) return 0;
  const float share = sums.sum * inverse * (sums.shift == shift ? 1 : expf(sums.shift - shift));
  return share <= 1 ? share : 1;
}

// A thread a column tile, a block row a group of rows: a tile is kept if any row has more there
// than the threshold.
__global__ void __launch_bounds__(128)
    linear_mark_tiles(const __grid_constant__ LinearParams r, int64_t first_row, int64_t rows,
                      int64_t group_row) {
  const int tile = blockIdx.x * 128 + threadIdx.x, n_tiles = r.layout.n_tiles;
  if (tile >= n_tiles) return;
  const int64_t first = blockIdx.y * kChunkRows, end = min(first + kChunkRows, rows);
  bool kept = false;
  for (int64_t local = first; local < end && !kept; ++local) {
    kept = share_of(r, first_row, local, tile) > r.filter.threshold;
  }
  r.filter.kept[(group_row / kChunkRows + blockIdx.y) * n_tiles + tile] = kept;
}

// A warp a row: what of its softmax lies in tiles left out.
__global__ void __launch_bounds__(256)
    linear_skipped_mass(const __grid_constant__ LinearParams r, int64_t first_row, int64_t rows,
                        int64_t group_row) {
  const int64_t local = int64_t{blockIdx.x} * 8 + threadIdx.x / 32;
  if (local >= rows) return;
  const int lane = threadIdx.x % 32, n_tiles = r.layout.n_tiles;
  const uint8_t* const kept = r.filter.kept + (group_row + local) / kChunkRows * n_tiles;
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
__global__ void __launch_bounds__(32) linear_list_tiles(const __grid_constant__ LinearParams r,
                                                        int64_t first_row, int64_t group_row) {
  const int n_tiles = r.layout.n_tiles;
  const uint8_t* const kept = r.filter.kept + (group_row / kChunkRows + blockIdx.x) * n_tiles;
  const int count = list_kept(n_tiles, r.filter.tile_entries + int64_t{blockIdx.x} * n_tiles,
                              [&](int tile) { return kept[tile] != 0; });
  if (threadIdx.x == 0) r.filter.tile_counts[first_row / kChunkRows + blockIdx.x] = count;
}

// A warp a cluster tile of d_weight: the groups of rows that it takes.
__global__ void __launch_bounds__(32)
    linear_list_groups(const __grid_constant__ LinearParams r, int groups) {
  constexpr int kColumns = GradientTile::kM * GradientTile::kClusterM;
  const int n_tiles = r.layout.n_tiles;
  const int64_t column = int64_t{blockIdx.x} * kColumns;
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

}  // namespace ullage::lossk::cuda
