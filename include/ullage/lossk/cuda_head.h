// The losses at the head on an NVIDIA GPU, from logits: plan on any host, run on a stream.
//
// The terms, inputs and outputs are those of head.h; here every pointer in `Inputs` and `Outputs`
// is device memory, and vectors are f32 (ids: 4 or 8 bytes). What the CPU checks before work and a
// GPU could only check by waiting (labels, segment ids, non-finite logits) sets a status word that
// `check` reports; such a row counts as ignored, or its outputs are NaN.
//
// Grade `bitwise`: per-row results and gradients depend on the row, the terms and the vocabulary
// alone; not on the kernel, the cluster, strides, alignment, neighbours or the run. Scalars are
// summed in f64 in one order fixed by n_tok.
//
// A pass over the logits takes the terms of one softmax (logits_scale, student_temperature) and of
// one teacher at one temperature, the head's own also distillation by forward KL or cross-entropy
// of a student at another; other terms take further passes, whose parts of d_logits are added in
// its type.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ullage/export.h"
#include "ullage/lossk/head.h"
#include "ullage/lossk/terms.h"
#include "ullage/plan.h"
#include "ullage/status.h"

struct CUstream_st;

namespace ullage::lossk {

// What a plan needs to know of a device. The default is an H200.
struct CudaDevice {
  std::string name = "NVIDIA H200";
  int compute_capability = 90;  // 10 * major + minor
  int n_multiprocessors = 132;
  int64_t shared_per_block_bytes = 232448;
  int64_t shared_per_multiprocessor_bytes = 233472;
  int max_cluster_blocks = 16;  // beyond 8 a kernel must ask for it, and those here do
};

struct CudaHeadOptions {
  CudaDevice device = {};
  std::string_view kernel = {};  // forced by name; empty: chosen
};

class ULLAGE_API CudaHeadPlan {
 public:
  const std::string& kernel() const;
  const std::vector<Booking>& bookings() const;  // of the workspace; they add up to it
  int64_t workspace_bytes() const;
  // Kernels that a run with every output puts on the stream. Where no term takes the head's own
  // softmax, a run without outputs of rows' softmax (lse to correct) has one fewer.
  int launches() const;
  const std::vector<Rejection>& rejections() const;

  // Puts the whole computation on `stream` and returns; capturable in a CUDA graph. `workspace`:
  // device memory, workspace_bytes() or more, 256-byte aligned; `outputs.d_logits` may be the
  // logits, unless several passes leave a part of it (683). Errors: 582, 585, 683, 695, 696 for
  // inputs that do not match the plan, 621 to 623 of the device, naming the launch.
  Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
             std::span<std::byte> workspace) const;

  // Waits for `stream` and reports what the last run with this workspace met: 586 a label outside
  // the vocabulary, 625 a NaN or +inf logit, 692 a segment id, 693 a pair, 694 a top-k id, each
  // with the first such row; 623 where the device failed.
  Status check(CUstream_st* stream, std::span<const std::byte> workspace) const;

  struct State;  // the library's own
  const State& state() const { return *state_; }
  explicit CudaHeadPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

// Errors: those of `plan`, 622, 698, and 681 or 696 for what the kernels here do not take: logits
// in f64, gradients or teachers in another type than the logits, hidden-state teachers.
ULLAGE_API Result<CudaHeadPlan> plan_cuda(const Shape& shape, const HeadConfig& config,
                                          const Request& request, const CudaHeadOptions& options);

}  // namespace ullage::lossk
