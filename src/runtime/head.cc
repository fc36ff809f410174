#include "ullage/lossk/head.h"

#include <algorithm>
#include <memory>
#include <new>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "contract/describe.h"
#include "contract/head_validate.h"
#include "cpu/worker_pool.h"
#include "plan/head_plan.h"
#include "runtime/head_run.h"
#include "runtime/kernel_table.h"

namespace ullage::lossk {

struct HeadPlan::State {
  State(HeadLayout planned, std::string name, int n_threads)
      : layout(std::move(planned)), kernel(std::move(name)), pool(n_threads) {}

  HeadLayout layout;
  std::string kernel;
  mutable cpu::WorkerPool pool;
};

const std::string& HeadPlan::kernel() const { return state_->kernel; }
const std::string& HeadPlan::mode() const { return state_->layout.mode; }
int64_t HeadPlan::chunk() const { return state_->layout.chunk; }
int64_t HeadPlan::n_chunks() const { return state_->layout.n_chunks; }
const std::vector<Booking>& HeadPlan::bookings() const { return state_->layout.bookings; }
int64_t HeadPlan::workspace_bytes() const { return state_->layout.workspace_bytes; }
int64_t HeadPlan::materialized_bytes() const { return state_->layout.materialized_bytes; }
double HeadPlan::operations() const { return state_->layout.operations; }
const std::vector<Rejection>& HeadPlan::rejections() const { return state_->layout.rejections; }

Status HeadPlan::run(const Inputs& inputs, const Outputs& outputs,
                     std::span<std::byte> workspace) const {
  const HeadLayout& layout = state_->layout;
  if (Status status = check_inputs(layout.shape, layout.config, layout.request, inputs, outputs);
      !status.ok()) {
    return status;
  }
  if (static_cast<int64_t>(workspace.size()) < layout.workspace_bytes) {
    return {kLossLengthMismatch, "workspace has " + describe(workspace.size()) +
                                     " bytes; accepted: " + describe(layout.workspace_bytes) +
                                     " or more"};
  }
  if (reinterpret_cast<uintptr_t>(workspace.data()) % 64 != 0) {
    return {kLossLengthMismatch, "workspace is not aligned; accepted: a multiple of 64"};
  }
  run_head(layout, inputs, outputs, workspace, state_->pool);
  return kHeadOk;
}

Result<HeadPlan> plan(const Shape& shape, const HeadConfig& config, const Request& request,
                      const PlanLimits& limits) {
  if (Status status = validate(config); !status.ok()) return status;
  if (Status status = check_plan(shape, config, request); !status.ok()) return status;
  if (limits.n_threads < 0) {
    return Result<HeadPlan>(
        kLossEmptyDimension,
        "limits.n_threads is " + describe(limits.n_threads) + "; accepted: >= 1, or 0 for all");
  }
  Result<std::string> kernel = choose_head_kernel();
  if (!kernel) return kernel.status();
  const int n_threads = limits.n_threads > 0
                            ? limits.n_threads
                            : static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  Result<HeadLayout> layout = plan_head(shape, config, request, limits, n_threads);
  if (!layout) return layout.status();
  try {
    return HeadPlan(
        std::make_shared<const HeadPlan::State>(*std::move(layout), *std::move(kernel), n_threads));
  } catch (const std::system_error& error) {
    return Result<HeadPlan>(kHeadBadConfig, "limits.n_threads is " + describe(n_threads) +
                                                ", and the system refuses: " + error.what());
  }
}

}  // namespace ullage::lossk
