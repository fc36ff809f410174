#include <algorithm>
#include <atomic>
#include <cmath>
#include <numbers>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cuda/head_logits/check.h"
#include "cuda/head_logits/config.h"
#include "cuda/head_logits/fill_params.h"
#include "cuda/head_logits/launch.h"
#include "cuda/head_logits/open_rows.h"
#include "cuda/head_logits/passes.h"
#include "cuda/head_logits/report.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::lossk {

using cuda::Family;
using cuda::HeadParams;

// Where each purpose lies in the workspace.
struct WorkspaceSlice {
  int64_t offset = 0, bytes = 0;
};
enum SliceName {
  kCensusSlice,
  kRowLossesSlice,
  kLogProbsSlice,
  kEntropySlice,
  kSegmentTokensSlice,
  kSegmentSumsSlice,
  kSlopesSlice,
  kTopKLogitsSlice,
  kTopKHeldSlice,
  kTopKOthersSlice,
  kRowWordsSlice,
  kSlices,
};

// What runs ask for beside losses and the gradient.
enum Asked {
  kNothing,
  kEntropyAlone,
  kOthers,  // arg max or smoothed labels, with the entropy or without
  kAsked,
};
// For rows that all lie on 16-byte boundaries, and for others.
struct Launches {
  cuda::RowLaunch aligned, any;
};

struct CudaHeadPlan::State {
  Shape shape;
  HeadConfig config;
  Request request;
  std::string kernel;
  std::vector<Booking> bookings;
  std::vector<Rejection> rejections;
  WorkspaceSlice slices[kSlices];
  int64_t workspace_bytes = 0;
  int n_sequence_terms = 0;
  struct PlannedPass {
    bool top_k = false, sequences = false;
    Launches launches[kAsked];
  };
  std::vector<cuda::Pass> passes;
  std::vector<PlannedPass> planned;  // the same
};

namespace {

Status not_taken(const LossTerm& term, std::string_view field, const std::string& value,
                 std::string_view accepted) {
  return {kHeadUnknownKind, "term '" + term.name + "': " + std::string(field) + " is " + value +
                                "; accepted on a GPU: " + std::string(accepted)};
}

// What the algebra takes and these kernels do not.
Status check_taken(const Shape& shape, const HeadConfig& config, const Request& request,
                   const CudaDevice& device) {
  if (shape.d_model != 0) {
    return {kHeadShapeMismatch,
            "d_model is " + describe(shape.d_model) + "; accepted: 0, for the logits are given"};
  }
  // Columns are counted in 32 bits and so are blocks; offsets of elements are not.
  for (const auto& [what, size] : {std::pair{"n_tok", shape.n_tok}, {"vocab", shape.vocab}}) {
    if (size > INT32_MAX) {
      return {kLossDimensionTooLarge, std::string(what) + " is " + describe(size) +
                                          "; accepted on a GPU: up to " + describe(INT32_MAX)};
    }
  }
  if (request.input_dtype == DType::kF64) {
    return {kHeadBadDtype, "the logits are f64; accepted on a GPU: f32, bf16, f16"};
  }
  if (request.d_logits && request.grad_dtype != request.input_dtype) {
    return {kHeadBadDtype, "d_logits is " + std::string(name_of(request.grad_dtype)) +
                               "; accepted on a GPU: the logits' " +
                               std::string(name_of(request.input_dtype))};
  }
  if (config.terms.size() > cuda::kMaxTerms) {
    return {kHeadBadConfig, "terms has " + describe(config.terms.size()) +
                                " entries; accepted on a GPU: up to " + describe(cuda::kMaxTerms)};
  }
  for (const LossTerm& term : config.terms) {
    if (term.kind != LossKind::kDistillation) continue;
    const Teacher& teacher = config.teachers[static_cast<size_t>(term.teacher)];
    if (teacher.kind == TeacherKind::kTopK) {
      if (teacher.k > INT32_MAX) {
        return not_taken(term, "its teacher's k", describe(teacher.k), "up to 2147483647");
      }
      if (shape.vocab > cuda::most_top_k_columns(device)) {
        return {kLossDimensionTooLarge,
                "term '" + term.name + "': vocab is " + describe(shape.vocab) +
                    "; accepted with a top-k teacher on " + device.name + ": up to " +
                    describe(cuda::most_top_k_columns(device))};
      }
      continue;
    }
    if (teacher.kind != TeacherKind::kLogits) {
      return not_taken(term, "its teacher's kind", describe(static_cast<int>(teacher.kind)),
                       "0, logits, or 2, top-k");
    }
    if (teacher.dtype != request.input_dtype) {
      return {kHeadBadDtype, "term '" + term.name + "': its teacher's logits are " +
                                 std::string(name_of(teacher.dtype)) +
                                 "; accepted on a GPU: the logits' " +
                                 std::string(name_of(request.input_dtype))};
    }
  }
  return kHeadOk;
}

void book(CudaHeadPlan::State& state, SliceName slice, std::string purpose, int64_t bytes) {
  if (bytes == 0) return;
  const int64_t rounded = cuda::round_up(bytes, 256);
  state.slices[slice] = {state.workspace_bytes, rounded};
  state.workspace_bytes += rounded;
  state.bookings.push_back({std::move(purpose), rounded});
}

void book_workspace(CudaHeadPlan::State& state) {
  const int64_t n = state.shape.n_tok;
  const auto n_terms = static_cast<int64_t>(state.config.terms.size());
  const auto n_passes = static_cast<int64_t>(state.passes.size());
  bool segments = state.request.policy_metrics;
  for (const LossTerm& term : state.config.terms) segments |= needs_segment_ids(term);
  book(state, kCensusSlice, "status word and divisors", sizeof(cuda::Census));
  book(state, kRowLossesSlice, "row losses of each term", n_terms * n * 4);
  book(state, kLogProbsSlice, "log-probabilities of the labels", n_passes * n * 4);
  if (state.request.policy_metrics) book(state, kEntropySlice, "entropies", n_passes * n * 4);
  if (segments) book(state, kSegmentTokensSlice, "tokens of each segment", n * 4);
  book(state, kSegmentSumsSlice, "sums of each segment",
       int64_t{state.n_sequence_terms} * 2 * n * 8);
  book(state, kSlopesSlice, "slopes of sequence terms", state.n_sequence_terms * n * 4);
  int64_t k = 0;  // passes take turns
  for (const LossTerm& term : state.config.terms) {
    if (!cuda::is_top_k(state.config, term)) continue;
    k = std::max(k, state.config.teachers[static_cast<size_t>(term.teacher)].k);
  }
  if (k == 0) return;
  book(state, kTopKLogitsSlice, "logits of the teacher's ids", n * k * 4);
  book(state, kTopKOthersSlice, "sums of the columns that the teacher leaves out", n * 2 * 4);
  if (!state.request.d_logits) return;
  book(state, kTopKHeldSlice, "what the gradient held at the teacher's ids", n * k * 4);
  book(state, kRowWordsSlice, "what the gradient of each row is made of", n * cuda::kRowWordBytes);
}

// How the rows lie on the device, and what of the algebra holds for every pass.
void fill_rows(const CudaHeadPlan::State& state, const Inputs& inputs, const Outputs& outputs,
               HeadParams& p) {
  p.logits = inputs.logits.data;
  p.logits_stride = inputs.logits.row_stride;
  p.gradient = outputs.d_logits.data;
  p.gradient_stride = outputs.d_logits.row_stride;
  p.accumulate = outputs.accumulate;
  p.n_tok = p.n_rows = state.shape.n_tok;
  p.vocab = state.shape.vocab;
  const HeadOptions& options = state.config.options;
  p.softcap = static_cast<float>(options.softcap);
  if (options.softcap > 0) p.inverse_softcap = static_cast<float>(1 / options.softcap);
}

bool is_aligned(const void* data, int64_t row_stride, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * element_bytes % 16 == 0;
}

// The launch of a pass over these rows; its layout into `p`.
const cuda::RowLaunch& lay_out_rows(const CudaHeadPlan::State::PlannedPass& pass, HeadParams& p) {
  const Asked asked = p.wants_argmax || p.wants_smoothing ? kOthers
                      : p.wants_entropy                   ? kEntropyAlone
                                                          : kNothing;
  const Launches& launches = pass.launches[asked];
  const int64_t element_bytes = size_of(launches.any.dtype);
  const bool aligned =
      is_aligned(p.logits, p.logits_stride, element_bytes) &&
      (p.teacher == nullptr || is_aligned(p.teacher, p.teacher_stride, element_bytes));
  const cuda::RowLaunch& launch = aligned ? launches.aligned : launches.any;
  const cuda::RowLayout& layout = launch.layout;
  p.cut = layout.cut;
  p.strips_per_block = layout.strips_per_block;
  p.strips_per_warp = layout.strips_per_warp;
  p.row_warps = layout.warps;
  p.groups = layout.groups;
  p.tables = layout.tables;
  p.ids = layout.ids;
  p.terms_warps = layout.terms_warps;
  p.rows_at_a_time = layout.rows_at_a_time;
  p.slots = layout.slots;
  p.slot_bytes = static_cast<int>(layout.slot_bytes);
  p.matrix_bytes = static_cast<int>(layout.matrix_bytes);
  p.table_bytes = static_cast<int>(layout.table_bytes);
  p.in_whole_words = layout.in_whole_words;
  return launch;
}

// Whether an output is of the rows' softmax, not of a term.
bool reports_rows(const HeadParams& p) {
  for (const cuda::RowOutput* output :
       {&p.lse, &p.label_log_prob, &p.entropy, &p.shift, &p.log_sum, &p.distance}) {
    if (output->data != nullptr) return true;
  }
  return p.argmax != nullptr || p.correct != nullptr;
}

void fill_workspace(const CudaHeadPlan::State& state, std::byte* base, HeadParams& p) {
  const auto slice = [&](SliceName name, auto& pointer) {
    using Pointer = std::remove_reference_t<decltype(pointer)>;
    if (state.slices[name].bytes > 0) {
      pointer = reinterpret_cast<Pointer>(base + state.slices[name].offset);
    }
  };
  slice(kCensusSlice, p.census);
  slice(kRowLossesSlice, p.row_losses);
  slice(kLogProbsSlice, p.row_log_prob);
  slice(kEntropySlice, p.row_entropy);
  slice(kSegmentTokensSlice, p.segment_tokens);
  slice(kSegmentSumsSlice, p.segment_sums);
  slice(kSlopesSlice, p.row_slopes);
  slice(kTopKLogitsSlice, p.top_k_logits);
  slice(kTopKHeldSlice, p.top_k_held);
  slice(kTopKOthersSlice, p.top_k_others);
  slice(kRowWordsSlice, p.row_words);
  // Segments and pairs that no term of the plan asks for are not counted.
  if (p.segment_tokens == nullptr) {
    p.segments = {};
    p.pairs = {};
    p.n_segments = p.n_pairs = 0;
  }
}

// The kernel and the layouts of one pass. The head's are those of the first that has terms.
Result<CudaHeadPlan::State::PlannedPass> plan_pass(CudaHeadPlan::State& state,
                                                   const cuda::Pass& pass,
                                                   const CudaHeadOptions& options,
                                                   const cuda::Tuning& tuning) {
  const DType dtype = state.request.input_dtype;
  const Family family = cuda::family_of(state.config, pass);
  const auto choose = [&](const cuda::RowWork& work, std::string_view kernel,
                          std::vector<Rejection>& rejections) -> Result<cuda::RowLaunch> {
    Result<cuda::RowLayout> layout = cuda::choose_row_layout(
        state.shape.vocab, dtype, work, options.device, kernel, tuning, rejections);
    if (!layout) return layout.status();
    return cuda::RowLaunch{*layout, dtype, work.family, options.device.n_multiprocessors};
  };
  CudaHeadPlan::State::PlannedPass planned;
  planned.top_k = pass.teacher >= 0 && !has_teacher(family);
  planned.sequences = cuda::is_sequence_pass(state.config, pass);
  const bool gradient = state.request.d_logits && !pass.terms.empty();
  const cuda::RowWork plain_work{.family = family, .gradient = gradient, .top_k = planned.top_k};
  cuda::RowWork works[kAsked] = {plain_work, plain_work, plain_work};
  works[kEntropyAlone].extras = works[kOthers].extras = true;
  if (!has_teacher(family)) works[kEntropyAlone].family = Family::kEntropy;
  std::vector<Rejection> rejections, unused;
  const Result<cuda::RowLaunch> plain = choose(works[kNothing], options.kernel, rejections);
  if (!plain) return plain.status();
  const std::string_view kernel = name_of(plain->layout.kernel);
  if (state.kernel.empty() && !pass.terms.empty()) {
    state.kernel = kernel;
    state.rejections = std::move(rejections);
  }
  // What is asked for beside it changes the layout, and the kernel where that one does not take it.
  const auto choose_beside = [&](const cuda::RowWork& work) {
    Result<cuda::RowLaunch> same = choose(work, kernel, unused);
    return same ? same : choose(work, "", unused);
  };
  for (int asked = 0; asked < kAsked; ++asked) {
    cuda::RowWork work = works[asked];
    const auto aligned = asked == kNothing ? plain : choose_beside(work);
    work.aligned = false;
    const auto any = choose_beside(work);
    if (!aligned) return aligned.status();
    if (!any) return any.status();
    planned.launches[asked] = {*aligned, *any};
  }
  return planned;
}

}  // namespace

const std::string& CudaHeadPlan::kernel() const { return state_->kernel; }
const std::vector<Booking>& CudaHeadPlan::bookings() const { return state_->bookings; }
int64_t CudaHeadPlan::workspace_bytes() const { return state_->workspace_bytes; }
const std::vector<Rejection>& CudaHeadPlan::rejections() const { return state_->rejections; }

int CudaHeadPlan::launches() const {
  const State& state = *state_;
  int launches = 2;  // census, scalars
  if (state.shape.n_tok == 0) return launches;
  if (state.n_sequence_terms > 0) launches += 2;
  for (const State::PlannedPass& pass : state.planned) {
    // A top-k teacher's ids are gathered before the rows, and their gradient patched after.
    const int forward = pass.top_k ? 2 : 1;
    const bool again = state.request.d_logits || !pass.sequences;
    if (pass.sequences) launches += forward;
    if (again) launches += forward + (pass.top_k && state.request.d_logits ? 1 : 0);
  }
  return launches;
}

Status CudaHeadPlan::run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
                         std::span<std::byte> workspace) const {
  const State& state = *state_;
  Status status =
      cuda::check_device_inputs(state.shape, state.config, state.request, inputs, outputs);
  if (!status.ok()) return status;
  status = cuda::check_workspace(workspace, state.workspace_bytes);
  if (!status.ok()) return status;
  const int64_t n_gradients = cuda::n_gradients(state.passes);
  if (n_gradients > 1 && outputs.d_logits && outputs.d_logits.data == inputs.logits.data) {
    return {kHeadShapeMismatch,
            "d_logits is the logits themselves; accepted: another buffer, for these terms take " +
                describe(n_gradients) +
                " passes over the logits, each of which leaves a part of it"};
  }
  const cuda::OpenRows rows = cuda::open_rows(*this, inputs, outputs, workspace.data());
  return cuda::launch_head(rows.params, rows.passes, stream);
}

cuda::OpenRows cuda::open_rows(const CudaHeadPlan& plan, const Inputs& inputs,
                               const Outputs& outputs, std::byte* workspace) {
  const CudaHeadPlan::State& state = plan.state();
  OpenRows rows;
  HeadParams& shared = rows.params;
  fill_rows(state, inputs, outputs, shared);
  fill_vectors(inputs, outputs, shared);
  fill_terms(state.config, state.passes, inputs, outputs, shared);
  fill_workspace(state, workspace, shared);
  for (size_t i = 0; i < state.passes.size(); ++i) {
    const CudaHeadPlan::State::PlannedPass& planned = state.planned[i];
    const bool has_terms = !state.passes[i].terms.empty();
    if (!has_terms && !reports_rows(shared)) continue;
    RowPass& pass = rows.passes.emplace_back();
    pass.params = shared;
    pass.sequences = planned.sequences;
    pass.gradient = has_terms;
    fill_pass(state.config, state.passes, i, inputs, pass.params);
    pass.launch = lay_out_rows(planned, pass.params);
    const int64_t at = static_cast<int64_t>(i) * shared.n_tok;
    if (pass.params.row_log_prob != nullptr) pass.params.row_log_prob += at;
    if (pass.params.row_entropy != nullptr) pass.params.row_entropy += at;
  }
  return rows;
}

Status CudaHeadPlan::check(CUstream_st* stream, std::span<const std::byte> workspace) const {
  const State& state = *state_;
  Status status = cuda::check_workspace(workspace, state.workspace_bytes);
  if (!status.ok()) return status;
  const std::byte* census = workspace.data() + state.slices[kCensusSlice].offset;
  return cuda::report_census(reinterpret_cast<const cuda::Census*>(census),
                             label_range(state.config.options, state.shape.vocab), stream);
}

Result<CudaHeadPlan> plan_cuda(const Shape& shape, const HeadConfig& config, const Request& request,
                               const CudaHeadOptions& options) {
  return cuda::plan_with_tuning(shape, config, request, options, {});
}

Result<CudaHeadPlan> cuda::plan_with_tuning(const Shape& shape, const HeadConfig& config,
                                            const Request& request, const CudaHeadOptions& options,
                                            const Tuning& tuning) {
  if (Status status = validate(config); !status.ok()) return status;
  if (Status status = check_plan(shape, config, request); !status.ok()) return status;
  if (Status status = check_taken(shape, config, request, options.device); !status.ok())
    return status;
  auto state = std::make_shared<CudaHeadPlan::State>();
  state->shape = shape;
  state->config = config;
  state->request = request;
  state->passes = passes_of(config);
  for (const Pass& pass : state->passes) {
    Result<CudaHeadPlan::State::PlannedPass> planned = plan_pass(*state, pass, options, tuning);
    if (!planned) return planned.status();
    state->planned.push_back(*std::move(planned));
  }
  for (const LossTerm& term : config.terms)
    state->n_sequence_terms += cuda::is_sequence(term) ? 1 : 0;
  book_workspace(*state);
  return CudaHeadPlan(std::move(state));
}

}  // namespace ullage::lossk
