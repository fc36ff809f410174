#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "contract/describe.h"
#include "cuda/head_logits/check.h"
#include "cuda/head_logits/fill_params.h"
#include "cuda/linear_head/launch.h"
#include "cuda/linear_head/scaled_exponentials.h"

namespace ullage::lossk::cuda {
namespace {

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
  if (Status status = check_matrix(field, view, dtype, rows, cols); !status.ok()) return status;
  return check_aligned(field, view);
}

Status check_linear_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                           const Inputs& inputs, const Outputs& outputs) {
  const int64_t n = shape.n_tok, d = shape.d_model, v = shape.vocab;
  if (n > 0) {
    Status status = check_operand("hidden", inputs.hidden, request.input_dtype, n, d);
    if (!status.ok()) return status;
  }
  if (Status status = check_operand("weight", inputs.weight, request.weight_dtype, v, d);
      !status.ok()) {
    return status;
  }
  if (Status status = check_row_inputs(shape, config, request, inputs, outputs); !status.ok())
    return status;
  if (outputs.entropy || !outputs.argmax.empty() || !outputs.correct.empty()) {
    return {
        kHeadUnknownKind,
        std::string(kScaledExponentials) +
            " does not make entropy, argmax or correct; accepted: without them, or the kernel " +
            std::string(kChunkedProducts)};
  }
  if (request.d_hidden && n > 0) {
    Status status = check_operand("d_hidden", outputs.d_hidden, request.grad_dtype, n, d);
    if (!status.ok()) return status;
  }
  if (request.d_weight) {
    Status status = check_operand("d_weight", outputs.d_weight, request.d_weight_dtype, v, d);
    if (!status.ok()) return status;
  }
  return kHeadOk;
}

// d_weight's product takes softmax_scale * hidden in hidden's type. A row's softmax_scale is P over
// the sum of its exponentials; in f16, that sum is at least 2^8 (row_kernels.cuh) and P of the
// order of upstream * weight / divisor. The power of two that brings the largest of those between
// 2^8 and 2^9 leaves scaled rows no larger than hidden times what else a term multiplies; at the
// largest sum that is kept as it is, 2^20, they are 2^-12 of that, and f16's smallest step 2^-12 of
// them.
float weight_unit(DType dtype, const HeadParams& p) {
  return dtype == DType::kF16 ? unit_of_gains(p, 8) : 1.0f;
}

}  // namespace

Status ScaledExponentials::run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
                               std::byte* workspace) const {
  const ScaledExponentials& state = *this;
  Status status = check_linear_inputs(state.shape, state.config, state.request, inputs, outputs);
  if (!status.ok()) return status;
  HeadParams p;
  p.n_tok = state.shape.n_tok;
  p.vocab = state.shape.vocab;
  const std::vector<Pass> passes = passes_of(state.config);  // one, of one softmax
  fill_vectors(inputs, outputs, p);
  fill_terms(state.config, passes, inputs, outputs, p);
  fill_pass(state.config, passes, 0, inputs, p);
  LinearParams r;
  r.layout = state.layout;
  r.n_tok = state.shape.n_tok;
  r.d_model = state.shape.d_model;
  r.vocab = state.shape.vocab;
  r.hidden = inputs.hidden.data;
  r.hidden_stride = inputs.hidden.row_stride;
  r.weight = inputs.weight.data;
  r.weight_stride = inputs.weight.row_stride;
  r.dtype = state.request.input_dtype;
  r.unit = weight_unit(r.dtype, p);
  r.accumulate = outputs.accumulate;
  if (state.request.d_hidden) {
    r.d_hidden = outputs.d_hidden.data;
    r.d_hidden_stride = outputs.d_hidden.row_stride;
  }
  if (state.request.d_weight) {
    // What d_weight holds is wanted, or it has gaps that are not the library's.
    const bool apart = r.accumulate || outputs.d_weight.row_stride != r.d_model;
    if (r.layout.lodged.rows > 0 && apart) {
      if (r.layout.strips || r.layout.chunk.rows == 0) {
        return {kHeadShapeMismatch,
                "d_weight is " + std::string(r.accumulate ? "accumulated" : "not contiguous") +
                    "; this plan keeps exponentials in its memory, which takes a contiguous "
                    "d_weight that is overwritten. Plan with `accumulate` set"};
      }
      r.layout.lodged = {};
      r.layout.beside = 0;
    }
  }
  WorkspaceSlices slices(workspace, nullptr);
  take_workspace(state, slices, p, r);
  if (state.rounds()) {
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
  return launch_linear_head(p, r, stream);
}

Result<FilterReport> ScaledExponentials::filter_report(CUstream_st* stream,
                                                       std::byte* workspace) const {
  if (!filters()) return State::filter_report(stream, workspace);
  HeadParams p;
  LinearParams r;
  r.n_tok = shape.n_tok;
  WorkspaceSlices slices(workspace, nullptr);
  take_workspace(*this, slices, p, r);
  std::vector<SkippedMass> rows;
  std::vector<int> counts;
  if (Status status = read_filter(r, rows, counts, stream); !status.ok()) return status;
  FilterReport report;
  for (const SkippedMass& row : rows) {
    report.largest_share = std::max(report.largest_share, static_cast<double>(row.share));
    report.largest_gradient = std::max(report.largest_gradient, static_cast<double>(row.gradient));
    report.total_gradient += row.gradient;
  }
  double kept = 0;
  for (const int count : counts) kept += count;
  if (!counts.empty()) report.kept = kept / static_cast<double>(counts.size()) / layout.n_tiles;
  return report;
}

}  // namespace ullage::lossk::cuda
