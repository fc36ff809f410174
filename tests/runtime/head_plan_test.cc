// What a plan of the losses promises: chunk, bytes by purpose, operations, refusals.
#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>

#include "runtime/kernel_table.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk {
namespace {

HeadConfig label_loss() { return {.terms = {{.name = "ce"}}, .teachers = {}, .options = {}}; }

constexpr Request kBackward{.d_hidden = true, .d_weight = true};

int64_t booked(const HeadPlan& plan, const std::string& purpose) {
  for (const Booking& booking : plan.bookings()) {
    if (booking.purpose == purpose) return booking.bytes;
  }
  return 0;
}

TEST(HeadPlan, TheChunkIsTheLargestThatFits) {
  const Shape shape{2048, 64, 151936};
  const Result<HeadPlan> plan = lossk::plan(shape, label_loss(), kBackward, {});
  ASSERT_TRUE(plan) << plan.status().to_string();
  EXPECT_LE(plan->workspace_bytes(), 256 << 20);
  EXPECT_EQ(plan->mode(), "chunk");
  EXPECT_EQ(booked(*plan, "logit chunk"), plan->chunk() * 151936 * 4);
  EXPECT_EQ(plan->materialized_bytes(), int64_t{2048} * 151936 * 4);
  EXPECT_EQ(plan->n_chunks(), (2048 + plan->chunk() - 1) / plan->chunk());
  EXPECT_EQ(plan->operations(), 6.0 * 2048 * 64 * 151936);
  // One row more does not fit.
  const auto more = lossk::plan(shape, label_loss(), kBackward,
                                {.budget_bytes = 256 << 20, .chunk = plan->chunk() + 1});
  ASSERT_FALSE(more);
  EXPECT_EQ(more.status().code(), kLossBadChunk);
  EXPECT_NE(more.status().message().find("allowed 268435456"), std::string::npos);
  EXPECT_FALSE(plan->rejections().empty());
}

TEST(HeadPlan, BelowOneRowIsRefused) {
  const auto plan = lossk::plan({16, 8, 1000}, label_loss(), kBackward, {.budget_bytes = 4000});
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.status().code(), kLossBadChunk);
  const auto logits =
      lossk::plan({16, 0, 1000}, label_loss(), {.d_logits = true}, {.budget_bytes = 100});
  ASSERT_FALSE(logits);
  EXPECT_EQ(logits.status().code(), kLossBadChunk);
}

TEST(HeadPlan, AccumulatorsAreBookedWhereTheGradientIsShorter) {
  Request request = kBackward;
  const auto same = lossk::plan({8, 32, 100}, label_loss(), request, {});
  request.d_weight_dtype = DType::kBF16;
  const auto shorter = lossk::plan({8, 32, 100}, label_loss(), request, {});
  ASSERT_TRUE(same && shorter);
  EXPECT_EQ(booked(*same, "gradient accumulators"), 0);
  EXPECT_EQ(booked(*shorter, "gradient accumulators"), 32 * 100 * 4);
}

TEST(HeadPlan, WithoutAGradientStripsAreEnough) {
  const auto plan = lossk::plan({2048, 64, 151936}, label_loss(), {}, {});
  ASSERT_TRUE(plan);
  EXPECT_EQ(plan->mode(), "strips");
  EXPECT_LT(plan->workspace_bytes(), 32 << 20);
  EXPECT_EQ(plan->operations(), 2.0 * 2048 * 64 * 151936);
  const auto entropy = lossk::plan({2048, 64, 151936}, label_loss(), {.entropy = true}, {});
  ASSERT_TRUE(entropy);
  EXPECT_EQ(entropy->mode(), "chunk");
}

TEST(HeadPlan, ATightBudgetRecomputes) {
  const Shape shape{2048, 64, 151936};
  const auto plan =
      lossk::plan(shape, label_loss(), kBackward, {.budget_bytes = 16 << 20, .n_threads = 2});
  ASSERT_TRUE(plan) << plan.status().to_string();
  EXPECT_EQ(plan->mode(), "recompute");
  EXPECT_LE(plan->workspace_bytes(), 16 << 20);
  EXPECT_EQ(plan->operations(), 8.0 * 2048 * 64 * 151936);
  EXPECT_EQ(plan->rejections().front().candidate, "chunk");
}

// A tenth of what PyTorch's eager mode takes at these shapes (bench/peers_cpu.py).
TEST(HeadPlan, ATenthOfEagersMemoryHoldsEveryRow) {
  struct Case {
    Shape shape;
    DType dtype;
    int64_t budget_bytes;
  };
  for (const auto& [shape, dtype, budget_bytes] :
       {Case{{256, 576, 49152}, DType::kF32, 5'900'000},
        Case{{64, 4096, 32000}, DType::kF32, 4'700'000},
        Case{{128, 576, 49152}, DType::kF64, 5'400'000},
        Case{{512, 1024, 151936}, DType::kF32, 30'000'000}}) {
    Request request = kBackward;
    request.input_dtype = request.weight_dtype = request.grad_dtype = request.d_weight_dtype =
        dtype;
    const auto plan =
        lossk::plan(shape, label_loss(), request, {.budget_bytes = budget_bytes, .n_threads = 2});
    ASSERT_TRUE(plan) << plan.status().to_string();
    EXPECT_EQ(plan->mode(), "recompute");
    EXPECT_EQ(plan->n_chunks(), 1);
    EXPECT_LE(plan->workspace_bytes(), budget_bytes);
  }
}

TEST(HeadPlan, ASegmentLossInChunksTakesTwoPasses) {
  HeadConfig config = label_loss();
  config.terms.push_back({.name = "gspo", .kind = LossKind::kGspo});
  const auto two = lossk::plan({8, 32, 100}, config, kBackward, {.chunk = 4});
  const auto one = lossk::plan({8, 32, 100}, config, kBackward, {.chunk = 8});
  ASSERT_TRUE(two && one);
  EXPECT_EQ(two->mode(), "chunk_two_pass");
  EXPECT_EQ(two->operations(), 8.0 * 8 * 32 * 100);
  EXPECT_EQ(one->mode(), "chunk");
  EXPECT_EQ(one->operations(), 6.0 * 8 * 32 * 100);
}

TEST(HeadPlan, Refusals) {
  const auto code = [](const Shape& shape, const Request& request, const PlanLimits& limits) {
    return lossk::plan(shape, label_loss(), request, limits).status().code();
  };
  EXPECT_EQ(code({4, 4, 0}, {}, {}), kLossEmptyDimension);
  EXPECT_EQ(code({4, 4, 9}, {}, {.chunk = -1}), kLossEmptyDimension);
  EXPECT_EQ(code({4, 4, 9}, {}, {.budget_bytes = -1}), kLossEmptyDimension);
  EXPECT_EQ(code({4, 4, 9}, {}, {.n_threads = -1}), kLossEmptyDimension);
  EXPECT_EQ(code({4, 4, 9}, {.input_dtype = DType::kF64}, {}), kHeadBadDtype);
  constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(code({kHuge, 4, 9}, {}, {}), kLossDimensionTooLarge);
  EXPECT_EQ(code({1, 1, kHuge / 9}, {.entropy = true}, {.budget_bytes = int64_t{1} << 40}),
            kLossBadChunk);
  EXPECT_EQ(code({kHuge / 80, 0, 9}, {}, {}), kLossDimensionTooLarge);
}

TEST(HeadPlan, TheEnvironmentPinsAKernel) {
  for (const KernelEntry& kernel : kernel_table()) {
    ASSERT_EQ(setenv("ULLAGE_FORCE_KERNEL", kernel.name.c_str(), 1), 0);
    const auto plan = lossk::plan({4, 4, 9}, label_loss(), {}, {});
    ASSERT_TRUE(plan) << plan.status().to_string();
    EXPECT_EQ(plan->kernel(), kernel.name);
  }
  ASSERT_EQ(setenv("ULLAGE_FORCE_KERNEL", "head_magic", 1), 0);
  const auto unknown = lossk::plan({4, 4, 9}, label_loss(), {}, {});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.status().code(), kHeadUnknownKernel);
  EXPECT_NE(unknown.status().message().find(kernel_table().front().name), std::string::npos);
  ASSERT_EQ(unsetenv("ULLAGE_FORCE_KERNEL"), 0);
  const auto best = lossk::plan({4, 4, 9}, label_loss(), {}, {});
  ASSERT_TRUE(best);
  EXPECT_EQ(best->kernel(), kernel_table().front().name);
}

}  // namespace
}  // namespace ullage::lossk
