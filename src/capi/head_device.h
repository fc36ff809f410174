// A plan of the losses at the head on whichever device the request names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "capi/head_request.h"
#include "ullage/lossk/cuda_linear_head.h"
#include "ullage/lossk/head.h"
#include "ullage/plan.h"
#include "ullage/status.h"

namespace ullage::capi {

struct HeadPromise {
  std::string kernel;
  std::string mode;
  int64_t chunk = 0;
  int64_t n_chunks = 0;
  std::vector<Booking> bookings;
  int64_t workspace_bytes = 0;
  int64_t workspace_alignment = 0;
  int64_t status_bytes = 0;  // of the workspace, its first, which a check reads
  int64_t materialized_bytes = 0;
  double operations = 0;
  std::vector<Rejection> rejections;
};

class HeadOnDevice {
 public:
  virtual ~HeadOnDevice() = default;
  virtual HeadPromise promise() const = 0;
  virtual Status run(const lossk::Inputs& inputs, const lossk::Outputs& outputs,
                     std::span<std::byte> workspace, void* stream) const = 0;
  // Waits, and reports what only the device could see.
  virtual Status check(std::span<std::byte> workspace, void* stream) const = 0;
  // Waits, and reports what a filter left out. Errors: 681 for a plan without one.
  virtual Result<lossk::FilterReport> filter_report(std::span<std::byte> workspace,
                                                    void* stream) const = 0;
};

// Errors: those of the device's plan. A plan for CUDA needs no device; its run does (621).
Result<std::unique_ptr<HeadOnDevice>> plan_on_device(const HeadRequest& request);

}  // namespace ullage::capi
