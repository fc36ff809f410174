#include "cuda/linear_plan.h"

#include <utility>

#include "contract/head_validate.h"
#include "cuda/head_logits/report.h"

namespace ullage::lossk {

const std::string& CudaLinearHeadPlan::kernel() const { return state_->kernel; }
const std::string& CudaLinearHeadPlan::mode() const { return state_->mode; }
int64_t CudaLinearHeadPlan::chunk() const { return state_->chunk; }
int64_t CudaLinearHeadPlan::n_chunks() const { return state_->n_chunks; }
int64_t CudaLinearHeadPlan::lodged_rows() const { return state_->lodged_rows; }
const std::vector<Booking>& CudaLinearHeadPlan::bookings() const { return state_->bookings; }
int64_t CudaLinearHeadPlan::workspace_bytes() const { return state_->workspace_bytes; }
double CudaLinearHeadPlan::operations() const { return state_->operations; }
int CudaLinearHeadPlan::launches() const { return state_->launches; }
const std::vector<Rejection>& CudaLinearHeadPlan::rejections() const { return state_->rejections; }

int64_t CudaLinearHeadPlan::materialized_bytes() const {
  return state_->shape.n_tok * state_->shape.vocab * size_of(state_->request.input_dtype);
}

Status CudaLinearHeadPlan::prepare() const { return state_->prepare(); }

Status CudaLinearHeadPlan::run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
                               std::span<std::byte> workspace) const {
  Status status = cuda::check_workspace(workspace, state_->workspace_bytes);
  if (!status.ok()) return status;
  return state_->run(stream, inputs, outputs, workspace.data());
}

Status CudaLinearHeadPlan::check(CUstream_st* stream, std::span<const std::byte> workspace) const {
  Status status = cuda::check_workspace(workspace, state_->workspace_bytes);
  if (!status.ok()) return status;
  return cuda::report_census(reinterpret_cast<const cuda::Census*>(workspace.data()),
                             label_range(state_->config.options, state_->shape.vocab), stream);
}

Result<FilterReport> CudaLinearHeadPlan::State::filter_report(CUstream_st*, std::byte*) const {
  return Status(kHeadUnknownKind, "filter_tolerance is 0: this plan leaves nothing out");
}

Result<FilterReport> CudaLinearHeadPlan::filter_report(CUstream_st* stream,
                                                       std::span<std::byte> workspace) const {
  Status status = cuda::check_workspace(workspace, state_->workspace_bytes);
  if (!status.ok()) return status;
  return state_->filter_report(stream, workspace.data());
}

Result<CudaLinearHeadPlan> plan_cuda_linear(const Shape& shape, const HeadConfig& config,
                                            const Request& request,
                                            const CudaLinearHeadOptions& options) {
  if (Status status = validate(config); !status.ok()) return status;
  if (Status status = check_plan(shape, config, request); !status.ok()) return status;
  const struct {
    std::string_view name;
    Result<cuda::LinearState> (*plan)(const Shape&, const HeadConfig&, const Request&,
                                      const CudaLinearHeadOptions&);
  } candidates[] = {{cuda::kScaledExponentials, cuda::plan_scaled_exponentials},
                    {cuda::kChunkedProducts, cuda::plan_chunked_products}};
  std::vector<Rejection> rejections;
  Status refusal = {kHeadUnknownKernel, "kernel '" + std::string(options.kernel) + "'; accepted: " +
                                            std::string(cuda::kScaledExponentials) + ", " +
                                            std::string(cuda::kChunkedProducts)};
  for (const auto& candidate : candidates) {
    if (!options.kernel.empty() && options.kernel != candidate.name) {
      rejections.push_back(
          {std::string(candidate.name), std::string(options.kernel) + " was asked for"});
      continue;
    }
    if (options.filter_tolerance != 0 && candidate.name == cuda::kChunkedProducts) {
      const Status no_filter = {kHeadUnknownKind, std::string(candidate.name) +
                                                      " has no filter; accepted: a "
                                                      "filter_tolerance of 0"};
      // Unless it was asked for, what the one that has a filter says is the answer.
      if (!options.kernel.empty()) refusal = no_filter;
      rejections.push_back({std::string(candidate.name), no_filter.message()});
      continue;
    }
    Result<cuda::LinearState> state = candidate.plan(shape, config, request, options);
    if (!state) {
      refusal = state.status();
      rejections.push_back({std::string(candidate.name), refusal.message()});
      continue;
    }
    rejections.insert(rejections.end(), (*state)->rejections.begin(), (*state)->rejections.end());
    (*state)->rejections = std::move(rejections);
    return CudaLinearHeadPlan(*std::move(state));
  }
  return refusal;
}

}  // namespace ullage::lossk
