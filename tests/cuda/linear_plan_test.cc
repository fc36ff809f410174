// Plans of the fused head, made where there is no GPU.
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::lossk {
namespace {

HeadConfig cross_entropy() {
  HeadConfig config;
  config.terms = {{.name = "cross_entropy"}};
  return config;
}

Request training(DType d_weight = DType::kF32) {
  return {.input_dtype = DType::kBF16,
          .weight_dtype = DType::kBF16,
          .grad_dtype = DType::kBF16,
          .d_weight_dtype = d_weight,
          .d_hidden = true,
          .d_weight = true};
}

TEST(CudaLinearPlan, StaysWithinTheBudgetAndBooksEveryByte) {
  for (const Shape& shape :
       {Shape{2048, 4096, 151936}, Shape{8192, 1024, 151936}, Shape{8192, 4096, 128256},
        Shape{8192, 2304, 256000}, Shape{1, 8, 1}, Shape{8193, 576, 50257}}) {
    const auto plan = plan_cuda_linear(shape, cross_entropy(), training(), {});
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_LE(plan->workspace_bytes(), int64_t{512} << 20);
    int64_t booked = 0;
    for (const Booking& booking : plan->bookings()) booked += booking.bytes;
    EXPECT_EQ(booked, plan->workspace_bytes());
    if (plan->lodged_rows() == 0) {
      EXPECT_EQ(plan->n_chunks(), (shape.n_tok + plan->chunk() - 1) / plan->chunk());
    }
    EXPECT_EQ(plan->mode(), "chunk");
  }
}

// 2 d_model rows of exponentials fit the memory of an f32 d_weight.
TEST(CudaLinearPlan, LodgesExponentialsInDWeight) {
  const auto whole = plan_cuda_linear({8192, 4096, 128256}, cross_entropy(), training(), {});
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->lodged_rows(), 8192);
  EXPECT_EQ(whole->n_chunks(), 1);
  const auto first = plan_cuda_linear({8192, 2304, 256000}, cross_entropy(), training(), {});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->lodged_rows(), 4608);
  EXPECT_EQ(first->n_chunks(), 5);
  const auto small = plan_cuda_linear({2048, 4096, 151936}, cross_entropy(), training(),
                                      {.budget_bytes = 64 << 20});
  ASSERT_TRUE(small.ok()) << small.status().to_string();
  EXPECT_EQ(small->n_chunks(), 1);
  EXPECT_EQ(small->operations(), 6.0 * 2048 * 4096 * 151936);
  EXPECT_LE(small->workspace_bytes(), 64 << 20);
  const auto rounded =
      plan_cuda_linear({2048, 4096, 151936}, cross_entropy(), training(DType::kBF16), {});
  ASSERT_TRUE(rounded.ok());
  EXPECT_EQ(rounded->lodged_rows(), 2048);
  EXPECT_EQ(rounded->mode(), "chunk");
  EXPECT_LE(rounded->workspace_bytes(), int64_t{512} << 20);
  for (const CudaLinearHeadOptions& options :
       {CudaLinearHeadOptions{.accumulate = true}, CudaLinearHeadOptions{.chunk = 256}}) {
    const auto apart = plan_cuda_linear({8192, 4096, 128256}, cross_entropy(), training(), options);
    ASSERT_TRUE(apart.ok());
    EXPECT_EQ(apart->lodged_rows(), 0);
  }
}

// Whatever the shape, the type of d_weight and what its memory may be used for.
TEST(CudaLinearPlan, SixtyFourMebibytesAreEnough) {
  constexpr int64_t kBudget = int64_t{64} << 20;
  for (const Shape& shape :
       {Shape{2048, 4096, 151936}, Shape{8192, 1024, 151936}, Shape{8192, 4096, 128256},
        Shape{8192, 2304, 256000}, Shape{2048, 4096, 128256}}) {
    for (const DType d_weight : {DType::kF32, DType::kBF16}) {
      for (const bool accumulate : {false, true}) {
        const std::string where = std::to_string(shape.n_tok) + " x " +
                                  std::to_string(shape.d_model) + " x " +
                                  std::to_string(shape.vocab);
        const auto plan = plan_cuda_linear(shape, cross_entropy(), training(d_weight),
                                           {.budget_bytes = kBudget,
                                            .kernel = "linear_head_sm90_scaled_exponentials",
                                            .accumulate = accumulate});
        ASSERT_TRUE(plan.ok()) << where << ": " << plan.status().to_string();
        EXPECT_LE(plan->workspace_bytes(), kBudget) << where;
        int64_t booked = 0;
        for (const Booking& booking : plan->bookings()) booked += booking.bytes;
        EXPECT_EQ(booked, plan->workspace_bytes()) << where;
        EXPECT_LE(plan->operations(), 8.0 * static_cast<double>(shape.n_tok) *
                                          static_cast<double>(shape.d_model) *
                                          static_cast<double>(shape.vocab))
            << where;
        EXPECT_GT(plan->chunk(), 0) << where;
      }
    }
  }
  // 2 d_model rows lie in an f32 d_weight: all of them here.
  const auto whole = plan_cuda_linear({8192, 4096, 128256}, cross_entropy(), training(),
                                      {.budget_bytes = kBudget});
  ASSERT_TRUE(whole.ok());
  EXPECT_EQ(whole->mode(), "strip");
  EXPECT_EQ(whole->operations(), 6.0 * 8192 * 4096 * 128256);
}

TEST(CudaLinearPlan, TakesF16) {
  Request f16 = training();
  f16.input_dtype = f16.weight_dtype = f16.grad_dtype = DType::kF16;
  const auto plan = plan_cuda_linear({2048, 4096, 128256}, cross_entropy(), f16, {});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->kernel(), "linear_head_sm90_scaled_exponentials");
  // One type throughout, but for an f32 d_weight.
  f16.d_weight_dtype = DType::kBF16;
  const auto mixed = plan_cuda_linear({2048, 4096, 128256}, cross_entropy(), f16,
                                      {.kernel = "linear_head_sm90_scaled_exponentials"});
  EXPECT_EQ(mixed.status().code(), kHeadBadDtype);
}

TEST(CudaLinearPlan, FiltersWhereItCan) {
  const Shape shape{2048, 4096, 128256};
  const auto filtered =
      plan_cuda_linear(shape, cross_entropy(), training(), {.filter_tolerance = 1e-3});
  ASSERT_TRUE(filtered.ok()) << filtered.status().to_string();
  EXPECT_LE(filtered->workspace_bytes(), int64_t{512} << 20);
  for (const double tolerance : {-0.1, 1.0, std::nan("")}) {
    EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), training(), {.filter_tolerance = tolerance})
                  .status()
                  .code(),
              kHeadUnknownKind);
  }
  // The chunked products have none: why the other kernel does not take a head is the answer.
  EXPECT_EQ(
      plan_cuda_linear(shape, cross_entropy(), training(),
                       {.kernel = "linear_head_sm80_chunked_products", .filter_tolerance = 1e-3})
          .status()
          .code(),
      kHeadUnknownKind);
  Request f32 = training();
  f32.input_dtype = f32.weight_dtype = f32.grad_dtype = DType::kF32;
  EXPECT_EQ(
      plan_cuda_linear(shape, cross_entropy(), f32, {.filter_tolerance = 1e-3}).status().code(),
      kHeadBadDtype);
  EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), training(),
                             {.budget_bytes = 1 << 20, .filter_tolerance = 1e-3})
                .status()
                .code(),
            kLossBadChunk);
}

TEST(CudaLinearPlan, CountsOperationsAndLaunches) {
  const auto one = plan_cuda_linear({256, 64, 1000}, cross_entropy(), training(), {});
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->operations(), 6.0 * 256 * 64 * 1000);
  EXPECT_EQ(one->launches(), 10);
  HeadConfig gspo;
  gspo.terms = {{.name = "gspo", .kind = LossKind::kGspo}};
  const auto two = plan_cuda_linear({600, 64, 1000}, gspo, training(), {.chunk = 256});
  ASSERT_TRUE(two.ok()) << two.status().to_string();
  EXPECT_EQ(two->mode(), "chunk_two_pass");
  EXPECT_EQ(two->operations(), 8.0 * 600 * 64 * 1000);
}

// The f32 sum of such a d_weight is 2.3 GiB: by default it never exists.
TEST(CudaLinearPlan, CutsTheVocabularyForARoundedWeightGradient) {
  const Shape shape{8192, 4096, 151936};
  const auto strips = plan_cuda_linear(shape, cross_entropy(), training(DType::kBF16), {});
  ASSERT_TRUE(strips.ok()) << strips.status().to_string();
  EXPECT_EQ(strips->mode(), "strip");
  EXPECT_LE(strips->workspace_bytes(), int64_t{512} << 20);
  // d_model of the rows lie in d_weight; the logits of the others are made again.
  EXPECT_EQ(strips->lodged_rows(), 4096);
  EXPECT_EQ(strips->operations(), 7.0 * 8192 * 4096 * 151936);
  const auto chunks = plan_cuda_linear(shape, cross_entropy(), training(DType::kBF16),
                                       {.budget_bytes = int64_t{4} << 30});
  ASSERT_TRUE(chunks.ok());
  EXPECT_EQ(chunks->mode(), "chunk");
}

// Both of its runs by the same kernel; and refused before anything is launched where a loss is
// asked of a shard alone.
TEST(CudaLinearPlan, TakesAShardOfAVocabulary) {
  HeadConfig config = cross_entropy();
  config.options = {.vocab_offset = 100, .group_vocab = 1000};
  const Shape shape = {4, 64, 300};
  const Request statistics = {.input_dtype = DType::kBF16, .weight_dtype = DType::kBF16};
  for (const double smoothing : {0.0, 0.1}) {
    config.terms[0].label_smoothing = smoothing;
    const auto first = plan_cuda_linear(shape, config, statistics, {});
    const auto second = plan_cuda_linear(shape, config, training(), {});
    ASSERT_TRUE(first.ok() && second.ok()) << second.status().to_string();
    EXPECT_EQ(first->kernel(), second->kernel());
    EXPECT_EQ(second->kernel(), smoothing == 0 ? "linear_head_sm90_scaled_exponentials"
                                               : "linear_head_sm80_chunked_products");

    std::vector<std::byte> room(static_cast<size_t>(second->workspace_bytes()) + 256);
    auto* const aligned =
        reinterpret_cast<std::byte*>((reinterpret_cast<uintptr_t>(room.data()) + 255) / 256 * 256);
    double total = -1;
    Inputs in;  // memory that no refused run reads
    in.hidden = {aligned, DType::kBF16, 4, 64, 64};
    in.weight = {aligned, DType::kBF16, 300, 64, 64};
    in.labels = {aligned, 8, 4};
    Outputs out;
    out.total = &total;
    const auto run = [&] {
      return second->run(nullptr, in, out,
                         {aligned, static_cast<size_t>(second->workspace_bytes())});
    };
    EXPECT_EQ(run().code(), kGroupStatistics) << run().to_string();
    in.group_shift = in.group_log_sum = in.group_label_log_prob = {aligned, DType::kF32, 4};
    in.class_weights = {aligned, DType::kF32, 300};
    EXPECT_EQ(run().code(), kGroupUnsupported) << run().to_string();
    in.class_weights = {};
    in.group_log_sum.dtype = DType::kF64;
    EXPECT_EQ(run().code(), kHeadBadDtype) << run().to_string();
    EXPECT_EQ(total, -1);
  }
  config.options.vocab_offset = 701;
  EXPECT_EQ(plan_cuda_linear(shape, config, training(), {}).status().code(), kGroupBadRange);
}

TEST(CudaLinearPlan, RefusesWhatItDoesNotTake) {
  const Shape shape{2048, 4096, 151936};
  EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), training(), {.budget_bytes = 1 << 20})
                .status()
                .code(),
            kLossBadChunk);
  EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), training(), {.chunk = 100}).status().code(),
            kLossBadChunk);
  Request f32 = training();
  f32.weight_dtype = DType::kF32;
  EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), f32, {}).status().code(), kHeadBadDtype);
  CudaLinearHeadOptions volta;
  volta.device.compute_capability = 70;
  EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), training(), volta).status().code(),
            kCudaUnsupportedDevice);
  EXPECT_EQ(plan_cuda_linear(shape, cross_entropy(), training(), {.kernel = "x"}).status().code(),
            kHeadUnknownKernel);
}

TEST(CudaLinearPlan, SaysWhyTheFirstKernelWasPassedOver) {
  const Shape shape{2048, 4096, 151936};
  const auto first = plan_cuda_linear(shape, cross_entropy(), training(), {});
  ASSERT_TRUE(first.ok());
  EXPECT_EQ(first->kernel(), "linear_head_sm90_scaled_exponentials");
  EXPECT_TRUE(first->rejections().empty());
  HeadConfig capped = cross_entropy();
  capped.options.softcap = 30;
  const auto second = plan_cuda_linear(shape, capped, training(), {});
  ASSERT_TRUE(second.ok()) << second.status().to_string();
  EXPECT_EQ(second->kernel(), "linear_head_sm80_chunked_products");
  ASSERT_EQ(second->rejections().size(), 1u);
  EXPECT_EQ(second->rejections()[0].candidate, first->kernel());
  EXPECT_NE(second->rejections()[0].reason.find("softcap"), std::string::npos);
  // By name, a kernel is held to what it takes.
  EXPECT_EQ(
      plan_cuda_linear(shape, capped, training(), {.kernel = first->kernel()}).status().code(),
      kHeadUnknownKind);
  const auto forced =
      plan_cuda_linear(shape, cross_entropy(), training(), {.kernel = second->kernel()});
  ASSERT_TRUE(forced.ok());
  EXPECT_EQ(forced->kernel(), second->kernel());
  EXPECT_NE(forced->rejections()[0].reason.find("asked for"), std::string::npos);
}

}  // namespace
}  // namespace ullage::lossk
