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

// Waves of tiles that the d_weight product of a lodged group takes, range by range; a launch fills
// and drains the device once.
double waves_of_ranges(const Shape& shape, const LinearLayout& layout) {
  constexpr double kLaunchWaves = 0.3;
  const int64_t whole = layout.n_ranges - 1;
  return static_cast<double>(whole) *
             (waves<GradientTile>(layout.range_columns, shape.d_model) + kLaunchWaves) +
         waves<GradientTile>(layout.last_columns(shape.vocab), shape.d_model) + kLaunchWaves;
}

// The first group's exponentials in d_weight's memory, which in 16 bits has to be the only group;
// the last range is in the workspace. Fewest passes over d_weight first, then the longest parts,
// then the fewest waves. False where nothing fits the budget, or the vocabulary is one range.
bool lay_lodged(ScaledExponentials& state, int64_t budget) {
  const int64_t n = state.shape.n_tok, v = state.shape.vocab;
  const int64_t lodged = lodging_rows(state), rest = n - lodged;
  if (lodged == 0 || (state.rounds() && rest > 0)) return false;
  LinearLayout& layout = state.layout;
  layout = fresh_layout(state);
  const auto fits = [&](int64_t chunk, int64_t part, int64_t allowed) {
    layout.chunk = {chunk, std::min(chunk, part)};
    return booked_bytes(state) <= allowed;
  };
  LinearLayout best;
  int64_t best_passes = 0;
  for (int64_t part = kPartRows; part >= kChunkRows; part /= 2) {
    LinearLayout ranges;
    double least_waves = 0;
    for (int64_t columns = kStripColumns; 2 * columns <= v; columns += kStripColumns) {
      layout.lodged = {lodged, std::min(lodged, part)};
      cut_vocabulary(layout, v, columns);
      if (!fits(rest > 0 ? kChunkRows : 0, part, budget)) continue;
      const double taken = waves_of_ranges(state.shape, layout);
      if (ranges.lodged.rows == 0 || taken < least_waves) ranges = layout, least_waves = taken;
    }
    if (ranges.lodged.rows == 0) continue;
    // The rest in chunks as large as the budget allows. Without a rest, chunks are what a run that
    // adds to d_weight falls back to, in the memory booked here.
    layout = ranges;
    const int64_t most = divide_up(rest > 0 ? rest : n, kChunkRows) * kChunkRows;
    const int64_t allowed = rest > 0 ? budget : booked_bytes(state);
    int64_t chunk = ranges.chunk.rows;
    while (!state.rounds() && chunk < most && fits(chunk + kChunkRows, part, allowed))
      chunk += kChunkRows;
    if (chunk > 0) chunk = even_chunk(most, chunk);
    layout.chunk = {chunk, std::min(chunk, part)};
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
