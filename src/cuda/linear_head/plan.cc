#include <string>
#include <string_view>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cuda/head_logits/fill_params.h"
#include "cuda/linear_head/scaled_exponentials.h"

namespace ullage::lossk::cuda {
namespace {

int64_t whole_blocks(int64_t columns) {
  return divide_up(columns, product::kBlockColumns) * product::kBlockColumns;
}

void take_filter(const ScaledExponentials& state, WorkspaceSlices& slices, FilterParams& filter) {
  const LinearLayout& layout = state.layout;
  const int64_t n = state.shape.n_tok;
  const int64_t groups = divide_up(layout.longest_group(), kChunkRows);
  const int64_t part_groups = divide_up(layout.longest_part(), kChunkRows);
  const int64_t tiles =
      divide_up(state.shape.vocab, int64_t{GradientTile::kM} * GradientTile::kClusterM);
  filter.threshold = static_cast<float>(state.filter_tolerance / layout.n_tiles);
  slices.take(filter.kept, "tiles kept by the filter", groups * layout.n_tiles);
  slices.take(filter.inverse_sum, "inverse row sums", n * 4);
  slices.take(filter.skipped, "row shares left out", n * 8);
  slices.take(filter.tile_counts, "lengths of the lists of tiles", divide_up(n, kChunkRows) * 4);
  slices.take(filter.tile_entries, "lists of tiles", part_groups * layout.n_tiles * 4);
  slices.take(filter.group_counts, "lengths of the lists of row groups", tiles * 4);
  slices.take(filter.group_entries, "lists of row groups", tiles * groups * 4);
}

}  // namespace

void take_workspace(const ScaledExponentials& state, WorkspaceSlices& slices, HeadParams& p,
                    LinearParams& r) {
  const int64_t n = state.shape.n_tok, d = state.shape.d_model, v = state.shape.vocab;
  const LinearLayout& layout = state.layout;
  const bool gradients = state.request.d_hidden || state.request.d_weight;
  bool segments = false;
  for (const LossTerm& term : state.config.terms) segments |= needs_segment_ids(term);
  slices.take(p.census, "status word and divisors", sizeof(Census));
  slices.take(p.row_losses, "row losses of each term",
              static_cast<int64_t>(state.config.terms.size()) * n * 4);
  slices.take(p.row_log_prob, "log-probabilities of the labels", n * 4);
  if (segments) slices.take(p.segment_tokens, "tokens of each segment", n * 4);
  slices.take(p.segment_sums, "sums of each segment", int64_t{state.n_sequence_terms} * 2 * n * 8);
  slices.take(p.row_slopes, "slopes of sequence terms", state.n_sequence_terms * n * 4);
  slices.take(r.columns, "label columns", n * 4);
  slices.take(r.softmax_scale, "row factors of the softmax", n * 4);
  slices.take(r.label_gain, "gradients of the label columns", n * 4);
  if (state.request.d_weight) {
    slices.take(r.next_row, "rows that share a label", n * 4);
    slices.take(r.leads, "first rows of a label", n);
  }
  if (layout.strips || state.filters()) slices.take(r.row_shift, "row shifts", n * 4);
  const int64_t range = layout.n_ranges > 0 ? layout.last_columns(v) : 0;
  const bool lodges = layout.lodged.rows > 0;
  if (state.rounds() && lodges && !layout.strips) {
    slices.take(r.label_slots, "rows of the label columns", v * 4);
    slices.take(r.label_sums, "label columns of d_weight in f32", n * d * 4);
  } else if (state.rounds()) {
    slices.take(r.d_weight_sum, "d_weight in f32", (layout.strips ? range : v) * d * 4);
  }
  // Rows of strips whose exponentials are made again, a slab at a time.
  const int64_t again = std::min(layout.slab, layout.recomputed);
  if (gradients) {
    const int64_t made_again = again * whole_blocks(range);
    const int64_t end = layout.lodged.rows * whole_blocks(range);
    int64_t kept = std::max(layout.chunk.rows * whole_blocks(v), layout.beside > 0 ? 0 : end);
    if (!lodges) kept = std::max(kept, made_again);
    slices.take(r.exponentials, lodges ? "exponentials outside d_weight" : "exponentials",
                2 * kept);
    // The last range of lodged exponentials waits beside those made again, or a chunk's.
    r.made_again = r.lodged_end = r.exponentials;
    if (layout.beside > 0) slices.take(r.lodged_end, "last range of lodged exponentials", 2 * end);
    if (lodges) slices.take(r.made_again, "exponentials made again", 2 * made_again);
    if (lodges && !layout.strips)
      slices.take(r.tiles_read, "counts of tiles read", int64_t{layout.n_ranges} * 4);
  }
  slices.take(r.partial, "tile sums",
              std::max(layout.longest_part() * layout.n_tiles,
                       again * divide_up(range, int64_t{LogitsTile::kN})) *
                  int64_t{8});
  slices.take(r.label_logit, "label logits", std::max(layout.longest_part(), again) * 4);
  if (state.request.d_weight) {
    const int64_t rows = layout.strips ? std::min(layout.slab, n) : layout.longest_group();
    slices.take(r.scaled_hidden, "scaled hidden rows", rows * d * 2);
  }
  if (state.request.d_hidden) {
    slices.take(r.slices, "slices of d_hidden",
                layout.vocab_slices * layout.longest_part() * d * 4);
  }
  if (state.filters()) take_filter(state, slices, r.filter);
}

namespace {

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
  if (config.terms.size() > kMaxTerms) {
    return not_taken(describe(config.terms.size()) + " terms (up to " + describe(kMaxTerms) + ")");
  }
  const HeadOptions& options = config.options;
  if (options.softcap > 0) return not_taken("a softcap");
  if (options.bias) return not_taken("a bias");
  if (options.adapter_rank > 0) return not_taken("an adapter");
  if (request.entropy) return not_taken("entropies");
  if (request.policy_metrics) return not_taken("policy metrics");
  const DType dtype = request.input_dtype;
  if (dtype != DType::kBF16 && dtype != DType::kF16) {
    return {kHeadBadDtype, "hidden is " + std::string(name_of(dtype)) +
                               "; accepted by the fused head on a GPU: bf16, f16"};
  }
  const auto same = [&](DType other, std::string_view field) -> Status {
    if (other == dtype) return kHeadOk;
    return {kHeadBadDtype, std::string(field) + " is " + std::string(name_of(other)) +
                               "; accepted by the fused head on a GPU: hidden's, " +
                               std::string(name_of(dtype))};
  };
  if (Status status = same(request.weight_dtype, "weight"); !status.ok()) return status;
  if (request.d_hidden) {
    if (Status status = same(request.grad_dtype, "d_hidden"); !status.ok()) return status;
  }
  if (request.d_weight && request.d_weight_dtype != DType::kF32) {
    if (Status status = same(request.d_weight_dtype, "d_weight, which is not f32,"); !status.ok())
      return status;
  }
  if (shape.d_model == 0 || shape.d_model % 8 != 0) {
    return {kHeadShapeMismatch, "d_model is " + describe(shape.d_model) +
                                    "; accepted by the fused head on a GPU: a multiple of 8, > 0"};
  }
  return kHeadOk;
}

// Parts of rows: each has its own product for the logits.
int n_parts(const LinearLayout& layout, int64_t n_tok) {
  int64_t parts = 0;
  layout.for_each_group(n_tok, [&](int64_t, const RowGroup& group) {
    parts += divide_up(group.lodged, group.part) + divide_up(group.rows - group.lodged, group.part);
  });
  return static_cast<int>(parts);
}

// A sequence's slope needs all its rows: the logits of several parts are made twice.
bool makes_logits_twice(const ScaledExponentials& state) {
  return state.n_sequence_terms > 0 && (state.request.d_hidden || state.request.d_weight) &&
         n_parts(state.layout, state.shape.n_tok) > 1;
}

double operations_of(const ScaledExponentials& state) {
  const double row =
      2.0 * static_cast<double>(state.shape.d_model) * static_cast<double>(state.shape.vocab);
  const int products = 1 + (state.request.d_hidden ? 1 : 0) + (state.request.d_weight ? 1 : 0) +
                       (makes_logits_twice(state) ? 1 : 0);
  return row * (products * static_cast<double>(state.shape.n_tok) +
                static_cast<double>(state.layout.recomputed));
}

// Of d_weight by strips: see add_strips.
int launches_of_strips(const LinearLayout& layout, int64_t n, bool rounds) {
  const auto slabs = [&](int64_t rows) { return static_cast<int>(divide_up(rows, layout.slab)); };
  const int scales = layout.slab >= n ? 0 : 1;
  const int range = slabs(layout.recomputed) * (3 + scales) +
                    slabs(n - layout.recomputed) * (1 + scales) + (rounds ? 2 : 0);
  return layout.n_ranges * range + (scales == 0 ? 1 : 0) + (rounds ? 0 : 1);
}

int launches_of(const ScaledExponentials& state) {
  const LinearLayout& layout = state.layout;
  const Request& request = state.request;
  const int64_t n = state.shape.n_tok;
  const int parts = n_parts(layout, n);
  int launches = 2 + (n > 0 ? 1 : 0);         // census, scalars, columns
  if (request.d_weight && n > 0) ++launches;  // chains
  launches += parts * (2 + (request.d_hidden ? 2 : 0));
  if (request.d_weight && layout.strips) {
    launches += launches_of_strips(layout, n, state.rounds());
  } else if (request.d_weight) {
    launches += static_cast<int>(n_groups(layout, n)) + (n > 0 ? 1 : 0) +
                (layout.lodged.rows > 0 ? 1 : 0) +  // the reset of the counts of tiles
                (state.rounds() ? 1 : 0);           // its rounding, or the reset of its label slots
  }
  if (state.filters())
    launches += 3 * parts + (request.d_weight ? static_cast<int>(n_groups(layout, n)) : 0);
  if (state.n_sequence_terms > 0 && n > 0) {
    launches += 2;  // sums and slopes
    // The rows again, and the logits where they are not kept.
    if (request.d_hidden || request.d_weight) launches += parts == 1 ? 1 : 2 * parts;
  }
  return launches;
}

}  // namespace

Result<LinearState> plan_scaled_exponentials(const Shape& shape, const HeadConfig& config,
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
  for (const LossTerm& term : config.terms) state->n_sequence_terms += is_sequence(term) ? 1 : 0;
  if (Status status = choose_layout(*state, options); !status.ok()) return status;
  const LinearLayout& layout = state->layout;
  state->chunk = layout.strips ? std::min(layout.slab, shape.n_tok) : layout.longest_group();
  state->n_chunks = layout.strips ? divide_up(layout.recomputed, layout.slab) +
                                        divide_up(shape.n_tok - layout.recomputed, layout.slab)
                                  : n_groups(layout, shape.n_tok);
  state->lodged_rows = layout.lodged.rows;
  WorkspaceSlices slices(nullptr, &state->bookings);
  HeadParams p;
  LinearParams r;
  take_workspace(*state, slices, p, r);
  state->workspace_bytes = slices.used();
  state->mode = layout.strips ? "strip" : makes_logits_twice(*state) ? "chunk_two_pass" : "chunk";
  state->operations = operations_of(*state);
  state->launches = launches_of(*state);
  return LinearState(std::move(state));
}

}  // namespace ullage::lossk::cuda
