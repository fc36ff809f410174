#include <algorithm>
#include <string>
#include <string_view>

#include "contract/describe.h"
#include "cuda/chunked_head/chunked_products.h"
#include "cuda/head_logits/check.h"
#include "cuda/head_logits/fill_params.h"
#include "cuda/head_logits/open_rows.h"

namespace ullage::lossk::cuda {
namespace {

#define ULLAGE_RETURN_IF_REFUSED(call) \
  if (Status status = (call); !status.ok()) return status

// The products read 16 bytes at a time where a dense matrix allows it.
Status check_operand(std::string_view field, const MatrixView& view, DType dtype, int64_t rows,
                     int64_t cols) {
  if (!view) return {kHeadMissingInput, std::string(field) + " is not given"};
  ULLAGE_RETURN_IF_REFUSED(check_matrix(field, view, dtype, rows, cols));
  const int64_t size = size_of(dtype), dense = cols * size;
  const int64_t unit = std::min<int64_t>(dense & -dense, 16);
  const bool rows_fit = rows <= 1 || view.row_stride * size % unit == 0;
  if (reinterpret_cast<uintptr_t>(view.data) % 16 == 0 && rows_fit) return kHeadOk;
  return {kHeadShapeMismatch, std::string(field) +
                                  " does not start at a multiple of 16 bytes, or its row_stride (" +
                                  describe(view.row_stride) + ") is not a multiple of " +
                                  describe(unit) + " bytes, as that of a dense matrix is"};
}

Operand operand(const MatrixView& view) {
  return {const_cast<void*>(view.data), view.rows <= 1 ? view.cols : view.row_stride};
}

Status take_operands(const ChunkedProducts& state, const Inputs& inputs, ChunkedParams& p) {
  const auto& [n, d, v] = state.shape;
  const HeadOptions& options = state.config.options;
  const Request& request = state.request;
  const auto take = [](Operand& to, std::string_view field, const MatrixView& view, DType dtype,
                       int64_t rows, int64_t cols) {
    Status status = check_operand(field, view, dtype, rows, cols);
    if (status.ok()) to = operand(view);
    return status;
  };
  if (n > 0) {
    ULLAGE_RETURN_IF_REFUSED(take(p.hidden, "hidden", inputs.hidden, request.input_dtype, n, d));
  }
  ULLAGE_RETURN_IF_REFUSED(take(p.weight, "weight", inputs.weight, request.weight_dtype, v, d));
  if (const int64_t rank = options.adapter_rank; rank > 0) {
    ULLAGE_RETURN_IF_REFUSED(
        take(p.adapter_a, "adapter_a", inputs.adapter_a, request.weight_dtype, rank, d));
    ULLAGE_RETURN_IF_REFUSED(
        take(p.adapter_b, "adapter_b", inputs.adapter_b, request.weight_dtype, v, rank));
    p.adapter_scale = static_cast<float>(options.adapter_scale);
  }
  if (options.bias) {
    if (!inputs.bias) return {kHeadMissingInput, "bias is not given"};
    ULLAGE_RETURN_IF_REFUSED(check_product_dtype("bias", inputs.bias.dtype, {DType::kF32}));
    if (inputs.bias.size < v) {
      return {kLossLengthMismatch, "bias has " + describe(inputs.bias.size) +
                                       " elements; accepted: " + describe(v) + " or more"};
    }
    p.bias = {static_cast<const float*>(inputs.bias.data), inputs.bias.stride};
  }
  if (state.teacher < 0 || n == 0) return kHeadOk;
  const Teacher& teacher = state.config.teachers[static_cast<size_t>(state.teacher)];
  const TeacherInputs& given = inputs.teachers[static_cast<size_t>(state.teacher)];
  ULLAGE_RETURN_IF_REFUSED(take(p.teacher_hidden, "the teacher's hidden", given.hidden,
                                teacher.dtype, n, teacher.d_model));
  return take(p.teacher_weight, "the teacher's weight", given.weight, teacher.weight_dtype,
              teacher.vocab, teacher.d_model);
}

Status take_gradients(const ChunkedProducts& state, const Outputs& outputs, ChunkedParams& p) {
  const auto& [n, d, v] = state.shape;
  const ChunkedLayout& layout = state.layout;
  const DType dtype = state.request.d_weight_dtype;
  const auto take = [&](SummedGradient& to, std::string_view field, const MatrixView& view,
                        int64_t rows, int64_t cols) {
    Status status = check_operand(field, view, dtype, rows, cols);
    if (status.ok()) to = {operand(view), dtype, rows, cols, to.sum};
    return status;
  };
  if (layout.d_hidden && n > 0) {
    ULLAGE_RETURN_IF_REFUSED(
        check_operand("d_hidden", outputs.d_hidden, state.request.grad_dtype, n, d));
    p.d_hidden = operand(outputs.d_hidden);
    p.d_hidden_dtype = state.request.grad_dtype;
  }
  if (layout.d_weight)
    ULLAGE_RETURN_IF_REFUSED(take(p.d_weight, "d_weight", outputs.d_weight, v, d));
  if (layout.d_adapter) {
    ULLAGE_RETURN_IF_REFUSED(
        take(p.d_adapter_a, "d_adapter_a", outputs.d_adapter_a, layout.rank, d));
    ULLAGE_RETURN_IF_REFUSED(
        take(p.d_adapter_b, "d_adapter_b", outputs.d_adapter_b, v, layout.rank));
  }
  if (!layout.d_bias) return kHeadOk;
  const MutableVectorView& d_bias = outputs.d_bias;
  if (!d_bias) return {kHeadMissingInput, "d_bias is not given"};
  ULLAGE_RETURN_IF_REFUSED(check_product_dtype("d_bias", d_bias.dtype, {dtype}));
  if (d_bias.size < v || d_bias.stride < 1) {
    return {kLossLengthMismatch, "d_bias has " + describe(d_bias.size) + " elements, " +
                                     describe(d_bias.stride) + " apart; accepted: " + describe(v) +
                                     " or more, 1 or more apart"};
  }
  p.d_bias = {{d_bias.data, d_bias.stride}, dtype, v, 1, p.d_bias.sum};
  return kHeadOk;
}

}  // namespace

Status ChunkedProducts::run(CUstream_st* stream, const Inputs& given, const Outputs& outputs,
                            std::byte* workspace) const {
  Inputs inputs = given;
  // Logits beside hidden states are not looked at, here or on the CPU.
  if (teacher >= 0 && static_cast<size_t>(teacher) < inputs.teachers.size()) {
    inputs.teachers[static_cast<size_t>(teacher)].logits = {};
  }
  ULLAGE_RETURN_IF_REFUSED(check_row_inputs(shape, config, request, inputs, outputs));
  ChunkedParams p;
  p.layout = layout;
  p.accumulate = outputs.accumulate;
  ULLAGE_RETURN_IF_REFUSED(take_operands(*this, inputs, p));
  WorkspaceSlices slices(workspace, nullptr);
  std::byte* rows_workspace = nullptr;
  take_workspace(*this, slices, rows_workspace, p);
  ULLAGE_RETURN_IF_REFUSED(take_gradients(*this, outputs, p));
  OpenRows open = open_rows(rows, inputs, outputs, rows_workspace);
  // An f16 gradient of a mean over many rows would be lost below 2^-24.
  p.gradient_scale = layout.dtype == DType::kF16 ? unit_of_gains(open.params, 0) : 1.0f;
  open.params.upstream *= static_cast<double>(p.gradient_scale);
  for (RowPass& pass : open.passes) {
    pass.params.accumulate = false;  // of the logit gradient, which lies in the workspace
    pass.params.upstream = open.params.upstream;
  }
  return launch_chunked_head(open.params, open.passes, p, algorithms, stream);
}

}  // namespace ullage::lossk::cuda
