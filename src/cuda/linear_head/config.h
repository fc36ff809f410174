// How a fused head is cut into products: pure host arithmetic.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cuda/product/config.h"

namespace ullage::lossk::cuda {

namespace product = ullage::cuda;
using product::divide_up;
using product::kResidentClusters;

// Chosen on an H200 (bench/NOTES.md). Logits: consumers in turn hide the epilogue's exponentials
// behind the other's products. Gradients: the wider tile, which reads less from L2, wins. A product
// that continues a sum: five of a tile's eight boxes of old sums are there when the tile before
// ends, at the price of a fourth stage.
using LogitsTile = product::ProductTile<192, 2, 1, product::Consumers::kInTurn, 0>;
using GradientTile = product::ProductTile<256, 2, 1, product::Consumers::kTogether, 2>;
using ContinuedTile = product::ProductTile<256, 2, 1, product::Consumers::kTogether, 5>;

// Groups of rows are whole cluster tiles; also whole 64-row steps of d_weight's sum, so that
// cutting it changes no bit. kLeastRows fill half a cluster tile's CTA, for budgets that hold no
// more.
inline constexpr int64_t kChunkRows = 256, kLeastRows = 64;
// d_weight: tiles of this many cluster rows of the vocabulary run along d_model together.
inline constexpr int kWeightGroup = 2;
// Ranges of the vocabulary are whole tiles of the logits (192), of d_weight (2 x 128) and whole
// steps of d_hidden's sum (64).
inline constexpr int64_t kStripColumns = 768;
// Those of lodged exponentials are whole groups of d_weight's cluster rows besides (2 x 2 x 128).
inline constexpr int64_t kLodgedColumns = 2 * kStripColumns;
static_assert(kLodgedColumns % (kWeightGroup * GradientTile::kM * GradientTile::kClusterM) == 0);

// Rows are taken in groups, each one product of d_weight. A group's logits and d_hidden are made
// part by part.
struct RowGroup {
  int64_t rows = 0;
  int64_t part = 0;    // rows, a multiple of kChunkRows or all of them
  int64_t lodged = 0;  // the first so many have their exponentials in d_weight's memory
};

struct ColumnRange {
  int64_t first = 0, columns = 0;
};

// The rows and the vocabulary, cut. There are two orders:
//
// Rows first: each group's share is added to d_weight before the next group starts. In the first
// group, exponentials may be `lodged` in d_weight's memory, beside a chunk in the workspace.
//
// `strips`: every group has its losses and d_hidden first, its exponentials lodged or else in the
// workspace. d_weight follows range by range, each written once: the exponentials of the first
// `recomputed` rows, which later groups overwrote, are made again, a range at a time; those of the
// last group are still lodged.
struct LinearLayout {
  RowGroup lodged;     // no rows: there is none
  int64_t beside = 0;  // of the chunk in the lodged rows' group
  // Ranges of range_columns columns, the last takes the rest. Range r of lodged exponentials lies
  // where d_weight's range r + 1 will be, the last in the workspace.
  int64_t range_columns = 0;
  int n_ranges = 0;
  RowGroup chunk;   // every other group; the last may be shorter
  int n_tiles = 0;  // column tiles of the logits: partial sums of a row
  bool strips = false;
  int64_t recomputed = 0;
  int64_t slab = 0;  // strips: rows that one d_weight product sums, a multiple of kChunkRows or all
  int vocab_slices =
      1;  // d_hidden is the sum of this many products over slices of the vocabulary, in order

  int64_t longest_part() const { return std::max(lodged.part, chunk.part); }
  int64_t longest_group() const { return std::max(lodged.rows + beside, chunk.rows); }
  // The group that starts at row `first`.
  RowGroup group_at(int64_t first, int64_t n_tok) const {
    const bool lodges = lodged.rows > 0 && (strips || first == 0);
    const int64_t end = strips && first < recomputed ? recomputed : n_tok;
    const int64_t rows = std::min(lodges ? lodged.rows + beside : chunk.rows, end - first);
    if (!lodges) return {rows, chunk.part};
    return {rows, longest_part(), std::min(rows, lodged.rows)};
  }
  // Calls visit(first row, group) for every group.
  template <class Visit>
  void for_each_group(int64_t n_tok, const Visit& visit) const {
    for (int64_t first = 0; first < n_tok;) {
      const RowGroup group = group_at(first, n_tok);
      visit(first, group);
      first += group.rows;
    }
  }
  ColumnRange range_at(int range, int64_t vocab) const {
    const int64_t first = range * range_columns;
    return {first, range == n_ranges - 1 ? vocab - first : range_columns};
  }
  // Of the vocabulary, in the widest range.
  int64_t last_columns(int64_t vocab) const { return range_at(n_ranges - 1, vocab).columns; }
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
