#include "capi/head_device.h"

#include <utility>

namespace ullage::capi {
namespace {

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

 private:
  lossk::HeadPlan plan_;
};

}  // namespace

Result<std::unique_ptr<HeadOnDevice>> plan_on_device(const HeadRequest& request) {
  if (request.device == "cuda") {
    return {kCudaUnavailable,
            "device is 'cuda', and this build has no CUDA kernels for the losses at the head"};
  }
  auto plan = lossk::plan(request.shape, request.config, request.request, request.limits);
  if (!plan) return plan.status();
  return std::unique_ptr<HeadOnDevice>(std::make_unique<HeadOnCpu>(*std::move(plan)));
}

}  // namespace ullage::capi
