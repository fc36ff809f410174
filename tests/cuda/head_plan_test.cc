// Planning needs no GPU: which kernel, how much memory, and what is refused.
#include <gtest/gtest.h>

#include "cuda/head_logits/config.h"
#include "cuda/head_logits/open_rows.h"
#include "cuda/head_logits/passes.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::lossk {
namespace {

HeadConfig cross_entropy() { return {.terms = {{.name = "ce"}}}; }

HeadConfig distillation(int64_t vocab, Divergence divergence) {
  return {.terms = {{.name = "kd", .kind = LossKind::kDistillation, .divergence = divergence}},
          .teachers = {{.vocab = vocab, .dtype = DType::kBF16}}};
}

Request bf16() {
  return {.input_dtype = DType::kBF16, .grad_dtype = DType::kBF16, .d_logits = true};
}

TEST(CudaHeadPlan, KeepsEveryUsualRowOnAnH200InItsClusters) {
  for (const int64_t vocab : {1025, 8003, 32000, 50257, 151936, 262144}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      // Two rows of it and of its teacher take 4 MiB, more than 16 blocks have.
      if (vocab == 262144 && dtype == DType::kF32) continue;
      Request request = {.input_dtype = dtype, .grad_dtype = dtype, .d_logits = true};
      HeadConfig config = distillation(vocab, Divergence::kReverseKl);
      config.teachers[0].dtype = dtype;
      const auto plan = plan_cuda({8, 0, vocab}, config, request, {});
      ASSERT_TRUE(plan.ok()) << plan.status().to_string();
      EXPECT_EQ(plan->kernel(), "head_rows_sm90_cluster") << vocab;
      EXPECT_TRUE(plan->rejections().empty());
    }
  }
}

TEST(CudaHeadPlan, StreamsRowsThatNoClusterHolds) {
  Request request = {.grad_dtype = DType::kF32, .d_logits = true};
  const auto plan = plan_cuda({8, 0, 2'000'000}, cross_entropy(), request, {});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->kernel(), "head_rows_sm80_streamed");
  ASSERT_EQ(plan->rejections().size(), 1u);
  EXPECT_NE(plan->rejections()[0].reason.find("2000000 columns"), std::string::npos);
}

TEST(CudaHeadPlan, TakesSeveralRowsOfOneStripAtATime) {
  const char* const short_rows = "head_rows_sm80_short";
  CudaHeadOptions ampere;
  ampere.device.compute_capability = 80;
  for (const CudaHeadOptions& options : {CudaHeadOptions{}, ampere}) {
    const auto plan = plan_cuda({8, 0, 1000}, cross_entropy(), bf16(), options);
    ASSERT_TRUE(plan.ok());
    EXPECT_EQ(plan->kernel(), short_rows);
    ASSERT_EQ(plan->rejections().size(), 1u);
    EXPECT_EQ(plan->rejections()[0].candidate, "head_rows_sm90_cluster");
  }
  for (const char* kernel :
       {"head_rows_sm90_cluster", "head_rows_sm80_streamed", "head_rows_sm80_short"}) {
    const auto forced = plan_cuda({8, 0, 1000}, cross_entropy(), bf16(), {.kernel = kernel});
    ASSERT_TRUE(forced.ok());
    EXPECT_EQ(forced->kernel(), kernel);
  }

  const auto longer = plan_cuda({8, 0, 1025}, cross_entropy(), bf16(), {.kernel = short_rows});
  EXPECT_EQ(longer.status().code(), kHeadUnknownKernel);
  EXPECT_NE(longer.status().message().find("1025 columns has 2 strips"), std::string::npos)
      << longer.status().to_string();
  HeadConfig top_k = distillation(1000, Divergence::kForwardKl);
  top_k.teachers[0] = {.kind = TeacherKind::kTopK, .k = 20};
  EXPECT_EQ(plan_cuda({8, 0, 1000}, top_k, bf16(), {.kernel = short_rows}).status().code(),
            kHeadUnknownKernel);
  const auto gathered = plan_cuda({8, 0, 1000}, top_k, bf16(), {});
  ASSERT_TRUE(gathered.ok()) << gathered.status().to_string();
  EXPECT_EQ(gathered->kernel(), "head_rows_sm80_streamed");

  // Sixteen at most; of a teacher's, half as many columns are as many bytes. In registers: as many
  // as a power of two, where lanes have all of a vector or nothing.
  using cuda::Family;
  constexpr DType kBF16 = DType::kBF16, kF32 = DType::kF32;
  const struct {
    Family family;
    DType dtype;
    int64_t vocab;
    int rows;
    bool held;
  } cases[] = {
      {Family::kLabels, kBF16, 1, 16, false},   {Family::kLabels, kBF16, 8, 16, true},
      {Family::kLabels, kBF16, 256, 16, true},  {Family::kLabels, kBF16, 257, 15, false},
      {Family::kLabels, kBF16, 264, 8, true},   {Family::kLabels, kBF16, 768, 4, true},
      {Family::kLabels, kBF16, 1000, 4, true},  {Family::kLabels, kBF16, 1032, 2, true},
      {Family::kLabels, kBF16, 2048, 2, true},  {Family::kLabels, kBF16, 4096, 1, true},
      {Family::kLabels, kF32, 256, 8, true},    {Family::kLabels, kF32, 1024, 2, true},
      {Family::kLabels, kF32, 2048, 1, true},   {Family::kForward, kBF16, 256, 8, true},
      {Family::kForward, kBF16, 257, 7, false}, {Family::kReverse, kBF16, 264, 4, true},
      {Family::kForward, kBF16, 1000, 2, true}, {Family::kTempered, kBF16, 1024, 2, true},
      {Family::kForward, kF32, 512, 2, true},   {Family::kForward, kF32, 768, 1, true},
      {Family::kMixed, kBF16, 1000, 2, false},  {Family::kJensenShannon, kF32, 256, 4, false},
      {Family::kEntropy, kBF16, 500, 8, false}, {Family::kEntropy, kBF16, 504, 8, true}};
  for (const auto& each : cases) {
    std::vector<Rejection> rejections;
    const auto layout = cuda::choose_row_layout(each.vocab, each.dtype, {.family = each.family},
                                                CudaDevice{}, "", {}, rejections);
    ASSERT_TRUE(layout.ok());
    EXPECT_EQ(layout->kernel, cuda::RowKernel::kShort) << each.vocab;
    EXPECT_EQ(layout->rows_at_a_time, each.rows) << each.vocab;
    EXPECT_EQ(layout->held, each.held) << each.vocab;
  }
  const struct {
    Family family;
    DType dtype;
    int64_t vocab;
  } longer_cases[] = {{Family::kLabels, kBF16, 4104},
                      {Family::kLabels, kF32, 2056},
                      {Family::kLabels, kBF16, 2047},
                      {Family::kEntropy, kBF16, 1032}};
  for (const auto& each : longer_cases) {
    std::vector<Rejection> rejections;
    const auto layout = cuda::choose_row_layout(each.vocab, each.dtype, {.family = each.family},
                                                CudaDevice{}, "", {}, rejections);
    EXPECT_EQ(layout->kernel, cuda::RowKernel::kCluster) << each.vocab;
  }
}

TEST(CudaHeadPlan, TakesAnAmpereAndRefusesATuring) {
  CudaHeadOptions options;
  options.device.name = "A100";
  options.device.compute_capability = 80;
  const auto plan = plan_cuda({8, 0, 32000}, cross_entropy(), bf16(), options);
  ASSERT_TRUE(plan.ok());
  EXPECT_EQ(plan->kernel(), "head_rows_sm80_streamed");
  options.device.compute_capability = 75;
  EXPECT_EQ(plan_cuda({8, 0, 32000}, cross_entropy(), bf16(), options).status().code(),
            kCudaUnsupportedDevice);
}

TEST(CudaHeadPlan, BookingsAddUp) {
  HeadConfig config = cross_entropy();
  config.terms.push_back({.name = "gspo", .kind = LossKind::kGspo});
  Request request = bf16();
  request.policy_metrics = true;
  const auto plan = plan_cuda({1000, 0, 32000}, config, request, {});
  ASSERT_TRUE(plan.ok());
  int64_t sum = 0;
  for (const Booking& booking : plan->bookings()) sum += booking.bytes;
  EXPECT_EQ(sum, plan->workspace_bytes());
  EXPECT_GT(sum, 1000 * 4 * 4);
  EXPECT_EQ(plan->launches(), 6);
  EXPECT_EQ(plan_cuda({1000, 0, 32000}, cross_entropy(), bf16(), {})->launches(), 3);
}

// Terms that share a softmax and a teacher share a pass; the first is of the head's softmax.
TEST(CudaHeadPlan, APassIsOfOneSoftmaxAndOneTeacher) {
  const LossTerm ce{.name = "ce"}, z{.name = "z", .kind = LossKind::kZLoss};
  const LossTerm scaled{.name = "scaled", .logits_scale = 2};
  const LossTerm halved{.name = "halved", .logits_scale = 0.5};
  const LossTerm kl{
      .name = "kl", .kind = LossKind::kDistillation, .divergence = Divergence::kForwardKl};
  const auto with = [&](auto set) {
    LossTerm term = kl;
    set(term);
    return term;
  };
  const LossTerm warm = with([](LossTerm& t) { t.temperature = t.student_temperature = 2; });
  const LossTerm warm_teacher = with([](LossTerm& t) { t.temperature = 2; });
  const LossTerm half = with([](LossTerm& t) { t.logits_scale = 2, t.student_temperature = 4; });
  const LossTerm other = with([](LossTerm& t) { t.teacher = 1; });
  const LossTerm top_k = with([](LossTerm& t) { t.teacher = 2; });
  const LossTerm mixed = with([](LossTerm& t) { t.divergence = Divergence::kJensenShannon; });
  const LossTerm uneven = with([](LossTerm& t) {
    t.divergence = Divergence::kJensenShannon;
    t.beta = 0.1;
  });
  LossTerm warm_mixed = mixed, warm_other = other, warm_top_k = top_k;
  for (LossTerm* term : {&warm_mixed, &warm_other, &warm_top_k}) term->student_temperature = 2;
  warm_mixed.temperature = 2;
  using Passes = std::vector<std::vector<size_t>>;
  const struct {
    std::vector<LossTerm> terms;
    Passes passes;
  } cases[] = {{{ce, z, kl}, {{0, 1, 2}}},
               {{kl, ce, mixed}, {{0, 1, 2}}},
               {{warm, ce}, {{0, 1}}},
               {{warm}, {{}, {0}}},
               {{warm, half, ce}, {{0, 2}, {1}}},
               {{warm_mixed, ce}, {{1}, {0}}},
               {{warm_mixed, warm, ce}, {{2}, {0, 1}}},
               {{kl, warm, ce}, {{0, 2}, {1}}},
               {{ce, warm, halved}, {{0}, {1, 2}}},
               {{warm, scaled}, {{}, {0}, {1}}},
               {{warm_other, z, warm_top_k, warm}, {{0, 1}, {2}, {3}}},
               {{ce, warm_teacher}, {{0, 1}}},
               {{kl, warm_teacher}, {{0}, {1}}},
               {{scaled, ce, scaled, z}, {{1, 3}, {0, 2}}},
               {{kl, other, ce}, {{0, 2}, {1}}},
               {{kl, top_k, ce}, {{0, 2}, {1}}},
               {{mixed, kl, uneven}, {{0, 1}, {2}}}};
  for (const auto& each : cases) {
    HeadConfig config;
    config.teachers = {{.vocab = 1000}, {.vocab = 1000}, {.kind = TeacherKind::kTopK, .k = 20}};
    for (Teacher& teacher : config.teachers) teacher.dtype = DType::kBF16;
    for (const LossTerm& term : each.terms) {
      config.terms.push_back(term);
      config.terms.back().name += std::to_string(config.terms.size());
    }
    const std::vector<cuda::Pass> passes = cuda::passes_of(config);
    Passes taken;
    int launches = 2;
    for (const cuda::Pass& pass : passes) {
      taken.push_back(pass.terms);
      launches += pass.teacher == 2 ? 3 : 1;
    }
    EXPECT_EQ(taken, each.passes) << config.terms[0].name;
    EXPECT_EQ(passes[0].scale, 1);
    const auto plan = plan_cuda({8, 0, 1000}, config, bf16(), {});
    ASSERT_TRUE(plan.ok()) << plan.status().to_string();
    EXPECT_EQ(plan->launches(), launches) << config.terms[0].name;
    int64_t sum = 0;
    for (const Booking& booking : plan->bookings()) sum += booking.bytes;
    EXPECT_EQ(sum, plan->workspace_bytes());
  }
  // Of a head without terms of its own softmax, rows are only read for their outputs.
  HeadConfig config;
  config.teachers = {{.vocab = 1000, .dtype = DType::kBF16}};
  config.terms = {warm};
  const auto plan = plan_cuda({8, 0, 1000}, config, bf16(), {});
  std::vector<std::byte> workspace(static_cast<size_t>(plan->workspace_bytes()));
  std::vector<float> rows(8);
  Outputs lse;
  lse.lse = {rows.data(), DType::kF32, 8, 1};
  EXPECT_EQ(cuda::open_rows(*plan, {}, {}, workspace.data()).passes.size(), 1u);
  const cuda::OpenRows both = cuda::open_rows(*plan, {}, lse, workspace.data());
  ASSERT_EQ(both.passes.size(), 2u);
  EXPECT_FALSE(both.passes[0].gradient);
  EXPECT_EQ(both.passes[0].params.lse.data, rows.data());
  EXPECT_EQ(both.passes[1].params.lse.data, nullptr);
  EXPECT_EQ(both.passes[1].params.row_log_prob, both.params.row_log_prob + 8);
}

TEST(CudaHeadPlan, GathersAndPatchesTopKIds) {
  HeadConfig config = distillation(32000, Divergence::kForwardKl);
  config.teachers[0] = {.kind = TeacherKind::kTopK, .k = 20};
  const auto plan = plan_cuda({1000, 0, 32000}, config, bf16(), {});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  EXPECT_EQ(plan->launches(), 5);
  int64_t sum = 0;
  for (const Booking& booking : plan->bookings()) sum += booking.bytes;
  EXPECT_EQ(sum, plan->workspace_bytes());
  Request forward = bf16();
  forward.d_logits = false;
  const auto losses = plan_cuda({1000, 0, 32000}, config, forward, {});
  ASSERT_TRUE(losses.ok());
  EXPECT_EQ(losses->launches(), 4);
  EXPECT_LT(losses->workspace_bytes(), plan->workspace_bytes());
  // A bit a column in shared memory.
  const int64_t most = cuda::most_top_k_columns({});
  EXPECT_TRUE(plan_cuda({4, 0, most}, config, bf16(), {}).ok());
  EXPECT_EQ(plan_cuda({4, 0, most + 1}, config, bf16(), {}).status().code(),
            kLossDimensionTooLarge);
  // With a dense teacher beside it.
  config.teachers.push_back({.vocab = 32000, .dtype = DType::kBF16});
  config.terms.push_back(config.terms[0]);
  config.terms[1].name = "dense";
  config.terms[1].teacher = 1;
  const auto both = plan_cuda({1000, 0, 32000}, config, bf16(), {});
  ASSERT_TRUE(both.ok()) << both.status().to_string();
  EXPECT_EQ(both->launches(), 6);
}

TEST(CudaHeadPlan, LayoutsFitAndCoverTheRow) {
  const CudaDevice h200;
  for (int64_t vocab = 1025; vocab < 220'000; vocab += 1 + vocab / 7) {
    for (int each = 0; each < cuda::kFamilies * 8; ++each) {
      const DType dtype = each % 2 == 0 ? DType::kF32 : DType::kBF16;
      const cuda::RowWork work = {.family = static_cast<cuda::Family>(each / 8),
                                  .extras = each / 2 % 2 == 0,
                                  .aligned = each / 4 % 2 == 0};
      std::vector<Rejection> rejections;
      const auto layout = cuda::choose_row_layout(vocab, dtype, work, h200, "", {}, rejections);
      ASSERT_TRUE(layout.ok());
      if (layout->held) continue;
      ASSERT_EQ(layout->kernel, cuda::RowKernel::kCluster) << vocab;
      EXPECT_LE(layout->shared_bytes, h200.shared_per_block_bytes);
      const cuda::RowCut& cut = layout->cut;
      EXPECT_LE(cut.n_strips, cuda::kMaxStrips);
      EXPECT_EQ(cut.n_strips, (cut.in_thirds ? 3 : 1) << cut.log2_strips);
      EXPECT_LE(cut.n_strips, cut.n_rounds);
      EXPECT_LE(cuda::n_sections(cut), cuda::kMaxSections);
      EXPECT_EQ(cuda::n_sections(cut) % layout->cluster, 0);
      EXPECT_EQ(layout->strips_per_block * layout->cluster, cut.n_strips);
      EXPECT_EQ(layout->strips_per_warp * layout->warps, layout->strips_per_block);
      EXPECT_LE(layout->warps, cuda::kMaxColumnWarps);
      EXPECT_EQ(layout->matrix_bytes % 16, 0);
      EXPECT_GE(layout->matrix_bytes * layout->cluster, vocab * size_of(dtype));
    }
  }
}

// What the speeds in bench/NOTES.md rest on: three rows under way, in the smallest cluster.
TEST(CudaHeadPlan, ThreeRowsOfTheUsualVocabulariesAreUnderWay) {
  const struct {
    int64_t vocab;
    cuda::Family family;
    int cluster;
  } cases[] = {
      {32768, cuda::Family::kLabels, 1},         {128256, cuda::Family::kLabels, 4},
      {151936, cuda::Family::kLabels, 4},        {262144, cuda::Family::kLabels, 8},
      {32768, cuda::Family::kEntropy, 1},        {128256, cuda::Family::kEntropy, 4},
      {151936, cuda::Family::kEntropy, 4},       {262144, cuda::Family::kEntropy, 8},
      {32768, cuda::Family::kForward, 2},        {128256, cuda::Family::kForward, 8},
      {151936, cuda::Family::kForward, 8},       {262144, cuda::Family::kForward, 16},
      {128256, cuda::Family::kJensenShannon, 8}, {151936, cuda::Family::kJensenShannon, 8}};
  for (const auto& each : cases) {
    std::vector<Rejection> rejections;
    const auto layout = cuda::choose_row_layout(each.vocab, DType::kBF16, {.family = each.family},
                                                CudaDevice{}, "", {}, rejections);
    ASSERT_TRUE(layout.ok());
    EXPECT_EQ(layout->cluster, each.cluster) << each.vocab;
    EXPECT_EQ(layout->slots, cuda::kSlots) << each.vocab;
    EXPECT_EQ(layout->warps, cuda::kMaxColumnWarps) << each.vocab;
    // Without a gradient: as few blocks a row.
    const auto forward = cuda::choose_row_layout(each.vocab, DType::kBF16,
                                                 {.family = each.family, .gradient = false},
                                                 CudaDevice{}, "", {}, rejections);
    ASSERT_TRUE(forward.ok());
    EXPECT_EQ(forward->cluster, each.cluster) << each.vocab;
    EXPECT_EQ(forward->slots, cuda::kSlots) << each.vocab;
  }
}

// Of a teacher's rows that three blocks hold, and of no others.
TEST(CudaHeadPlan, RowsInThirds) {
  using cuda::Family;
  const struct {
    int64_t vocab;
    DType dtype;
    Family family;
    int cluster;
  } cases[] = {
      {37888, DType::kBF16, Family::kForward, 2},  {37889, DType::kBF16, Family::kForward, 3},
      {50257, DType::kF16, Family::kReverse, 3},   {56832, DType::kBF16, Family::kTempered, 3},
      {56833, DType::kBF16, Family::kTempered, 4}, {28416, DType::kF32, Family::kTempered, 3},
      {28417, DType::kF32, Family::kForward, 4},   {50257, DType::kBF16, Family::kLabels, 2},
      {50257, DType::kBF16, Family::kMixed, 2},    {100352, DType::kBF16, Family::kForward, 8}};
  for (const auto& [vocab, dtype, family, cluster] : cases) {
    for (const bool aligned : {false, true}) {
      std::vector<Rejection> rejections;
      const auto layout = cuda::choose_row_layout(
          vocab, dtype, {.family = family, .aligned = aligned}, CudaDevice{}, "", {}, rejections);
      ASSERT_TRUE(layout.ok());
      EXPECT_EQ(layout->cluster, cluster) << vocab;
      EXPECT_EQ(layout->cut.in_thirds, cluster == 3) << vocab;
      EXPECT_EQ(layout->warps, cuda::kMaxColumnWarps) << vocab;
    }
  }
}

// Three rows of as many warps as there can be: no number of columns falls between strips and
// blocks. (Of eight blocks, two rows, where a row lies in no whole words.)
TEST(CudaHeadPlan, EveryWarpHasAStrip) {
  using cuda::Family;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const auto family : {Family::kLabels, Family::kForward, Family::kTempered}) {
      const int64_t column_bytes = size_of(dtype) * cuda::n_matrices(family);
      for (int64_t eighth = 257; eighth * 8 * column_bytes < 16 * 74 * 1024;
           eighth += 1 + eighth / 200) {
        for (const int64_t vocab : {eighth * 8, eighth * 8 + 1}) {
          const bool whole = vocab % 8 == 0;
          std::vector<Rejection> rejections;
          const auto layout = cuda::choose_row_layout(
              vocab, dtype, {.family = family, .aligned = whole}, CudaDevice{}, "", {}, rejections);
          ASSERT_TRUE(layout.ok());
          if (layout->held) continue;
          EXPECT_EQ(layout->warps * layout->groups, cuda::kMaxColumnWarps) << vocab;
          EXPECT_TRUE(layout->groups == 1 || layout->cluster == 1) << vocab;
          const int least = !whole && layout->cluster == 8 ? 2 : cuda::kSlots;
          EXPECT_GE(layout->slots, least * layout->groups) << vocab;
        }
      }
    }
  }
}

// Two rows in fewer blocks, where no gradient waits for a third.
TEST(CudaHeadPlan, TwoRowsInASmallerCluster) {
  const struct {
    int64_t vocab;
    cuda::Family family;
    bool gradient;
    int cluster, slots;
  } cases[] = {{50257, cuda::Family::kForward, true, 3, 3},
               {50257, cuda::Family::kForward, false, 2, 2},
               {50257, cuda::Family::kLabels, false, 1, 2},
               {24576, cuda::Family::kForward, false, 1, 2},
               {24576, cuda::Family::kJensenShannon, true, 1, 2},
               {50257, cuda::Family::kJensenShannon, true, 2, 2},
               {200064, cuda::Family::kReverse, true, 16, 3},
               {200064, cuda::Family::kReverse, false, 8, 2},
               {200064, cuda::Family::kJensenShannon, true, 8, 2},
               {100352, cuda::Family::kLabels, true, 4, 3},
               {100352, cuda::Family::kLabels, false, 2, 2}};
  for (const auto& each : cases) {
    std::vector<Rejection> rejections;
    const auto layout = cuda::choose_row_layout(each.vocab, DType::kBF16,
                                                {.family = each.family, .gradient = each.gradient},
                                                CudaDevice{}, "", {}, rejections);
    ASSERT_TRUE(layout.ok());
    EXPECT_EQ(layout->cluster, each.cluster) << each.vocab;
    EXPECT_EQ(layout->slots, each.slots) << each.vocab;
  }
  std::vector<Rejection> rejections;
  const auto streamed = cuda::choose_row_layout(
      151936, DType::kF32, {.family = cuda::Family::kReverse, .gradient = false}, CudaDevice{}, "",
      {}, rejections);
  ASSERT_TRUE(streamed.ok());
  EXPECT_EQ(streamed->kernel, cuda::RowKernel::kStreamed);
  ASSERT_EQ(rejections.size(), 1u);
  EXPECT_NE(rejections[0].reason.find("holds two"), std::string::npos) << rejections[0].reason;
}

// What is forced is forced for all that a run may ask for, aligned or not.
TEST(CudaHeadPlan, NothingFallsBackFromAForcedKernel) {
  for (const int64_t vocab : {3, 100, 1000, 1024, 2048, 5000}) {
    std::vector<float> rows(8);
    Inputs inputs;
    std::vector<int64_t> ids(8);
    Outputs nothing, entropy, argmax;
    entropy.entropy = {rows.data(), DType::kF32, 8, 1};
    argmax.argmax = {ids.data(), ids.size()};
    Request request = bf16();
    request.entropy = true;
    for (const char* kernel :
         {"head_rows_sm90_cluster", "head_rows_sm80_streamed", "head_rows_sm80_short"}) {
      if (vocab > 1024 && kernel == std::string("head_rows_sm80_short")) continue;
      const auto plan = plan_cuda({8, 0, vocab}, cross_entropy(), request, {.kernel = kernel});
      ASSERT_TRUE(plan.ok()) << plan.status().to_string();
      std::vector<std::byte> workspace(static_cast<size_t>(plan->workspace_bytes()));
      for (const int shift : {0, 1}) {
        const auto* const base = reinterpret_cast<const std::byte*>(0x1000);
        inputs.logits = {base + 2 * shift, DType::kBF16, 8, vocab, 8 * vocab};
        for (const Outputs* outputs : {&nothing, &entropy, &argmax}) {
          const auto rows_of = cuda::open_rows(*plan, inputs, *outputs, workspace.data());
          ASSERT_EQ(rows_of.passes.size(), 1u);
          const cuda::RowLayout& layout = rows_of.passes[0].launch.layout;
          EXPECT_EQ(cuda::name_of(layout.kernel), kernel) << vocab << " " << shift;
        }
      }
    }
  }
}

// Its own kernels where nothing else of a second pass is asked for and no dense teacher is there;
// rows are cut as without it, so that their losses have the same bits.
TEST(CudaHeadPlan, SumsTheEntropyAloneInTheFirstPass) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (int64_t vocab = 1; vocab < 300'000; vocab += 1 + vocab / 7) {
      const cuda::RowCut labels = cuda::cut_of(vocab, size_of(dtype), cuda::Family::kLabels);
      const cuda::RowCut entropy = cuda::cut_of(vocab, size_of(dtype), cuda::Family::kEntropy);
      EXPECT_EQ(labels.n_strips, entropy.n_strips) << vocab;
      EXPECT_EQ(labels.strips_per_section, entropy.strips_per_section) << vocab;
    }
  }

  constexpr int64_t kRows = 8, kVocab = 32000;
  std::vector<float> rows(kRows);
  std::vector<int64_t> ids(kRows);
  std::vector<PolicyMetrics> metrics(1);
  const VectorView given{rows.data(), DType::kF32, kRows, 1};
  Outputs nothing, entropy, argmax, both, of_policy;
  entropy.entropy = both.entropy = {rows.data(), DType::kF32, kRows, 1};
  argmax.argmax = both.argmax = {ids.data(), ids.size()};
  of_policy.policy_metrics = metrics;
  HeadConfig smoothed = cross_entropy(), policy = cross_entropy();
  smoothed.terms[0].label_smoothing = 0.1;
  policy.terms[0].kind = LossKind::kGrpo;
  HeadConfig top_k = distillation(kVocab, Divergence::kForwardKl);
  top_k.teachers[0] = {.kind = TeacherKind::kTopK, .k = 20};
  const HeadConfig forward = distillation(kVocab, Divergence::kForwardKl);

  Inputs inputs;
  CudaHeadOptions options;
  const auto launch_of = [&](const HeadConfig& config, const Outputs& outputs) {
    Request request = bf16();
    request.entropy = request.policy_metrics = true;
    const auto plan = plan_cuda({kRows, 0, kVocab}, config, request, options);
    EXPECT_TRUE(plan.ok()) << plan.status().to_string();
    inputs.teachers.resize(config.teachers.size());
    std::vector<std::byte> workspace(static_cast<size_t>(plan->workspace_bytes()));
    return cuda::open_rows(*plan, inputs, outputs, workspace.data()).passes.at(0).launch;
  };
  const auto family_of = [&](const HeadConfig& config, const Outputs& outputs) {
    return launch_of(config, outputs).family;
  };
  EXPECT_EQ(family_of(cross_entropy(), nothing), cuda::Family::kLabels);
  EXPECT_EQ(family_of(cross_entropy(), entropy), cuda::Family::kEntropy);
  EXPECT_EQ(family_of(cross_entropy(), argmax), cuda::Family::kLabels);
  EXPECT_EQ(family_of(cross_entropy(), both), cuda::Family::kLabels);
  EXPECT_EQ(family_of(smoothed, entropy), cuda::Family::kLabels);
  EXPECT_EQ(family_of(policy, of_policy), cuda::Family::kEntropy);
  EXPECT_EQ(family_of(top_k, entropy), cuda::Family::kEntropy);
  EXPECT_EQ(family_of(forward, entropy), cuda::Family::kForward);

  const cuda::RowLaunch kept = launch_of(cross_entropy(), entropy);
  EXPECT_EQ(kept.layout.kernel, cuda::RowKernel::kCluster);
  EXPECT_EQ(kept.layout.slots, cuda::kSlots);
  inputs.logits = {rows.data() + 1, DType::kBF16, kRows, kVocab, kVocab};  // in no whole words
  const cuda::RowLaunch shifted = launch_of(cross_entropy(), entropy);
  EXPECT_EQ(shifted.layout.kernel, cuda::RowKernel::kCluster);
  EXPECT_FALSE(shifted.layout.in_whole_words);
  EXPECT_EQ(shifted.family, cuda::Family::kEntropy);
  inputs.logits = {};
  options.device.compute_capability = 80;
  const cuda::RowLaunch ampere = launch_of(cross_entropy(), entropy);
  EXPECT_EQ(ampere.layout.kernel, cuda::RowKernel::kStreamed);
  EXPECT_EQ(ampere.family, cuda::Family::kEntropy);
  inputs.group_entropy = given;  // it is known
  EXPECT_EQ(family_of(cross_entropy(), entropy), cuda::Family::kLabels);
}

TEST(CudaHeadPlan, RefusesWhatItsKernelsDoNotTake) {
  const auto code = [](HeadConfig config, Request request, CudaHeadOptions options = {}) {
    return plan_cuda({8, 0, 1000}, config, request, options).status().code();
  };
  Request request = bf16();
  request.input_dtype = DType::kF64;
  EXPECT_EQ(code(cross_entropy(), request), kHeadBadDtype);
  request = bf16();
  request.grad_dtype = DType::kF32;
  EXPECT_EQ(code(cross_entropy(), request), kHeadBadDtype);
  HeadConfig config = distillation(1000, Divergence::kForwardKl);
  config.teachers[0].dtype = DType::kF32;
  EXPECT_EQ(code(config, bf16()), kHeadBadDtype);
  config = distillation(1000, Divergence::kForwardKl);
  config.teachers[0] = {.kind = TeacherKind::kHidden, .vocab = 1000, .d_model = 8};
  EXPECT_EQ(code(config, bf16()), kHeadUnknownKind);
  EXPECT_EQ(code(cross_entropy(), bf16(), {.kernel = "no_such_kernel"}), kHeadUnknownKernel);
  EXPECT_EQ(
      plan_cuda({8, 64, 1000}, cross_entropy(), {.input_dtype = DType::kBF16}, {}).status().code(),
      kHeadShapeMismatch);
}

}  // namespace
}  // namespace ullage::lossk
