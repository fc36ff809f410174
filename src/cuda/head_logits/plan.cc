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
  Launches launches[kAsked];
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
  const LossTerm *distillation = nullptr, *top_k = nullptr;  // the first from either teacher
  const LossTerm* jensen_shannon = nullptr;
  for (const LossTerm& term : config.terms) {
    if (term.logits_scale != 1) {
      return not_taken(term, "logits_scale", describe(term.logits_scale), "1");
    }
    if (term.kind != LossKind::kDistillation) continue;
    if (term.student_temperature != 1) {
      return not_taken(term, "student_temperature", describe(term.student_temperature), "1");
    }
    const Teacher& teacher = config.teachers[static_cast<size_t>(term.teacher)];
    const LossTerm*& first = teacher.kind == TeacherKind::kTopK ? top_k : distillation;
    if (first == nullptr) first = &term;
    if (top_k != nullptr && distillation != nullptr) {
      return not_taken(term, "teacher", describe(term.teacher),
                       "one kind of teacher for all terms, logits or top-k");
    }
    if (term.teacher != first->teacher) {
      return not_taken(term, "teacher", describe(term.teacher),
                       "one teacher for all terms, " + describe(first->teacher));
    }
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
    if (term.temperature != distillation->temperature) {
      return not_taken(term, "temperature", describe(term.temperature),
                       "one temperature for all terms, " + describe(distillation->temperature));
    }
    if (term.divergence != Divergence::kJensenShannon) continue;
    if (jensen_shannon == nullptr) jensen_shannon = &term;
    if (term.beta != jensen_shannon->beta) {
      return not_taken(term, "beta", describe(term.beta),
                       "one beta for all terms, " + describe(jensen_shannon->beta));
    }
  }
  return kHeadOk;
}

Family family_of(const HeadConfig& config) {
  bool cross = false, forward = false, reverse = false, mixture = false;
  for (const LossTerm& term : config.terms) {
    if (term.kind != LossKind::kDistillation || cuda::is_top_k(config, term)) continue;
    cross |= term.divergence == Divergence::kCrossEntropy;
    forward |= term.divergence == Divergence::kForwardKl;
    reverse |= term.divergence == Divergence::kReverseKl;
    mixture |= term.divergence == Divergence::kJensenShannon;
  }
  if (cross + forward + reverse + mixture > 1) return Family::kMixed;
  if (mixture) return Family::kJensenShannon;
  if (cross || forward) return Family::kForward;
  return reverse ? Family::kReverse : Family::kLabels;
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
  bool segments = state.request.policy_metrics;
  for (const LossTerm& term : state.config.terms) segments |= needs_segment_ids(term);
  book(state, kCensusSlice, "status word and divisors", sizeof(cuda::Census));
  book(state, kRowLossesSlice, "row losses of each term", n_terms * n * 4);
  book(state, kLogProbsSlice, "log-probabilities of the labels", n * 4);
  if (state.request.policy_metrics) book(state, kEntropySlice, "entropies", n * 4);
  if (segments) book(state, kSegmentTokensSlice, "tokens of each segment", n * 4);
  book(state, kSegmentSumsSlice, "sums of each segment",
       int64_t{state.n_sequence_terms} * 2 * n * 8);
  book(state, kSlopesSlice, "slopes of sequence terms", state.n_sequence_terms * n * 4);
  for (const LossTerm& term : state.config.terms) {
    if (!cuda::is_top_k(state.config, term)) continue;
    const int64_t k = state.config.teachers[static_cast<size_t>(term.teacher)].k;
    book(state, kTopKLogitsSlice, "logits of the teacher's ids", n * k * 4);
    book(state, kTopKOthersSlice, "sums of the columns that the teacher leaves out", n * 2 * 4);
    if (state.request.d_logits) {
      book(state, kTopKHeldSlice, "what the gradient held at the teacher's ids", n * k * 4);
      book(state, kRowWordsSlice, "what the gradient of each row is made of",
           n * cuda::kRowWordBytes);
    }
    break;
  }
}

// How the row lies on the device, and the numbers of the algebra that hold for every row.
void fill_row(const CudaHeadPlan::State& state, const Inputs& inputs, const Outputs& outputs,
              HeadParams& p) {
  p.logits = inputs.logits.data;
  p.logits_stride = inputs.logits.row_stride;
  p.gradient = outputs.d_logits.data;
  p.gradient_stride = outputs.d_logits.row_stride;
  p.accumulate = outputs.accumulate;
  p.n_tok = p.n_rows = state.shape.n_tok;
  p.vocab = state.shape.vocab;
  const HeadOptions& options = state.config.options;
  p.scale = static_cast<float>(options.logits_scale);
  p.softcap = static_cast<float>(options.softcap);
  if (options.softcap > 0) p.inverse_softcap = static_cast<float>(1 / options.softcap);
}

bool is_aligned(const void* data, int64_t row_stride, int64_t element_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_stride * element_bytes % 16 == 0;
}

// The launch that takes these rows; its layout into `p`.
const cuda::RowLaunch& lay_out_rows(const CudaHeadPlan::State& state, HeadParams& p) {
  const Asked asked = p.wants_argmax || p.wants_smoothing ? kOthers
                      : p.wants_entropy                   ? kEntropyAlone
                                                          : kNothing;
  const Launches& launches = state.launches[asked];
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

}  // namespace

const std::string& CudaHeadPlan::kernel() const { return state_->kernel; }
const std::vector<Booking>& CudaHeadPlan::bookings() const { return state_->bookings; }
int64_t CudaHeadPlan::workspace_bytes() const { return state_->workspace_bytes; }
const std::vector<Rejection>& CudaHeadPlan::rejections() const { return state_->rejections; }

int CudaHeadPlan::launches() const {
  if (state_->shape.n_tok == 0) return 2;
  // A top-k teacher's ids are gathered before the rows, and their gradient patched after.
  const int gather = state_->slices[kTopKLogitsSlice].bytes > 0 ? 1 : 0;
  const bool gradient = state_->request.d_logits;
  const int forward = gather + 1, backward = gather + 1 + (gradient ? gather : 0);
  if (state_->n_sequence_terms == 0) return 2 + backward;
  return 2 + forward + 2 + (gradient ? backward : 0);
}

Status CudaHeadPlan::run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
                         std::span<std::byte> workspace) const {
  const State& state = *state_;
  Status status =
      cuda::check_device_inputs(state.shape, state.config, state.request, inputs, outputs);
  if (!status.ok()) return status;
  status = cuda::check_workspace(workspace, state.workspace_bytes);
  if (!status.ok()) return status;
  const cuda::OpenRows rows = cuda::open_rows(*this, inputs, outputs, workspace.data());
  return cuda::launch_head(rows.params, rows.launch, stream);
}

cuda::OpenRows cuda::open_rows(const CudaHeadPlan& plan, const Inputs& inputs,
                               const Outputs& outputs, std::byte* workspace) {
  const CudaHeadPlan::State& state = plan.state();
  OpenRows rows;
  fill_row(state, inputs, outputs, rows.params);
  fill_vectors(inputs, outputs, rows.params);
  fill_terms(state.config, inputs, outputs, rows.params);
  rows.launch = lay_out_rows(state, rows.params);
  fill_workspace(state, workspace, rows.params);
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
  const Family family = family_of(config);
  const auto choose = [&](const RowWork& work, std::string_view kernel,
                          std::vector<Rejection>& rejections) -> Result<cuda::RowLaunch> {
    Result<RowLayout> layout = choose_row_layout(shape.vocab, request.input_dtype, work,
                                                 options.device, kernel, tuning, rejections);
    if (!layout) return layout.status();
    return cuda::RowLaunch{*layout, request.input_dtype, work.family,
                           options.device.n_multiprocessors};
  };
  const bool gradient = request.d_logits;
  bool top_k = false;
  for (const LossTerm& term : config.terms) top_k |= cuda::is_top_k(config, term);
  const RowWork plain_work{.family = family, .gradient = gradient, .top_k = top_k};
  RowWork works[kAsked] = {plain_work, plain_work, plain_work};
  works[kEntropyAlone].extras = works[kOthers].extras = true;
  if (!has_teacher(family)) works[kEntropyAlone].family = Family::kEntropy;
  const Result<cuda::RowLaunch> plain = choose(works[kNothing], options.kernel, state->rejections);
  if (!plain) return plain.status();
  state->kernel = name_of(plain->layout.kernel);
  // What is asked for beside it changes the layout, and the kernel only where rows get too long.
  const auto choose_beside = [&](const RowWork& work) {
    std::vector<Rejection> unused;
    Result<cuda::RowLaunch> same = choose(work, state->kernel, unused);
    return same ? same : choose(work, "", unused);
  };
  for (int asked = 0; asked < kAsked; ++asked) {
    RowWork work = works[asked];
    const auto aligned = asked == kNothing ? plain : choose_beside(work);
    work.aligned = false;
    const auto any = choose_beside(work);
    if (!aligned) return aligned.status();
    if (!any) return any.status();
    state->launches[asked] = {*aligned, *any};
  }
  for (const LossTerm& term : config.terms)
    state->n_sequence_terms += cuda::is_sequence(term) ? 1 : 0;
  book_workspace(*state);
  return CudaHeadPlan(std::move(state));
}

}  // namespace ullage::lossk
