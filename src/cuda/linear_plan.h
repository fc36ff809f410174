// What the ways to the losses from hidden states share: the plan's promise and its two verbs.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::lossk {

struct CudaLinearHeadPlan::State {
  Shape shape;
  HeadConfig config;
  Request request;
  std::string kernel;
  std::string mode;
  int64_t chunk = 0;
  int64_t n_chunks = 0;
  int64_t lodged_rows = 0;
  std::vector<Booking> bookings;
  std::vector<Rejection> rejections;
  int64_t workspace_bytes = 0;
  double operations = 0;
  int launches = 0;

  virtual ~State() = default;
  virtual Status prepare() const = 0;
  // Of a plan with a filter.
  virtual Result<FilterReport> filter_report(CUstream_st* stream, std::byte* workspace) const;
  // `workspace` is as large and aligned as it must be, and starts with the census.
  virtual Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
                     std::byte* workspace) const = 0;
};

namespace cuda {

using LinearState = std::shared_ptr<CudaLinearHeadPlan::State>;

// The candidates in order of preference. The configuration is valid and fits the shape.
inline constexpr std::string_view kScaledExponentials = "linear_head_sm90_scaled_exponentials";
inline constexpr std::string_view kChunkedProducts = "linear_head_sm80_chunked_products";
Result<LinearState> plan_scaled_exponentials(const Shape& shape, const HeadConfig& config,
                                             const Request& request,
                                             const CudaLinearHeadOptions& options);
Result<LinearState> plan_chunked_products(const Shape& shape, const HeadConfig& config,
                                          const Request& request,
                                          const CudaLinearHeadOptions& options);

}  // namespace cuda
}  // namespace ullage::lossk
