#include <string>
#include <string_view>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cuda/head_logits/check.h"
#include "cuda/head_logits/fill_params.h"
#include "cuda/head_logits/launch.h"
#include "cuda/head_logits/report.h"
#include "cuda/linear_head/launch.h"
#include "cuda/linear_plan.h"
#include "cuda/workspace_slices.h"
#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::lossk {

namespace product = ullage::cuda;

using cuda::HeadParams;
using cuda::LinearLayout;
using cuda::LinearParams;
using cuda::RowGroup;

namespace {

struct ScaledExponentials final : CudaLinearHeadPlan::State {
  LinearLayout layout;
  int n_sequence_terms = 0;
  double filter_tolerance = 0;

  bool filters() const { return filter_tolerance > 0; }

  Status prepare() const override { return kHeadOk; }
  Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
             std::byte* workspace) const override;
  Result<FilterReport> filter_report(CUstream_st* stream, std::byte* workspace) const override;
};

constexpr int64_t kDefaultBudgetBytes = int64_t{512} << 20;
// Rows at a time where what is kept of each is small: its tile sums and its slices of d_hidden.
constexpr int64_t kPartRows = 2048;

bool is_rounded(const Request& request) {
  return request.d_weight && request.d_weight_dtype == DType::kBF16;
}

int64_t whole_blocks(int64_t columns) {
  return cuda::divide_up(columns, product::kBlockColumns) * product::kBlockColumns;
}

void take_filter(const ScaledExponentials& state, cuda::WorkspaceSlices& slices,
                 cuda::FilterParams& filter) {
  const LinearLayout& layout = state.layout;
  const int64_t n = state.shape.n_tok;
  const int64_t groups = cuda::divide_up(layout.longest_group(), cuda::kChunkRows);
  const int64_t part_groups = cuda::divide_up(layout.longest_part(), cuda::kChunkRows);
  const int64_t tiles =
      cuda::divide_up(state.shape.vocab, cuda::GradientTile::kM * cuda::GradientTile::kClusterM);
  filter.threshold = static_cast<float>(state.filter_tolerance / layout.n_tiles);
  slices.take(filter.kept, "tiles kept by the filter", groups * layout.n_tiles);
  slices.take(filter.inverse_sum, "inverse row sums", n * 4);
  slices.take(filter.skipped, "row shares left out", n * 8);
  slices.take(filter.tile_counts, "lengths of the lists of tiles",
              cuda::divide_up(n, cuda::kChunkRows) * 4);
  slices.take(filter.tile_entries, "lists of tiles", part_groups * layout.n_tiles * 4);
  slices.take(filter.group_counts, "lengths of the lists of row groups", tiles * 4);
  slices.take(filter.group_entries, "lists of row groups", tiles * groups * 4);
}

void take_workspace(const ScaledExponentials& state, cuda::WorkspaceSlices& slices, HeadParams& p,
                    LinearParams& r) {
  const int64_t n = state.shape.n_tok, d = state.shape.d_model, v = state.shape.vocab;
  const LinearLayout& layout = state.layout;
  const bool gradients = state.request.d_hidden || state.request.d_weight;
  bool segments = false;
  for (const LossTerm& term : state.config.terms) segments |= needs_segment_ids(term);
  slices.take(p.census, "status word and divisors", sizeof(cuda::Census));
  slices.take(p.row_losses, "row losses of each term",
              static_cast<int64_t>(state.config.terms.size()) * n * 4);
  slices.take(p.row_log_prob, "log-probabilities of the labels", n * 4);
  if (segments) slices.take(p.segment_tokens, "tokens of each segment", n * 4);
  slices.take(p.segment_sums, "sums of each segment", state.n_sequence_terms * 2 * n * 8);
  slices.take(p.row_slopes, "slopes of sequence terms", state.n_sequence_terms * n * 4);
  slices.take(r.columns, "label columns", n * 4);
  slices.take(r.softmax_scale, "row factors of the softmax", n * 4);
  slices.take(r.label_gain, "gradients of the label columns", n * 4);
  if (state.request.d_weight) {
    slices.take(r.next_row, "rows that share a label", n * 4);
    slices.take(r.leads, "first rows of a label", n);
  }
  // What is kept of the logits: a group's rows of the whole vocabulary, or their last range where
  // the others lie in d_weight, or a strip's columns of all rows.
  const bool strips = layout.strip > 0;
  const int64_t group_rows = strips ? n : layout.longest_group();
  const int64_t part_rows = strips ? n : layout.longest_part();
  if (strips || state.filters()) slices.take(r.row_shift, "row shifts", n * 4);
  if (is_rounded(state.request)) {
    if (layout.lodged.rows > 0) {
      slices.take(r.label_slots, "rows of the label columns", v * 4);
      slices.take(r.label_sums, "label columns of d_weight in f32", n * d * 4);
    } else {
      slices.take(r.d_weight_sum, "d_weight in f32", (strips ? layout.strip : v) * d * 4);
    }
  }
  if (gradients) {
    const int64_t kept = strips ? n * layout.strip : layout.chunk.rows * whole_blocks(v);
    slices.take(r.exponentials,
                layout.lodged.rows > 0 ? "exponentials outside d_weight" : "exponentials",
                2 * std::max(kept, layout.lodged.rows * layout.range_columns));
  }
  slices.take(
      r.partial, "tile sums",
      std::max(layout.longest_part() * layout.n_tiles, strips ? n * layout.strip_tiles : 0) *
          int64_t{8});
  slices.take(r.label_logit, "label logits", part_rows * 4);
  if (state.request.d_weight) {
    slices.take(r.scaled_hidden, "scaled hidden rows", group_rows * d * 2);
  }
  if (state.request.d_hidden) {
    slices.take(r.slices, "slices of d_hidden",
                (strips ? 1 : layout.vocab_slices) * part_rows * d * 4);
  }
  if (state.filters()) take_filter(state, slices, r.filter);
}

void lay_chunks(ScaledExponentials& state, int64_t chunk) {
  LinearLayout& layout = state.layout;
  layout.lodged = {};
  layout.range_columns = 0;
  layout.n_ranges = 0;
  layout.chunk = {chunk, chunk};
  layout.strip = 0;
  layout.vocab_slices = cuda::vocab_slices(state.shape.d_model, state.shape.vocab);
}

void lay_strips(ScaledExponentials& state, int64_t strip) {
  LinearLayout& layout = state.layout;
  const int64_t rows = std::min(state.shape.n_tok, kPartRows);
  layout.chunk = {rows, rows};
  layout.strip = strip;
  layout.strip_tiles = static_cast<int>(strip / cuda::LogitsTile::kN);
  layout.vocab_slices = 1;
}

int64_t booked_bytes(const ScaledExponentials& state) {
  cuda::WorkspaceSlices slices(nullptr, nullptr);
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

Status not_taken(std::string_view what) {
  return {kHeadUnknownKind,
          "the fused head on a GPU does not take " + std::string(what) +
              "; accepted: cross_entropy, z_loss, grpo, gspo, cispo and dpo on one softmax"};
}

Status check_taken(const Shape& shape, const HeadConfig& config, const Request& request) {
  for (const LossTerm& term : config.terms) {
    if (term.kind == LossKind::kDistillation)
      return not_taken("term '" + term.name + "', a distillation");
    if (term.label_smoothing > 0)
      return not_taken("term '" + term.name + "', which smooths labels");
    if (term.logits_scale != 1)
      return not_taken("term '" + term.name + "' with a logits_scale of its own");
  }
  if (config.terms.size() > cuda::kMaxTerms) {
    return not_taken(describe(config.terms.size()) + " terms (up to " + describe(cuda::kMaxTerms) +
                     ")");
  }
  const HeadOptions& options = config.options;
  if (options.softcap > 0) return not_taken("a softcap");
  if (options.bias) return not_taken("a bias");
  if (options.adapter_rank > 0) return not_taken("an adapter");
  if (request.entropy) return not_taken("entropies");
  if (request.policy_metrics) return not_taken("policy metrics");
  const auto bf16 = [](DType dtype, std::string_view field) -> Status {
    if (dtype == DType::kBF16) return kHeadOk;
    return {kHeadBadDtype, std::string(field) + " is " + std::string(name_of(dtype)) +
                               "; accepted by the fused head on a GPU: bf16"};
  };
  if (Status status = bf16(request.input_dtype, "hidden"); !status.ok()) return status;
  if (Status status = bf16(request.weight_dtype, "weight"); !status.ok()) return status;
  if (request.d_hidden) {
    if (Status status = bf16(request.grad_dtype, "d_hidden"); !status.ok()) return status;
  }
  if (request.d_weight && request.d_weight_dtype != DType::kBF16 &&
      request.d_weight_dtype != DType::kF32) {
    return {kHeadBadDtype, "d_weight is " + std::string(name_of(request.d_weight_dtype)) +
                               "; accepted by the fused head on a GPU: f32, bf16"};
  }
  if (shape.d_model == 0 || shape.d_model % 8 != 0) {
    return {kHeadShapeMismatch, "d_model is " + describe(shape.d_model) +
                                    "; accepted by the fused head on a GPU: a multiple of 8, > 0"};
  }
  return kHeadOk;
}

// The tensor copies need 16-byte rows.
Status check_aligned(std::string_view field, const MatrixView& view) {
  const auto address = reinterpret_cast<uintptr_t>(view.data);
  if (address % 16 == 0 && view.row_stride * size_of(view.dtype) % 16 == 0) return kHeadOk;
  return {kHeadShapeMismatch,
          std::string(field) + " has a base or a row_stride (" + describe(view.row_stride) +
              ") that is not a multiple of 16 bytes, which the tensor copies need"};
}

Status check_operand(std::string_view field, const MatrixView& view, DType dtype, int64_t rows,
                     int64_t cols) {
  if (!view) return {kHeadMissingInput, std::string(field) + " is not given"};
  if (Status status = cuda::check_matrix(field, view, dtype, rows, cols); !status.ok())
    return status;
  return check_aligned(field, view);
}

Status check_linear_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                           const Inputs& inputs, const Outputs& outputs) {
  const int64_t n = shape.n_tok, d = shape.d_model, v = shape.vocab;
  if (n > 0) {
    if (Status status = check_operand("hidden", inputs.hidden, DType::kBF16, n, d); !status.ok())
      return status;
  }
  if (Status status = check_operand("weight", inputs.weight, DType::kBF16, v, d); !status.ok())
    return status;
  if (Status status = cuda::check_row_inputs(shape, config, request, inputs, outputs); !status.ok())
    return status;
  if (outputs.entropy || !outputs.argmax.empty() || !outputs.correct.empty()) {
    return {
        kHeadUnknownKind,
        std::string(cuda::kScaledExponentials) +
            " does not make entropy, argmax or correct; accepted: without them, or the kernel " +
            std::string(cuda::kChunkedProducts)};
  }
  if (request.d_hidden && n > 0) {
    Status status = check_operand("d_hidden", outputs.d_hidden, DType::kBF16, n, d);
    if (!status.ok()) return status;
  }
  if (request.d_weight) {
    Status status = check_operand("d_weight", outputs.d_weight, request.d_weight_dtype, v, d);
    if (!status.ok()) return status;
  }
  return kHeadOk;
}

// Rows of a chunk, as even as whole cluster tiles allow.
int64_t even_chunk(int64_t n_tok, int64_t largest) {
  if (n_tok <= largest) return n_tok;
  const int64_t n_chunks = cuda::divide_up(n_tok, largest);
  return cuda::divide_up(cuda::divide_up(n_tok, n_chunks), cuda::kChunkRows) * cuda::kChunkRows;
}

// Waves of tiles that the d_weight product of a lodged group takes, range by range; a launch fills
// and drains the device once.
double waves_of_ranges(const Shape& shape, int64_t range_columns, int64_t n_ranges) {
  using Tile = cuda::GradientTile;
  constexpr double kLaunchWaves = 0.3;
  const int64_t across = cuda::divide_up(shape.d_model, Tile::kN);
  double waves = kLaunchWaves * static_cast<double>(n_ranges);
  for (int64_t end = cuda::divide_up(shape.vocab, cuda::kStripColumns) * cuda::kStripColumns;
       end > 0; end -= range_columns) {
    const int64_t columns = std::min(end, range_columns);
    waves += static_cast<double>(cuda::divide_up(
        cuda::divide_up(columns, Tile::kM * Tile::kClusterM) * across, cuda::kResidentClusters));
  }
  return waves;
}

// The first group's exponentials in d_weight's memory: 2 d_model rows fit there where it is f32,
// d_model where it is bf16, which has to be the only group; the last range is in the workspace.
// Fewest passes over d_weight first, then the longest parts, then the fewest waves. False where
// nothing fits the budget, or the vocabulary is one range.
bool lay_lodged(ScaledExponentials& state, int64_t budget) {
  const int64_t n = state.shape.n_tok, d = state.shape.d_model, v = state.shape.vocab;
  const int64_t end = cuda::divide_up(v, cuda::kStripColumns) * cuda::kStripColumns;
  LinearLayout& layout = state.layout;
  lay_chunks(state, 0);
  const auto lay_ranges = [&](int64_t range_columns, int64_t part) {
    // Range r of the exponentials has to fit d_weight's range r + 1, and that may end early.
    const bool rounds = is_rounded(state.request);
    int64_t rows = (rounds ? 1 : 2) * d * (range_columns - (end - v)) / range_columns;
    rows = rows >= n ? n : rounds ? 0 : rows / cuda::kChunkRows * cuda::kChunkRows;
    layout.lodged = {rows, std::min(rows, part)};
    layout.range_columns = range_columns;
    layout.n_ranges = static_cast<int>(cuda::divide_up(end, range_columns));
  };
  const auto fits = [&](int64_t chunk, int64_t part, int64_t allowed) {
    layout.chunk = {chunk, std::min(chunk, part)};
    return booked_bytes(state) <= allowed;
  };
  LinearLayout best = layout;
  int64_t best_passes = 0;
  for (int64_t part = kPartRows; part >= cuda::kChunkRows; part /= 2) {
    LinearLayout ranges = best;
    ranges.lodged = {};
    double least_waves = 0;
    for (int64_t columns = cuda::kStripColumns; columns < end; columns += cuda::kStripColumns) {
      lay_ranges(columns, part);
      if (layout.lodged.rows == 0 || layout.lodged.rows < ranges.lodged.rows) continue;
      if (!fits(layout.lodged.rows < n ? cuda::kChunkRows : 0, part, budget)) continue;
      const double waves = waves_of_ranges(state.shape, columns, layout.n_ranges);
      if (layout.lodged.rows > ranges.lodged.rows || waves < least_waves)
        ranges = layout, least_waves = waves;
    }
    if (ranges.lodged.rows == 0) continue;
    // The rest in chunks as large as the budget allows. Without a rest, chunks are what a run that
    // adds to d_weight falls back to, in the memory booked here.
    layout = ranges;
    const int64_t rest = n - layout.lodged.rows;
    const int64_t most = cuda::divide_up(rest > 0 ? rest : n, cuda::kChunkRows) * cuda::kChunkRows;
    const int64_t allowed = rest > 0 ? budget : booked_bytes(state);
    int64_t chunk = ranges.chunk.rows;
    while (!is_rounded(state.request) && chunk < most &&
           fits(chunk + cuda::kChunkRows, part, allowed))
      chunk += cuda::kChunkRows;
    if (chunk > 0) chunk = even_chunk(most, chunk);
    layout.chunk = {chunk, std::min(chunk, part)};
    const int64_t passes = layout.n_groups(n);
    if (best_passes == 0 || passes < best_passes) best = layout, best_passes = passes;
  }
  layout = best;
  return best_passes > 0;
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
    if (options.chunk < 0 || (options.chunk % cuda::kChunkRows != 0 && options.chunk < n)) {
      return {kLossBadChunk, "chunk is " + describe(options.chunk) + "; accepted: a multiple of " +
                                 describe(cuda::kChunkRows) + " rows, or n_tok or more"};
    }
    const int64_t chunk = std::min(options.chunk, n);
    if (options.budget_bytes > 0 && bytes_at(state, chunk) > budget) return refuse(chunk);
    lay_chunks(state, chunk);
    return kHeadOk;
  }
  // Chunks of rows first: 0 rows where not even the least fits.
  int64_t largest = std::min(n, cuda::kChunkRows);
  if (bytes_at(state, largest) > budget) largest = 0;
  while (largest > 0 && largest < n &&
         bytes_at(state, std::min(n, largest + cuda::kChunkRows)) <= budget) {
    largest = std::min(n, largest + cuda::kChunkRows);
  }
  // Exponentials in d_weight's memory save passes over it.
  if (state.request.d_weight && !options.accumulate && largest < n && lay_lodged(state, budget)) {
    const int64_t passes = state.layout.n_groups(n);
    if (largest == 0 || passes < cuda::divide_up(n, largest)) return kHeadOk;
  }
  if (largest > 0 || n == 0) {
    lay_chunks(state, largest == 0 ? 0 : even_chunk(n, largest));
    return kHeadOk;
  }
  // Strips need no f32 d_weight, but every row's sums before any gradient, which sequence terms
  // would need twice.
  const bool strips = is_rounded(state.request) && state.n_sequence_terms == 0 && !state.filters();
  int64_t strip = 0;
  while (strips && strip < state.shape.vocab &&
         bytes_of_strip(state, strip + cuda::kStripColumns) <= budget) {
    strip += cuda::kStripColumns;
  }
  if (strip == 0) return refuse(std::min(n, cuda::kChunkRows));
  lay_strips(state, strip);
  return kHeadOk;
}

// Parts of rows: each has its own product for the logits.
int64_t n_parts(const LinearLayout& layout, int64_t n_tok) {
  int64_t parts = 0;
  for (int64_t first = 0; first < n_tok;) {
    const RowGroup group = layout.group_at(first, n_tok);
    parts += cuda::divide_up(group.rows, group.part);
    first += group.rows;
  }
  return parts;
}

double operations_of(const ScaledExponentials& state) {
  const double product = 2.0 * static_cast<double>(state.shape.n_tok) *
                         static_cast<double>(state.shape.d_model) *
                         static_cast<double>(state.shape.vocab);
  const int products = 1 + (state.request.d_hidden ? 1 : 0) + (state.request.d_weight ? 1 : 0) +
                       (state.mode == "chunk" ? 0 : 1);
  return product * products;
}

int launches_of(const ScaledExponentials& state) {
  const LinearLayout& layout = state.layout;
  const Request& request = state.request;
  const int64_t n = state.shape.n_tok;
  const auto parts = static_cast<int>(n_parts(layout, n));
  int launches = 2 + (n > 0 ? 1 : 0);  // census, scalars, columns
  if (layout.strip > 0) {
    const auto strips = static_cast<int>(cuda::divide_up(state.shape.vocab, layout.strip));
    return launches + 2 * parts + strips * (5 + (request.d_hidden ? 1 : 0)) +
           (request.d_hidden ? 1 : 0);
  }
  launches += parts * (2 + (request.d_hidden ? 2 : 0));
  if (request.d_weight) {
    launches += static_cast<int>(layout.n_groups(n)) +
                (layout.lodged.rows > 0 ? layout.n_ranges - 1 : 0) + (n > 0 ? 1 : 0) +
                (is_rounded(request) ? 1 : 0);  // its rounding, or the reset of its label slots
  }
  if (state.filters()) {
    launches += 3 * parts + (request.d_weight ? static_cast<int>(layout.n_groups(n)) : 0) +
                (request.d_weight && layout.lodged.rows > 0 ? layout.n_ranges - 1 : 0);
  }
  if (state.n_sequence_terms > 0 && n > 0) {
    launches += 2;  // sums and slopes
    // The rows again, and the logits where they are not kept.
    if (request.d_hidden || request.d_weight) launches += parts == 1 ? 1 : 2 * parts;
  }
  return launches;
}

Status ScaledExponentials::run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
                               std::byte* workspace) const {
  const ScaledExponentials& state = *this;
  Status status = check_linear_inputs(state.shape, state.config, state.request, inputs, outputs);
  if (!status.ok()) return status;
  HeadParams p;
  p.n_tok = state.shape.n_tok;
  p.vocab = state.shape.vocab;
  p.vocab_offset = state.config.options.vocab_offset;
  p.scale = static_cast<float>(state.config.options.logits_scale);
  cuda::fill_vectors(inputs, outputs, p);
  cuda::fill_terms(state.config, inputs, outputs, p);
  LinearParams r;
  r.layout = state.layout;
  r.n_tok = state.shape.n_tok;
  r.d_model = state.shape.d_model;
  r.vocab = state.shape.vocab;
  r.hidden = inputs.hidden.data;
  r.hidden_stride = inputs.hidden.row_stride;
  r.weight = inputs.weight.data;
  r.weight_stride = inputs.weight.row_stride;
  r.accumulate = outputs.accumulate;
  if (state.request.d_hidden) {
    r.d_hidden = outputs.d_hidden.data;
    r.d_hidden_stride = outputs.d_hidden.row_stride;
  }
  if (state.request.d_weight) {
    // What d_weight holds is wanted, or it has gaps that are not the library's.
    const bool apart = r.accumulate || outputs.d_weight.row_stride != r.d_model;
    if (r.layout.lodged.rows > 0 && apart) {
      if (r.layout.chunk.rows == 0) {
        return {kHeadShapeMismatch,
                "d_weight is " + std::string(r.accumulate ? "accumulated" : "not contiguous") +
                    "; this plan keeps exponentials in its memory, which takes a contiguous "
                    "d_weight that is overwritten. Plan with `accumulate` set"};
      }
      r.layout.lodged = {};
    }
  }
  cuda::WorkspaceSlices slices(workspace, nullptr);
  take_workspace(state, slices, p, r);
  if (is_rounded(state.request)) {
    r.d_weight_sum_stride = state.shape.d_model;
    r.d_weight_rounded = outputs.d_weight.data;
    r.d_weight_rounded_stride = outputs.d_weight.row_stride;
  } else if (state.request.d_weight) {
    r.d_weight_sum = static_cast<float*>(outputs.d_weight.data);
    r.d_weight_sum_stride = outputs.d_weight.row_stride;
  }
  // Segments and pairs that no term of the plan asks for are not counted.
  if (p.segment_tokens == nullptr) {
    p.segments = {};
    p.pairs = {};
    p.n_segments = p.n_pairs = 0;
  }
  return cuda::launch_linear_head(p, r, stream);
}

Result<FilterReport> ScaledExponentials::filter_report(CUstream_st* stream,
                                                       std::byte* workspace) const {
  if (!filters()) return State::filter_report(stream, workspace);
  HeadParams p;
  LinearParams r;
  r.n_tok = shape.n_tok;
  cuda::WorkspaceSlices slices(workspace, nullptr);
  take_workspace(*this, slices, p, r);
  std::vector<cuda::SkippedMass> rows;
  std::vector<int> counts;
  if (Status status = cuda::read_filter(r, rows, counts, stream); !status.ok()) return status;
  FilterReport report;
  for (const cuda::SkippedMass& row : rows) {
    report.largest_share = std::max(report.largest_share, static_cast<double>(row.share));
    report.largest_gradient = std::max(report.largest_gradient, static_cast<double>(row.gradient));
    report.total_gradient += row.gradient;
  }
  double kept = 0;
  for (const int count : counts) kept += count;
  if (!counts.empty()) report.kept = kept / static_cast<double>(counts.size()) / layout.n_tiles;
  return report;
}

}  // namespace

Result<cuda::LinearState> cuda::plan_scaled_exponentials(const Shape& shape,
                                                         const HeadConfig& config,
                                                         const Request& request,
                                                         const CudaLinearHeadOptions& options) {
  if (Status status = check_taken(shape, config, request); !status.ok()) return status;
  if (options.device.compute_capability != 90) {
    return Status(kCudaUnsupportedDevice,
                  options.device.name + " has compute capability " +
                      describe(options.device.compute_capability) +
                      "; the fused head needs 90, Hopper's matrix instructions");
  }
  const double tolerance = options.filter_tolerance;
  if (!(tolerance >= 0 && tolerance < 1)) {
    return Status(kHeadUnknownKind, "filter_tolerance is " + describe(tolerance) +
                                        "; accepted: 0 (exact) or more, and less than 1");
  }
  auto state = std::make_shared<ScaledExponentials>();
  // Without gradients there is nothing to leave out.
  state->filter_tolerance = request.d_hidden || request.d_weight ? tolerance : 0;
  state->kernel = kScaledExponentials;
  state->shape = shape;
  state->config = config;
  state->request = request;
  for (const LossTerm& term : config.terms)
    state->n_sequence_terms += cuda::is_sequence(term) ? 1 : 0;
  LinearLayout& layout = state->layout;
  layout.n_tiles = static_cast<int>(cuda::divide_up(shape.vocab, cuda::LogitsTile::kN));
  if (Status status = choose_layout(*state, options); !status.ok()) return status;
  state->chunk = layout.longest_group();
  state->n_chunks = layout.n_groups(shape.n_tok);
  state->lodged_rows = layout.lodged.rows;
  cuda::WorkspaceSlices slices(nullptr, &state->bookings);
  HeadParams p;
  LinearParams r;
  take_workspace(*state, slices, p, r);
  state->workspace_bytes = slices.used();
  const bool gradients = request.d_hidden || request.d_weight;
  const bool two_pass =
      state->n_sequence_terms > 0 && gradients && n_parts(layout, shape.n_tok) > 1;
  state->mode = layout.strip > 0 ? "strip" : two_pass ? "chunk_two_pass" : "chunk";
  state->operations = operations_of(*state);
  state->launches = launches_of(*state);
  return cuda::LinearState(std::move(state));
}

}  // namespace ullage::lossk
