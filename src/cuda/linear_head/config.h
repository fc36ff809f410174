// How a fused head is cut into products: pure host arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/product/config.h"

namespace ullage::lossk::cuda {

namespace product = ullage::cuda;

// Chosen on an H200 (bench/NOTES.md). Logits: consumers in turn hide the epilogue's exponentials
// behind the other's products. Gradients: their k is long and their epilogue short, so the wider
// tile, which reads less from L2, wins.
using LogitsTile = product::ProductTile<192, 2, 1, product::Consumers::kInTurn>;
using GradientTile = product::ProductTile<256, 2, 1, product::Consumers::kTogether>;

// Chunks are whole cluster tiles of rows; also whole 64-row steps of d_weight's sum, so that
// cutting it changes no bit.
inline constexpr int64_t kChunkRows = 256;
// d_weight: tiles of this many cluster rows of the vocabulary run along d_model together.
inline constexpr int kWeightGroup = 16;
// Strips are whole tiles of the logits (192), of d_weight (2 x 128) and whole steps of d_hidden's
// sum (64).
inline constexpr int64_t kStripColumns = 768;
// Clusters of 2 on the multiprocessors of an H200.
inline constexpr int kResidentClusters = 66;

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Rows are taken in groups: one product adds a group's share to d_weight. A group's logits and
// d_hidden are made part by part.
struct RowGroup {
  int64_t rows = 0;
  int64_t part = 0;  // rows, a multiple of kChunkRows or all of them
};

struct LinearLayout {
  // The first group, whose exponentials lie in d_weight's memory but for the last range; no rows:
  // there is none. Ranges have `range_columns` columns, the first may be shorter.
  RowGroup lodged;
  int64_t range_columns = 0;
  int n_ranges = 0;
  RowGroup chunk;   // every other group; the last may be shorter
  int n_tiles = 0;  // column tiles of the logits: partial sums of a row
  // 0: chunks of rows over the whole vocabulary. Else strips of this many columns over all rows,
  // for a d_weight that is rounded to bf16 strip by strip and never exists in f32; `chunk` is then
  // that of the pass over the statistics.
  int64_t strip = 0;
  int strip_tiles = 0;
  int vocab_slices =
      1;  // d_hidden is the sum of this many products over slices of the vocabulary, in order

  int64_t longest_part() const { return std::max(lodged.part, chunk.part); }
  int64_t longest_group() const { return std::max(lodged.rows, chunk.rows); }
  // The group that starts at row `first`.
  RowGroup group_at(int64_t first, int64_t n_tok) const {
    RowGroup group = first == 0 && lodged.rows > 0 ? lodged : chunk;
    group.rows = std::min(group.rows, n_tok - first);
    return group;
  }
  int64_t n_groups(int64_t n_tok) const {
    if (n_tok == 0) return 0;
    const int64_t rest = n_tok - lodged.rows;
    return (lodged.rows > 0 ? 1 : 0) + (rest > 0 ? divide_up(rest, chunk.rows) : 0);
  }
};

// d_hidden has (chunk / 256) * (d_model / 256) cluster tiles, each over the whole vocabulary: few,
// for a small d_model. Cutting the vocabulary fills the device's last wave; the cut depends on
// d_model and vocab alone, so it is part of the sum's order: the fewest slices that keep nine
// tenths of the device busy on average over chunks of 1024, 1280, 1536 and 2048 rows.
constexpr int vocab_slices(int64_t d_model, int64_t vocab) {
  constexpr int kMostSlices = 8;
  const int64_t columns = divide_up(d_model, GradientTile::kN);
  int best = 1;
  double best_share = 0;
  for (int slices = 1; slices <= kMostSlices && best_share < 0.9; ++slices) {
    double share = 0;
    for (const int64_t rows : {4, 5, 6, 8}) {
      const int64_t units = rows * columns * slices;
      share += 0.25 * static_cast<double>(units) /
               static_cast<double>(divide_up(units, kResidentClusters) * kResidentClusters);
    }
    if (share > best_share) best = slices, best_share = share;
  }
  // Every slice has at least one block.
  const int64_t blocks = divide_up(vocab, GradientTile::kK);
  const int64_t slice_blocks = divide_up(blocks, best);
  return static_cast<int>(divide_up(blocks, slice_blocks));
}

}  // namespace ullage::lossk::cuda
