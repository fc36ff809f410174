#include <algorithm>

#include "contract/describe.h"
#include "cuda/linear_head/scaled_exponentials.h"

namespace ullage::lossk::cuda {
namespace {

constexpr int64_t kDefaultBudgetBytes = int64_t{512} << 20;
// Rows at a time where what is kept of each is small: its tile sums and its slices of d_hidden.
constexpr int64_t kPartRows = 2048;
// A chunk of fewer rows costs more in passes over d_weight than the logits of most rows again.
constexpr int64_t kShortChunk = 512;

int64_t booked_bytes(const ScaledExponentials& state) {
  WorkspaceSlices slices(nullptr, nullptr);
  HeadParams p;
  LinearParams r;
  take_workspace(state, slices, p, r);
  return slices.used();
}

LinearLayout fresh_layout(const ScaledExponentials& state) {
  LinearLayout layout;
  layout.n_tiles = static_cast<int>(divide_up(state.shape.vocab, LogitsTile::kN));
  layout.vocab_slices = vocab_slices(state.shape.d_model, state.shape.vocab);
  return layout;
}

void lay_chunks(ScaledExponentials& state, int64_t chunk) {
  state.layout = fresh_layout(state);
  state.layout.chunk = {chunk, chunk};
}

int64_t bytes_at(ScaledExponentials& state, int64_t chunk) {
  lay_chunks(state, chunk);
  return booked_bytes(state);
}

// Rows of a chunk, as even as whole cluster tiles allow.
int64_t even_chunk(int64_t n_tok, int64_t largest) {
  if (n_tok <= largest) return n_tok;
  const int64_t n_chunks = divide_up(n_tok, largest);
  return divide_up(divide_up(n_tok, n_chunks), kChunkRows) * kChunkRows;
}

// d_weight's memory holds 2 d_model rows of exponentials where it is f32, d_model where it is of 16
// bits.
int64_t lodging_rows(const ScaledExponentials& state) {
  const int64_t rows = (state.rounds() ? 1 : 2) * state.shape.d_model;
  return rows >= state.shape.n_tok ? state.shape.n_tok : rows / kChunkRows * kChunkRows;
}

void cut_vocabulary(LinearLayout& layout, int64_t vocab, int64_t range_columns) {
  layout.range_columns = range_columns;
  layout.n_ranges = static_cast<int>(std::max<int64_t>(vocab / range_columns, 1));
}

// Waves of tiles that m x n elements take on the device.
template <class Tile>
double waves(int64_t m, int64_t n) {
  const int64_t tiles =
      divide_up(m, int64_t{Tile::kM} * Tile::kClusterM) * divide_up(n, Tile::kN * Tile::kClusterN);
  return static_cast<double>(divide_up(tiles, kResidentClusters));
}

// Columns of a range of lodged exponentials that d_weight's product, whose blocks meet after each,
// takes eight waves for.
int64_t unhurried_columns(const Shape& shape) {
  constexpr int64_t kTileRows = GradientTile::kM * GradientTile::kClusterM;
  const int64_t rows = divide_up(8 * kResidentClusters, divide_up(shape.d_model, GradientTile::kN));
  return divide_up(rows * kTileRows, kLodgedColumns) * kLodgedColumns;
}

// The first rows' exponentials in d_weight's memory, which in 16 bits have to be all; the last
// range is in the workspace. Fewest passes over d_weight first, then the longest parts, then wide
// ranges. False where nothing fits the budget, or the vocabulary is one range.
bool lay_lodged(ScaledExponentials& state, int64_t budget) {
  const int64_t n = state.shape.n_tok, v = state.shape.vocab;
  const int64_t lodged = lodging_rows(state), rest = n - lodged;
  if (lodged == 0 || v < 2 * kLodgedColumns || (state.rounds() && rest > 0)) return false;
  LinearLayout& layout = state.layout;
  LinearLayout best;
  int64_t best_passes = 0;
  for (int64_t part = kPartRows; part >= kChunkRows; part /= 2) {
    layout = fresh_layout(state);
    layout.lodged = {lodged, std::min(lodged, part)};
    const auto lay_chunk = [&](int64_t chunk) {
      layout.chunk = {chunk, std::min(chunk, part)};
      layout.beside = std::min(chunk, rest);
    };
    // As long a chunk as `allowed` holds; of the rest, or of all rows.
    const auto grow_chunk = [&](int64_t chunk, int64_t allowed) {
      const int64_t most = divide_up(rest > 0 ? rest : n, kChunkRows) * kChunkRows;
      for (; chunk < most; chunk += kChunkRows) {
        lay_chunk(chunk + kChunkRows);
        if (booked_bytes(state) > allowed) break;
      }
      lay_chunk(chunk > 0 ? even_chunk(most, chunk) : 0);
    };
    const auto widen_ranges = [&] {
      const int64_t widest = std::min(unhurried_columns(state.shape), v / 2);
      for (int64_t columns = 2 * kLodgedColumns; columns <= widest; columns += kLodgedColumns) {
        const LinearLayout narrower = layout;
        cut_vocabulary(layout, v, columns);
        if (booked_bytes(state) <= budget) continue;
        layout = narrower;
        return;
      }
    };
    cut_vocabulary(layout, v, kLodgedColumns);
    lay_chunk(rest > 0 ? kChunkRows : 0);
    if (booked_bytes(state) > budget) continue;
    if (rest > 0) grow_chunk(kChunkRows, budget);
    widen_ranges();
    // Without a rest, chunks are what a run that adds to d_weight falls back to, in the memory
    // booked here.
    if (rest == 0 && !state.rounds()) grow_chunk(0, booked_bytes(state));
    const int64_t passes = n_groups(layout, n);
    if (best_passes == 0 || passes < best_passes) best = layout, best_passes = passes;
  }
  layout = best;
  return best_passes > 0;
}

// The time of strips in steps of a 128 x 256 tile along k (0.8 us on an H200), but for what does
// not depend on how they are cut.
double steps_of_strips(const ScaledExponentials& state) {
  constexpr double kLaunch = 6, kStore = 8, kLogitsTile = 0.75;
  const Shape& shape = state.shape;
  const LinearLayout& layout = state.layout;
  const auto k_steps = [](int64_t k) {
    return static_cast<double>(divide_up(k, int64_t{GradientTile::kK}));
  };
  double steps = 0;
  layout.for_each_group(shape.n_tok, [&](int64_t, const RowGroup& group) {
    const int64_t slices = layout.vocab_slices, parts = divide_up(group.rows, group.part);
    const double logits =
        waves<LogitsTile>(group.part, shape.vocab) * kLogitsTile * k_steps(shape.d_model);
    const double d_hidden =
        waves<GradientTile>(group.part * slices, shape.d_model) * k_steps(shape.vocab / slices);
    steps += static_cast<double>(parts) * (logits + d_hidden + 4 * kLaunch);
  });
  const auto strips = [&](int64_t columns) {
    const auto slabs = [&](int64_t rows, bool again) {
      if (rows == 0) return 0.0;
      const int64_t slab = std::min(rows, layout.slab);
      double one = waves<GradientTile>(columns, shape.d_model) * (k_steps(slab) + kStore) + kLaunch;
      if (again) {
        one += waves<LogitsTile>(slab, columns) * kLogitsTile * k_steps(shape.d_model);
        one += 2 * kLaunch;
      }
      return static_cast<double>(divide_up(rows, layout.slab)) * one;
    };
    return slabs(layout.recomputed, true) + slabs(shape.n_tok - layout.recomputed, false);
  };
  return steps + static_cast<double>(layout.n_ranges - 1) * strips(layout.range_columns) +
         strips(layout.last_columns(shape.vocab));
}

// Strips, in the fewest steps that fit the budget. Not for a filter, whose lists are of chunks.
bool lay_strips(ScaledExponentials& state, int64_t budget, bool lodges) {
  const int64_t n = state.shape.n_tok, v = state.shape.vocab;
  const int64_t lodged = lodges ? lodging_rows(state) : 0;
  if (!state.request.d_weight || state.filters()) return false;
  LinearLayout& layout = state.layout;
  LinearLayout best;
  double least_steps = 0;
  for (int64_t part = kPartRows; part >= kLeastRows; part /= 2) {
    for (int64_t slab = divide_up(n, kChunkRows) * kChunkRows; slab >= kChunkRows;
         slab = divide_up(slab / 2, kChunkRows) * kChunkRows) {
      for (int64_t columns = kStripColumns; columns < v; columns += kStripColumns) {
        layout = fresh_layout(state);
        layout.strips = true;
        cut_vocabulary(layout, v, columns);
        if (lodged > 0 && layout.n_ranges > 1) {
          layout.lodged = {lodged, std::min(lodged, part)};
          layout.recomputed = divide_up(n - lodged, kChunkRows) * kChunkRows;
        } else {
          layout.chunk = {std::min(part, n), std::min(part, n)};
          layout.recomputed = n;
        }
        layout.slab = slab;
        if (booked_bytes(state) > budget) break;
        const double steps = steps_of_strips(state);
        if (least_steps == 0 || steps < least_steps) best = layout, least_steps = steps;
      }
      if (slab == kChunkRows) break;
    }
  }
  layout = best;
  return least_steps > 0;
}

}  // namespace

int64_t n_groups(const LinearLayout& layout, int64_t n_tok) {
  int64_t groups = 0;
  layout.for_each_group(n_tok, [&](int64_t, const RowGroup&) { ++groups; });
  return groups;
}

Status choose_layout(ScaledExponentials& state, const CudaLinearHeadOptions& options) {
  const int64_t n = state.shape.n_tok;
  const int64_t budget = options.budget_bytes > 0 ? options.budget_bytes : kDefaultBudgetBytes;
  const auto refuse = [&](int64_t chunk) -> Status {
    return {kLossBadChunk, "a chunk of " + describe(chunk) + " rows needs " +
                               describe(bytes_at(state, chunk)) +
                               " bytes of workspace; allowed: " + describe(budget)};
  };
  if (options.chunk != 0) {
    if (options.chunk < 0 || (options.chunk % kChunkRows != 0 && options.chunk < n)) {
      return {kLossBadChunk, "chunk is " + describe(options.chunk) + "; accepted: a multiple of " +
                                 describe(kChunkRows) + " rows, or n_tok or more"};
    }
    const int64_t chunk = std::min(options.chunk, n);
    if (options.budget_bytes > 0 && bytes_at(state, chunk) > budget) return refuse(chunk);
    lay_chunks(state, chunk);
    return kHeadOk;
  }
  // Chunks of rows first: 0 rows where not even the least fits.
  int64_t largest = std::min(n, kChunkRows);
  if (bytes_at(state, largest) > budget) largest = 0;
  while (largest > 0 && largest < n &&
         bytes_at(state, std::min(n, largest + kChunkRows)) <= budget) {
    largest = std::min(n, largest + kChunkRows);
  }
  if (n == 0 || (largest > 0 && largest == n)) {
    lay_chunks(state, largest);
    return kHeadOk;
  }
  // Exponentials in d_weight's memory save passes over it.
  if (state.request.d_weight && !options.accumulate && lay_lodged(state, budget)) {
    const int64_t passes = n_groups(state.layout, n);
    const bool worth = passes == 1 || state.layout.chunk.rows >= kShortChunk || state.filters();
    if (worth && (largest == 0 || passes < divide_up(n, largest))) return kHeadOk;
  }
  if (largest < std::min(n, kShortChunk) && lay_strips(state, budget, !options.accumulate))
    return kHeadOk;
  for (int64_t rows = kChunkRows / 2; largest == 0 && rows >= kLeastRows; rows /= 2) {
    if (!state.filters() && rows < n && bytes_at(state, rows) <= budget) largest = rows;
  }
  if (largest == 0) return refuse(std::min(n, kLeastRows));
  lay_chunks(state, largest < kChunkRows ? largest : even_chunk(n, largest));
  return kHeadOk;
}

}  // namespace ullage::lossk::cuda
