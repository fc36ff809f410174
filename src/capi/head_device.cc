#include "capi/head_device.h"

#include <string>
#include <type_traits>
#include <utility>

#include "cuda/device.h"
#include "ullage/lossk/cuda_head.h"
#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::capi {
namespace {

Status no_report(const std::string& where) {
  return {kHeadUnknownKind, where +
                                " leaves nothing out; accepted: hidden states on cuda, with a "
                                "filter_tolerance"};
}

class HeadOnCpu : public HeadOnDevice {
 public:
  explicit HeadOnCpu(lossk::HeadPlan plan) : plan_(std::move(plan)) {}

  HeadPromise promise() const override {
    return {plan_.kernel(),
            plan_.mode(),
            plan_.chunk(),
            plan_.n_chunks(),
            plan_.bookings(),
            plan_.workspace_bytes(),
            /*workspace_alignment=*/64,
            /*status_bytes=*/0,
            plan_.materialized_bytes(),
            plan_.operations(),
            plan_.rejections()};
  }
  Status run(const lossk::Inputs& inputs, const lossk::Outputs& outputs,
             std::span<std::byte> workspace, void* stream) const override {
    if (stream) return {kHeadShapeMismatch, "stream is given; accepted: null on the cpu"};
    return plan_.run(inputs, outputs, workspace);
  }
  Status check(std::span<std::byte>, void*) const override { return kHeadOk; }
  Result<lossk::FilterReport> filter_report(std::span<std::byte>, void*) const override {
    return no_report("a plan for the cpu");
  }

 private:
  lossk::HeadPlan plan_;
};

HeadPromise promise_of(const lossk::CudaHeadPlan& plan, int64_t n_tok) {
  HeadPromise promise;
  promise.mode = "from_logits";
  promise.chunk = n_tok;
  promise.n_chunks = n_tok > 0 ? 1 : 0;
  promise.rejections = plan.rejections();
  return promise;
}

HeadPromise promise_of(const lossk::CudaLinearHeadPlan& plan, int64_t) {
  HeadPromise promise;
  promise.mode = plan.mode();
  promise.chunk = plan.chunk();
  promise.n_chunks = plan.n_chunks();
  promise.materialized_bytes = plan.materialized_bytes();
  promise.operations = plan.operations();
  promise.rejections = plan.rejections();
  return promise;
}

template <class Plan>
class HeadOnCuda : public HeadOnDevice {
 public:
  HeadOnCuda(Plan plan, int64_t n_tok) : plan_(std::move(plan)), n_tok_(n_tok) {}

  HeadPromise promise() const override {
    HeadPromise promise = promise_of(plan_, n_tok_);
    promise.kernel = plan_.kernel();
    promise.bookings = plan_.bookings();
    promise.workspace_bytes = plan_.workspace_bytes();
    promise.workspace_alignment = 256;
    promise.status_bytes = promise.bookings.front().bytes;  // the status word's is the first
    return promise;
  }
  Status run(const lossk::Inputs& inputs, const lossk::Outputs& outputs,
             std::span<std::byte> workspace, void* stream) const override {
    return plan_.run(static_cast<CUstream_st*>(stream), inputs, outputs, workspace);
  }
  Status check(std::span<std::byte> workspace, void* stream) const override {
    const HeadPromise promised = promise();
    if (static_cast<int64_t>(workspace.size()) < promised.status_bytes) {
      return {kLossLengthMismatch,
              "workspace has " + std::to_string(workspace.size()) +
                  " bytes; accepted: " + std::to_string(promised.status_bytes) + " or more"};
    }
    // The plan asks for a whole workspace, and reads its status alone.
    return plan_.check(static_cast<CUstream_st*>(stream),
                       {workspace.data(), static_cast<size_t>(promised.workspace_bytes)});
  }
  Result<lossk::FilterReport> filter_report(std::span<std::byte> workspace,
                                            void* stream) const override {
    if constexpr (std::is_same_v<Plan, lossk::CudaLinearHeadPlan>) {
      return plan_.filter_report(static_cast<CUstream_st*>(stream), workspace);
    } else {
      return no_report("a plan from logits");
    }
  }

 private:
  Plan plan_;
  int64_t n_tok_;
};

template <class Plan>
Result<std::unique_ptr<HeadOnDevice>> on_cuda(Result<Plan> plan, int64_t n_tok) {
  if (!plan) return plan.status();
  return std::unique_ptr<HeadOnDevice>(std::make_unique<HeadOnCuda<Plan>>(*std::move(plan), n_tok));
}

Status no_filter(std::string_view where) {
  return {kHeadUnknownKind, "filter_tolerance is not 0; accepted " + std::string(where) + ": 0"};
}

// For the device that is current; where there is none, for an H200: a plan needs no device.
Result<std::unique_ptr<HeadOnDevice>> plan_on_cuda(const HeadRequest& request) {
  const auto& [shape, config, wanted, limits, accumulate, filter_tolerance, name] = request;
  lossk::CudaDevice device;
  if (auto present = cuda::current_device()) device = *std::move(present);
  if (limits.implementation == lossk::Implementation::kPerTerm || limits.n_threads != 0) {
    return {kHeadUnknownKind,
            "limits has implementation 'per_term' or n_threads; accepted on cuda: neither"};
  }
  if (shape.d_model == 0) {
    if (filter_tolerance != 0) return no_filter("from logits");
    return on_cuda(lossk::plan_cuda(shape, config, wanted, {.device = device}), shape.n_tok);
  }
  return on_cuda(lossk::plan_cuda_linear(shape, config, wanted,
                                         {.device = device,
                                          .budget_bytes = limits.budget_bytes,
                                          .chunk = limits.chunk,
                                          .accumulate = accumulate,
                                          .filter_tolerance = filter_tolerance}),
                 shape.n_tok);
}

}  // namespace

Result<std::unique_ptr<HeadOnDevice>> plan_on_device(const HeadRequest& request) {
  if (request.device == "cuda") return plan_on_cuda(request);
  if (request.filter_tolerance != 0) return no_filter("on cpu");
  auto plan = lossk::plan(request.shape, request.config, request.request, request.limits);
  if (!plan) return plan.status();
  return std::unique_ptr<HeadOnDevice>(std::make_unique<HeadOnCpu>(*std::move(plan)));
}

}  // namespace ullage::capi
