// A run allocates nothing: every operator new of this program is counted.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>
#include <vector>

#include "ullage/lossk/head.h"

namespace {

std::atomic<int64_t> g_allocations{0};

void* counted(size_t size, size_t alignment) {
  ++g_allocations;
  void* const block = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (!block) throw std::bad_alloc();
  return block;
}

}  // namespace

void* operator new(size_t size) { return counted(size, 16); }
void* operator new(size_t size, std::align_val_t alignment) {
  return counted(size, static_cast<size_t>(alignment));
}
// Inlined without their operator new, GCC 12 at -O1 would take these for mismatched.
[[gnu::noinline]] void operator delete(void* block) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, size_t) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, std::align_val_t) noexcept { std::free(block); }
[[gnu::noinline]] void operator delete(void* block, size_t, std::align_val_t) noexcept {
  std::free(block);
}

namespace ullage::lossk {
namespace {

TEST(HeadMemory, TheCounterCounts) {
  const int64_t before = g_allocations;
  std::vector<int> v(3);
  EXPECT_EQ(g_allocations, before + 1);
}

TEST(HeadMemory, RunAllocatesNothing) {
  constexpr int64_t kTokens = 13, kModel = 7, kVocab = 2111;
  HeadConfig config;
  config.terms = {
      {.name = "ce", .label_smoothing = 0.1},
      {.name = "kd", .kind = LossKind::kDistillation},
      {.name = "kd_hidden", .kind = LossKind::kDistillation, .teacher = 1},
      {.name = "gspo", .kind = LossKind::kGspo},
      {.name = "z", .kind = LossKind::kZLoss, .logits_scale = 2},
  };
  config.teachers = {{.kind = TeacherKind::kLogits, .vocab = kVocab, .dtype = DType::kBF16},
                     {.kind = TeacherKind::kHidden, .vocab = kVocab, .d_model = 3}};
  config.options.softcap = 5;
  const Request request{.d_weight_dtype = DType::kBF16,
                        .d_hidden = true,
                        .d_weight = true,
                        .entropy = true,
                        .policy_metrics = true};
  Result<HeadPlan> plan =
      lossk::plan({kTokens, kModel, kVocab}, config, request, {.chunk = 4, .n_threads = 3});
  ASSERT_TRUE(plan) << plan.status().to_string();
  EXPECT_EQ(plan->mode(), "chunk_two_pass");

  std::vector<float> hidden(kTokens * kModel, 0.5f), weight(kVocab * kModel, 0.25f);
  std::vector<float> teacher_hidden(kTokens * 3, 1), teacher_weight(kVocab * 3, 0.5f);
  std::vector<uint16_t> teacher(kTokens * kVocab, 0x3f80);
  std::vector<int64_t> labels(kTokens, 5), segments(kTokens, 0);
  labels[4] = -1;
  std::vector<float> old_log_probs(kTokens, -7), advantages(kTokens, 1);
  Inputs in;
  in.hidden = {hidden.data(), DType::kF32, kTokens, kModel, kModel};
  in.weight = {weight.data(), DType::kF32, kVocab, kModel, kModel};
  in.labels = {labels.data(), 8, kTokens, 1};
  in.segments = {segments.data(), 8, kTokens, 1};
  in.n_segments = 1;
  in.old_log_probs = {old_log_probs.data(), DType::kF32, kTokens, 1};
  in.advantages = {advantages.data(), DType::kF32, kTokens, 1};
  in.teachers.resize(2);
  in.teachers[0].logits = {teacher.data(), DType::kBF16, kTokens, kVocab, kVocab};
  in.teachers[1].hidden = {teacher_hidden.data(), DType::kF32, kTokens, 3, 3};
  in.teachers[1].weight = {teacher_weight.data(), DType::kF32, kVocab, 3, 3};
  double total = 0;
  std::vector<float> d_hidden(kTokens * kModel);
  std::vector<uint16_t> d_weight(kVocab * kModel);
  std::vector<PolicyMetrics> metrics(config.terms.size());
  Outputs out;
  out.total = &total;
  out.policy_metrics = metrics;
  out.d_hidden = {d_hidden.data(), DType::kF32, kTokens, kModel, kModel};
  out.d_weight = {d_weight.data(), DType::kBF16, kVocab, kModel, kModel};

  const auto size = static_cast<size_t>(plan->workspace_bytes());
  auto* const workspace = static_cast<std::byte*>(::operator new(size, std::align_val_t{64}));
  const int64_t before = g_allocations;
  const Status status = plan->run(in, out, {workspace, size});
  EXPECT_EQ(g_allocations, before);
  EXPECT_TRUE(status.ok()) << status.to_string();
  EXPECT_GT(total, 0);
  EXPECT_EQ(plan->run(in, out, {workspace, size - 1}).code(), kLossLengthMismatch);
  EXPECT_EQ(plan->run(in, out, {workspace + 1, size}).code(), kLossLengthMismatch);
  ::operator delete(workspace, std::align_val_t{64});
}

}  // namespace
}  // namespace ullage::lossk
