// The losses at the head on a Hopper GPU, from hidden states: the projection, the losses and the
// gradients fused, a chunk of rows at a time. Plan on any host, run on a stream.
//
// Per chunk three matrix products and two small kernels. The first product's epilogue reduces the
// logits where they are born and stores bf16(e^(a - c)); the logit gradient never exists on its
// own: the products for d_hidden and d_weight take the stored exponentials with a factor per row,
// and the label's column is added apart in float32.
//
// The terms, inputs and outputs are those of head.h; here every pointer in `Inputs` and `Outputs`
// is device memory, and vectors are f32 (ids: 4 or 8 bytes).
//
// Grade `bitwise`: a row's loss, log-sum-exp, log-probability and d_hidden depend on the row, the
// weight and the terms alone; d_weight on the rows in their order. None depends on the chunk, the
// number of rows beside, or the run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "ullage/export.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::lossk {

struct CudaLinearHeadOptions {
  CudaDevice device = {};
  int64_t budget_bytes = 0;  // of workspace; 0: 512 MiB
  int64_t chunk = 0;  // rows, a multiple of 256 or n_tok or more; 0: the largest the budget allows
};

class ULLAGE_API CudaLinearHeadPlan {
 public:
  const std::string& kernel() const;
  // "chunk": 6 n_tok d_model vocab operations. "chunk_two_pass": 8, for sequence terms over several
  // chunks. "strip": 8, for a bf16 d_weight whose f32 sum does not fit the budget: strips of the
  // vocabulary over all rows; its d_hidden adds up in another order and may differ from the other
  // modes' in the last bit.
  const std::string& mode() const;
  int64_t chunk() const;  // rows
  int64_t n_chunks() const;
  const std::vector<Booking>& bookings() const;  // of the workspace; they add up to it
  int64_t workspace_bytes() const;
  int64_t materialized_bytes() const;  // what [n_tok][vocab] logits in bf16 would take
  double operations() const;           // floating-point operations of the products
  int launches() const;                // kernels one run puts on the stream

  // Puts the whole computation on `stream` and returns; capturable in a CUDA graph. `workspace`:
  // device memory, workspace_bytes() or more, 256-byte aligned. Errors: 582, 585, 683, 695, 696 for
  // inputs that do not match the plan, 621 to 623 of the device, naming the launch.
  Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
             std::span<std::byte> workspace) const;

  // Waits for `stream` and reports what the last run with this workspace met, as
  // CudaHeadPlan::check does.
  Status check(CUstream_st* stream, std::span<const std::byte> workspace) const;

  struct State;
  explicit CudaLinearHeadPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

// hidden, weight and d_hidden are bf16, d_weight f32 or bf16 (then summed in f32 in the workspace,
// whole or by strips, and rounded once); d_model is a multiple of 8. Errors: those of `plan`, 587
// where 256 rows do not fit the budget or the chunk does not, 622, 681 and 696 for what these
// kernels do not take: distillation, label smoothing, entropy, arg-max, policy metrics, softcap,
// bias, an adapter, a term with a logits_scale of its own.
ULLAGE_API Result<CudaLinearHeadPlan> plan_cuda_linear(const Shape& shape, const HeadConfig& config,
                                                       const Request& request,
                                                       const CudaLinearHeadOptions& options);

}  // namespace ullage::lossk
