// Plans of the chunked products, made where there is no GPU.
#include <gtest/gtest.h>

#include <string>

#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::lossk {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

CudaLinearHeadOptions chunked(int64_t budget_bytes = 0, int64_t chunk = 0) {
  return {
      .budget_bytes = budget_bytes, .chunk = chunk, .kernel = "linear_head_sm80_chunked_products"};
}

HeadConfig distillation() {
  HeadConfig config;
  config.terms = {{.name = "kd", .kind = LossKind::kDistillation}};
  config.teachers = {{.kind = TeacherKind::kHidden,
                      .vocab = 151936,
                      .d_model = 1024,
                      .dtype = DType::kBF16,
                      .weight_dtype = DType::kBF16}};
  return config;
}

Request training(DType dtype = DType::kBF16, DType d_weight = DType::kF32) {
  return {.input_dtype = dtype,
          .weight_dtype = dtype,
          .grad_dtype = dtype,
          .d_weight_dtype = d_weight,
          .d_hidden = true,
          .d_weight = true};
}

int64_t booked(const CudaLinearHeadPlan& plan, std::string_view purpose = {}) {
  int64_t bytes = 0;
  for (const Booking& booking : plan.bookings()) {
    if (purpose.empty() || booking.purpose == purpose) bytes += booking.bytes;
  }
  return bytes;
}

TEST(CudaChunkedPlan, StaysWithinTheBudgetAndBooksEveryByte) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t budget : {int64_t{0}, 64 * kMiB}) {
      HeadConfig config = distillation();
      config.teachers[0].dtype = config.teachers[0].weight_dtype = dtype;
      const auto plan =
          plan_cuda_linear({8192, 4096, 151936}, config, training(dtype), chunked(budget));
      ASSERT_TRUE(plan.ok()) << plan.status().to_string();
      EXPECT_LE(plan->workspace_bytes(), budget > 0 ? budget : 512 * kMiB);
      EXPECT_GE(plan->workspace_bytes(), (budget > 0 ? budget : 512 * kMiB) / 3);
      EXPECT_EQ(booked(*plan), plan->workspace_bytes());
      EXPECT_EQ(plan->n_chunks(), (8192 + plan->chunk() - 1) / plan->chunk());
      EXPECT_EQ(booked(*plan, "teacher chunk"), booked(*plan, "logit chunk"));
    }
  }
}

TEST(CudaChunkedPlan, FrozenMatricesTakeNeitherMemoryNorOperations) {
  const Shape shape{4096, 2048, 50257};
  HeadConfig config;
  config.terms = {{.name = "ce", .label_smoothing = 0.1}};
  const double product = 2.0 * 4096 * 2048 * 50257;
  Request request = training();
  const auto both = plan_cuda_linear(shape, config, request, chunked(0, 1024));
  request.d_weight = false;
  const auto hidden = plan_cuda_linear(shape, config, request, chunked(0, 1024));
  request.d_hidden = false;
  const auto none = plan_cuda_linear(shape, config, request, chunked(0, 1024));
  ASSERT_TRUE(both.ok() && hidden.ok() && none.ok());
  EXPECT_EQ(both->operations(), 3 * product);
  EXPECT_EQ(hidden->operations(), 2 * product);
  EXPECT_EQ(none->operations(), product);
  EXPECT_EQ(booked(*both, "hidden rows"), 1024 * 2048 * 2);
  EXPECT_EQ(booked(*hidden, "hidden rows"), 0);
  // Census, scalars; a chunk: rows copied, rows, logits, d_hidden and d_weight in two parts, for
  // the vocabulary is odd, and d_hidden rounded.
  EXPECT_EQ(both->launches(), 2 + 4 * (2 + 6 + 1));
  EXPECT_EQ(none->launches(), 2 + 4 * (1 + 2));
}

TEST(CudaChunkedPlan, RoundsAWeightGradientOnce) {
  const Shape shape{8192, 1024, 50257};
  constexpr int64_t kSum = int64_t{50257} * 1024 * 4;
  HeadConfig config;
  config.terms = {{.name = "ce"}};
  const Request request = training(DType::kBF16, DType::kBF16);
  // One chunk needs no sum; several book it, on top of the default budget.
  const auto one = plan_cuda_linear(shape, config, request, chunked(int64_t{1} << 40));
  ASSERT_TRUE(one.ok());
  EXPECT_EQ(one->n_chunks(), 1);
  EXPECT_EQ(booked(*one, "gradient sums in f32"), 0);
  const auto several = plan_cuda_linear(shape, config, request, chunked());
  ASSERT_TRUE(several.ok());
  EXPECT_GT(several->n_chunks(), 1);
  EXPECT_EQ(booked(*several, "gradient sums in f32"), kSum);
  EXPECT_LE(several->workspace_bytes(), 512 * kMiB + kSum);
  // A budget that is given is kept or refused.
  const auto refused = plan_cuda_linear(shape, config, request, chunked(64 * kMiB));
  EXPECT_EQ(refused.status().code(), kLossBadChunk);
}

TEST(CudaChunkedPlan, SequenceTermsOverSeveralChunksTakeTwoPasses) {
  const Shape shape{4096, 64, 1000};
  HeadConfig config;
  config.terms = {{.name = "gspo", .kind = LossKind::kGspo}};
  const double product = 2.0 * 4096 * 64 * 1000;
  const auto one = plan_cuda_linear(shape, config, training(), chunked());
  const auto two = plan_cuda_linear(shape, config, training(), chunked(0, 2048));
  ASSERT_TRUE(one.ok() && two.ok());
  EXPECT_EQ(one->mode(), "chunk");
  EXPECT_EQ(one->operations(), 3 * product);
  EXPECT_EQ(two->mode(), "chunk_two_pass");
  EXPECT_EQ(two->operations(), 4 * product);
}

// Two passes, two parts of the gradient: the logits stay until both are made.
TEST(CudaChunkedPlan, KeepsTheLogitsOfSeveralPasses) {
  HeadConfig config = distillation();
  config.terms.push_back({.name = "ce"});
  const Shape shape{8192, 4096, 151936};
  const auto one = plan_cuda_linear(shape, config, training(), chunked(0, 256));
  config.terms[0].student_temperature = config.terms[0].temperature = 2;
  const auto textbook = plan_cuda_linear(shape, config, training(), chunked(0, 256));
  config.terms[0].divergence = Divergence::kReverseKl;
  const auto two = plan_cuda_linear(shape, config, training(), chunked(0, 256));
  Request forward = training();
  forward.d_hidden = forward.d_weight = false;
  const auto losses = plan_cuda_linear(shape, config, forward, chunked(0, 256));
  ASSERT_TRUE(one.ok() && textbook.ok() && two.ok() && losses.ok()) << two.status().to_string();
  EXPECT_EQ(booked(*one, "logit gradient chunk"), 0);
  EXPECT_EQ(booked(*textbook, "logit gradient chunk"), 0);
  EXPECT_EQ(textbook->launches(), one->launches());
  EXPECT_EQ(booked(*two, "logit gradient chunk"), booked(*two, "logit chunk"));
  EXPECT_EQ(booked(*losses, "logit gradient chunk"), 0);
  EXPECT_EQ(two->launches(), one->launches() + 8192 / 256);
  EXPECT_EQ(two->operations(), one->operations());
}

TEST(CudaChunkedPlan, TakesEveryDtypeFromSm80On) {
  HeadConfig config = distillation();
  config.options = {.softcap = 30, .bias = true, .adapter_rank = 16};
  config.terms.push_back({.name = "grpo", .kind = LossKind::kGrpo});
  for (const int capability : {80, 89, 90, 100}) {
    CudaLinearHeadOptions options = chunked();
    options.device.compute_capability = capability;
    Request request = training();
    request.d_bias = request.d_adapter = request.entropy = request.policy_metrics = true;
    const auto plan = plan_cuda_linear({1000, 576, 151936}, config, request, options);
    EXPECT_TRUE(plan.ok()) << plan.status().to_string();
  }
}

TEST(CudaChunkedPlan, RefusesWhatItDoesNotTake) {
  const Shape shape{2048, 1024, 151936};
  const auto code = [&](const HeadConfig& config, const Request& request,
                        const CudaLinearHeadOptions& options) {
    return plan_cuda_linear(shape, config, request, options).status().code();
  };
  EXPECT_EQ(code(distillation(), training(), chunked(kMiB)), kLossBadChunk);
  EXPECT_EQ(code(distillation(), training(), chunked(0, 100)), kLossBadChunk);
  EXPECT_EQ(code(distillation(), training(), chunked(kMiB, 2048)), kLossBadChunk);
  EXPECT_EQ(code(distillation(), training(DType::kF64), chunked()), kHeadBadDtype);
  EXPECT_EQ(code(distillation(), training(DType::kF16), chunked()), kHeadBadDtype);  // the teacher
  EXPECT_EQ(code(distillation(), training(DType::kBF16, DType::kF16), chunked()), kHeadBadDtype);
  Request f16 = training();
  f16.grad_dtype = DType::kF16;
  EXPECT_EQ(code(distillation(), f16, chunked()), kHeadBadDtype);
  HeadConfig config = distillation();
  for (int i = 0; i < 16; ++i)
    config.terms.push_back({.name = "z" + std::to_string(i), .kind = LossKind::kZLoss});
  EXPECT_EQ(code(config, training(), chunked()), kHeadBadConfig);
  config = distillation();
  config.options.adapter_rank = 1025;
  EXPECT_EQ(code(config, training(), chunked()), kLossDimensionTooLarge);
  config = distillation();
  config.teachers.push_back(config.teachers[0]);
  config.terms.push_back(config.terms[0]);
  config.terms[1].name = "second";
  config.terms[1].teacher = 1;
  EXPECT_EQ(code(config, training(), chunked()), kHeadUnknownKind);  // one of hidden states
  CudaLinearHeadOptions turing = chunked();
  turing.device.compute_capability = 75;
  EXPECT_EQ(code(distillation(), training(), turing), kCudaUnsupportedDevice);
}

}  // namespace
}  // namespace ullage::lossk
