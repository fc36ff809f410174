// Runs a plan on views that a test made itself.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <new>

#include "ullage/lossk/head.h"

namespace ullage::test {

// Plans, runs in memory of its own, and expects no refusal.
inline void run(const lossk::Shape& shape, const lossk::HeadConfig& config,
                const lossk::Request& request, const lossk::PlanLimits& limits,
                const lossk::Inputs& in, const lossk::Outputs& out) {
  const Result<lossk::HeadPlan> plan = lossk::plan(shape, config, request, limits);
  ASSERT_TRUE(plan) << plan.status().to_string();
  const auto bytes = static_cast<size_t>(plan->workspace_bytes());
  auto* const workspace = static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64}));
  std::memset(workspace, 0xff, bytes);
  const Status status = plan->run(in, out, {workspace, bytes});
  ::operator delete(workspace, std::align_val_t{64});
  ASSERT_TRUE(status.ok()) << status.to_string();
}

}  // namespace ullage::test
