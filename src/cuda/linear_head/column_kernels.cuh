// Where each row's label is, and which rows share one.
#pragma once

#include <climits>

#include "cuda/head_logits/row_process.cuh"
#include "cuda/linear_head/params.h"
#include "cuda/product/epilogues.cuh"

namespace ullage::lossk::cuda {

__global__ void __launch_bounds__(256)
    linear_columns(const __grid_constant__ HeadParams p, const __grid_constant__ LinearParams r) {
  using ullage::cuda::sm90::kIgnoredRow;
  using ullage::cuda::sm90::kNoLabel;
  const int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (row >= p.n_tok) return;
  int column = static_cast<int>(label_column(p, row));
  if (column < 0) column = row_counts(p, row, stored_label(p, row)) ? kNoLabel : kIgnoredRow;
  r.columns[row] = column;
}

inline constexpr int kChainWarps = 8;

// A warp a row: rows that share a label form a chain in row order. n_tok^2 compares of cached
// words, which do not wait for each other.
__global__ void __launch_bounds__(32 * kChainWarps)
    linear_chains(const __grid_constant__ LinearParams r) {
  const int row = static_cast<int>(blockIdx.x) * kChainWarps + static_cast<int>(threadIdx.x) / 32;
  const int lane = threadIdx.x % 32, n_tok = static_cast<int>(r.n_tok);
  if (row >= n_tok) return;
  const int mine = r.columns[row];
  bool leads = mine >= 0;
  int following = INT_MAX;
  // Words past n_tok lie in the workspace still.
#pragma unroll 4
  for (int base = 4 * lane; mine >= 0 && base < n_tok; base += 128) {
    const int4 x = *reinterpret_cast<const int4*>(r.columns + base);
    const int others[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (others[i] != mine || base + i >= n_tok) continue;
      if (base + i < row) leads = false;
      if (base + i > row) following = min(following, base + i);
    }
  }
  following = __reduce_min_sync(~0u, following);
  leads = __all_sync(~0u, leads);
  if (lane != 0) return;
  r.next_row[row] = following == INT_MAX ? -1 : following;
  r.leads[row] = leads;
  if (leads && r.label_slots != nullptr) r.label_slots[mine] = row;
}

}  // namespace ullage::lossk::cuda
