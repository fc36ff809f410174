#include <algorithm>

#include "contract/describe.h"
#include "cuda/linear_head/scaled_exponentials.h"

namespace ullage::lossk::cuda {
namespace {

constexpr int64_t kDefaultBudgetBytes = int64_t{512} << 20;
// Rows at a time where what is kept of each is small: its tile sums and its slices of d_hidden.
constexpr int64_t kPartRows = 2048;

void lay_chunks(ScaledExponentials& state, int64_t chunk) {
  LinearLayout& layout = state.layout;
  layout.lodged = {};
  layout.range_columns = 0;
  layout.n_ranges = 0;
  layout.chunk = {chunk, chunk};
  layout.strip = 0;
  layout.vocab_slices = vocab_slices(state.shape.d_model, state.shape.vocab);
}

void lay_strips(ScaledExponentials& state, int64_t strip) {
  LinearLayout& layout = state.layout;
  const int64_t rows = std::min(state.shape.n_tok, kPartRows);
  layout.chunk = {rows, rows};
  layout.strip = strip;
  layout.strip_tiles = static_cast<int>(strip / LogitsTile::kN);
  layout.vocab_slices = 1;
}

int64_t booked_bytes(const ScaledExponentials& state) {
  WorkspaceSlices slices(nullptr, nullptr);
  HeadParams p;
  LinearParams r;
  take_workspace(state, slices, p, r);
  return slices.used();
}

int64_t bytes_at(ScaledExponentials& state, int64_t chunk) {
  lay_chunks(state, chunk);
  return booked_bytes(state);
}

int64_t bytes_of_strip(ScaledExponentials& state, int64_t strip) {
  lay_strips(state, strip);
  return booked_bytes(state);
}

// Rows of a chunk, as even as whole cluster tiles allow.
int64_t even_chunk(int64_t n_tok, int64_t largest) {
  if (n_tok <= largest) return n_tok;
  const int64_t n_chunks = divide_up(n_tok, largest);
  return divide_up(divide_up(n_tok, n_chunks), kChunkRows) * kChunkRows;
}

// Waves of tiles that the d_weight product of a lodged group takes, range by range; a launch fills
// and drains the device once.
double waves_of_ranges(const Shape& shape, int64_t range_columns, int64_t n_ranges) {
  using Tile = GradientTile;
  constexpr double kLaunchWaves = 0.3;
  const int64_t across = divide_up(shape.d_model, Tile::kN);
  double waves = kLaunchWaves * static_cast<double>(n_ranges);
  for (int64_t end = divide_up(shape.vocab, kStripColumns) * kStripColumns; end > 0;
       end -= range_columns) {
    const int64_t columns = std::min(end, range_columns);
    waves += static_cast<double>(divide_up(
        divide_up(columns, int64_t{Tile::kM} * Tile::kClusterM) * across, kResidentClusters));
  }
  return waves;
}

// The first group's exponentials in d_weight's memory: 2 d_model rows fit there where it is f32,
// d_model where it is bf16, which has to be the only group; the last range is in the workspace.
// Fewest passes over d_weight first, then the longest parts, then the fewest waves. False where
// nothing fits the budget, or the vocabulary is one range.
bool lay_lodged(ScaledExponentials& state, int64_t budget) {
  const int64_t n = state.shape.n_tok, d = state.shape.d_model, v = state.shape.vocab;
  const int64_t end = divide_up(v, kStripColumns) * kStripColumns;
  LinearLayout& layout = state.layout;
  lay_chunks(state, 0);
  const auto lay_ranges = [&](int64_t range_columns, int64_t part) {
    // Range r of the exponentials has to fit d_weight's range r + 1, and that may end early.
    const bool rounds = state.rounds();
    int64_t rows = (rounds ? 1 : 2) * d * (range_columns - (end - v)) / range_columns;
    rows = rows >= n ? n : rounds ? 0 : rows / kChunkRows * kChunkRows;
    layout.lodged = {rows, std::min(rows, part)};
    layout.range_columns = range_columns;
    layout.n_ranges = static_cast<int>(divide_up(end, range_columns));
  };
  const auto fits = [&](int64_t chunk, int64_t part, int64_t allowed) {
    layout.chunk = {chunk, std::min(chunk, part)};
    return booked_bytes(state) <= allowed;
  };
  LinearLayout best = layout;
  int64_t best_passes = 0;
  for (int64_t part = kPartRows; part >= kChunkRows; part /= 2) {
    LinearLayout ranges = best;
    ranges.lodged = {};
    double least_waves = 0;
    for (int64_t columns = kStripColumns; columns < end; columns += kStripColumns) {
      lay_ranges(columns, part);
      if (layout.lodged.rows == 0 || layout.lodged.rows < ranges.lodged.rows) continue;
      if (!fits(layout.lodged.rows < n ? kChunkRows : 0, part, budget)) continue;
      const double waves = waves_of_ranges(state.shape, columns, layout.n_ranges);
      if (layout.lodged.rows > ranges.lodged.rows || waves < least_waves)
        ranges = layout, least_waves = waves;
    }
    if (ranges.lodged.rows == 0) continue;
    // The rest in chunks as large as the budget allows. Without a rest, chunks are what a run that
    // adds to d_weight falls back to, in the memory booked here.
    layout = ranges;
    const int64_t rest = n - layout.lodged.rows;
    const int64_t most = divide_up(rest > 0 ? rest : n, kChunkRows) * kChunkRows;
    const int64_t allowed = rest > 0 ? budget : booked_bytes(state);
    int64_t chunk = ranges.chunk.rows;
    while (!state.rounds() && chunk < most && fits(chunk + kChunkRows, part, allowed))
      chunk += kChunkRows;
    if (chunk > 0) chunk = even_chunk(most, chunk);
    layout.chunk = {chunk, std::min(chunk, part)};
    const int64_t passes = layout.n_groups(n);
    if (best_passes == 0 || passes < best_passes) best = layout, best_passes = passes;
  }
  layout = best;
  return best_passes > 0;
}

}  // namespace

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
  // Exponentials in d_weight's memory save passes over it.
  if (state.request.d_weight && !options.accumulate && largest < n && lay_lodged(state, budget)) {
    const int64_t passes = state.layout.n_groups(n);
    if (largest == 0 || passes < divide_up(n, largest)) return kHeadOk;
  }
  if (largest > 0 || n == 0) {
    lay_chunks(state, largest == 0 ? 0 : even_chunk(n, largest));
    return kHeadOk;
  }
  // Strips need no f32 d_weight, but every row's sums before any gradient, which sequence terms
  // would need twice.
  const bool strips = state.rounds() && state.n_sequence_terms == 0 && !state.filters();
  int64_t strip = 0;
  while (strips && strip < state.shape.vocab &&
         bytes_of_strip(state, strip + kStripColumns) <= budget) {
    strip += kStripColumns;
  }
  if (strip == 0) return refuse(std::min(n, kChunkRows));
  lay_strips(state, strip);
  return kHeadOk;
}

}  // namespace ullage::lossk::cuda
