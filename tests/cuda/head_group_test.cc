// Shards of a vocabulary on the device, one process playing all of a group's ranks: against the
// float64 oracle of the whole head, and against each other bit for bit.
#include <gtest/gtest.h>

#include <cmath>

#include "cuda/device_linear_head.h"
#include "cuda/expect_close.h"
#include "cuda/head_bound.h"
#include "reference/error_bound.h"
#include "support/head_shards.h"

namespace ullage::test {
namespace {

constexpr const char* kFused = "linear_head_sm90_scaled_exponentials";
constexpr const char* kChunked = "linear_head_sm80_chunked_products";

using CudaHeadGroup = OnDevice;

std::vector<std::vector<LossTerm>> mixes() {
  std::vector<std::vector<LossTerm>> all = {
      {{}},
      {{.weight = 0.5}, {.kind = LossKind::kZLoss, .weight = 0.1, .mask = RowMask::kNone}},
      {{.kind = LossKind::kZLoss, .mask = RowMask::kOwn}},
      {{.kind = LossKind::kGrpo, .kl_beta = 0.04, .normalizer = PolicyNormalizer::kSequenceMeans}},
      {{.kind = LossKind::kGspo}, {.kind = LossKind::kCispo}},
      {{.kind = LossKind::kDpo, .beta = 0.2}, {.weight = 0.3}},
      {{.label_smoothing = 0.1}, {.weight = 0.5, .label_smoothing = 1}}};
  for (auto& mix : all) {
    for (size_t t = 0; t < mix.size(); ++t) mix[t].name = "term" + std::to_string(t);
  }
  return all;
}

RandomHead draw(Rng& rng, const std::vector<LossTerm>& terms, int64_t n, int64_t d, int64_t v,
                DType dtype, const lossk::HeadOptions& options = {}) {
  RandomHead head = random_head(rng, n, d, v);
  HeadInputs& in = head.inputs;
  head.config.terms = terms;
  head.config.teachers.clear();
  head.config.options = options;
  in.teachers.clear();
  in.class_weights.clear();
  in.upstream = 0.75;
  store_linear_inputs(in, dtype);
  HeadConfig plain = head.config;
  plain.terms = {{.name = "lp"}};
  const std::vector<double> lp = reference::head_losses(plain, in).label_log_prob;
  constexpr double kSteps[] = {-0.6, -0.02, 0.02, 0.6};
  for (int attempt = 0; attempt < 100; ++attempt) {
    for (size_t i = 0; i < lp.size(); ++i) {
      in.old_log_probs[i] = static_cast<float>(lp[i] - kSteps[below(rng, 4)]);
      in.reference_log_probs[i] = static_cast<float>(lp[i] + 0.3 * normal(rng));
    }
    if (distance_to_clip(head.config, in) > 0.08) break;
  }
  return head;
}

struct GroupRun {
  std::vector<HeadResult> results;
  HeadResult whole;
};

// Both phases of every shard. run(config, inputs, statistics) is a shard's; its outcome a result.
template <class Run>
GroupRun run_group(const RandomHead& head, const std::vector<int64_t>& sizes, const Run& run) {
  GroupRun group;
  std::vector<Shard> shards = shards_of(head.config, head.inputs, sizes);
  std::vector<HeadResult> own;
  for (const Shard& s : shards) own.push_back(run(s.config, s.inputs, true));
  if (testing::Test::HasFailure()) return group;
  join(shards, own, [](double value) { return static_cast<double>(static_cast<float>(value)); });
  for (const Shard& s : shards) group.results.push_back(run(s.config, s.inputs, false));
  if (testing::Test::HasFailure()) return group;
  group.whole = assembled(shards, group.results, head.inputs.shape.vocab);
  for (const HeadResult& result : group.results) {
    EXPECT_EQ(result.terms, group.whole.terms);
    EXPECT_EQ(result.total, group.whole.total);
    EXPECT_EQ(result.token_loss, group.whole.token_loss);
    EXPECT_EQ(result.lse, group.whole.lse);
    EXPECT_EQ(result.label_log_prob, group.whole.label_log_prob);
    EXPECT_EQ(result.entropy, group.whole.entropy);
    EXPECT_EQ(result.n_valid, group.whole.n_valid);
  }
  return group;
}

template <class DeviceOutcome>
HeadResult taken(const DeviceOutcome& outcome) {
  EXPECT_TRUE(outcome.planned.ok()) << outcome.planned.to_string();
  EXPECT_TRUE(outcome.ran.ok()) << outcome.ran.to_string();
  EXPECT_TRUE(outcome.checked.ok()) << outcome.checked.to_string();
  HeadResult result;
  result.terms = outcome.terms;
  result.total = outcome.total.empty() ? 0 : outcome.total[0];
  result.n_valid = outcome.n_valid;
  result.token_loss = outcome.token_loss;
  result.lse = outcome.lse;
  result.label_log_prob = outcome.label_log_prob;
  result.shift = outcome.shift;
  result.log_sum = outcome.log_sum;
  result.distance = outcome.distance;
  result.entropy = outcome.entropy;
  return result;
}

GroupRun run_logits(const RandomHead& head, const std::vector<int64_t>& sizes,
                    DeviceOptions options) {
  return run_group(head, sizes,
                   [&](const HeadConfig& config, const HeadInputs& in, bool statistics) {
                     options.statistics = statistics;
                     const DeviceResult outcome = run_on_device(config, in, options);
                     HeadResult result = taken(outcome);
                     result.d_logits = outcome.gradient;
                     return result;
                   });
}

GroupRun run_hidden(const RandomHead& head, const std::vector<int64_t>& sizes,
                    LinearOptions options, std::string* mode = nullptr) {
  return run_group(head, sizes,
                   [&](const HeadConfig& config, const HeadInputs& in, bool statistics) {
                     options.statistics = statistics;
                     const LinearResult outcome = run_linear(config, in, options);
                     if (mode) *mode = outcome.mode;
                     HeadResult result = taken(outcome);
                     result.d_hidden = outcome.d_hidden;
                     result.d_weight = outcome.d_weight;
                     result.d_bias = outcome.d_bias;
                     result.d_adapter_a = outcome.d_adapter_a;
                     result.d_adapter_b = outcome.d_adapter_b;
                     return result;
                   });
}

// Twice the bound of the whole head's kernel: the exchange and the group's place round eight
// numbers more than it does, none above those that its bound counts two and three times.
void expect_logits(const RandomHead& head, const std::vector<int64_t>& sizes,
                   const DeviceOptions& options, const std::string& where) {
  const GroupRun run = run_logits(head, sizes, options);
  if (testing::Test::HasFailure()) return;
  const HeadResult right = reference::head_losses(head.config, head.inputs);
  HeadBound bound(head.config, head.inputs, options.dtype);
  bound.compute(right, 0);
  const auto check = [&](const char* what, const std::vector<double>& is,
                         const std::vector<double>& expected, const std::vector<double>& off) {
    expect_close(what, is, expected, [&](size_t i) { return 2 * off[i]; }, where);
  };
  check("terms", run.whole.terms, right.terms, bound.terms);
  check("token_loss", run.whole.token_loss, right.token_loss, bound.token_loss);
  check("lse", run.whole.lse, right.lse, bound.lse);
  check("log_prob", run.whole.label_log_prob, right.label_log_prob, bound.label_log_prob);
  check("entropy", run.whole.entropy, right.entropy, bound.entropy);
  check("gradient", run.whole.d_logits, right.d_logits, bound.gradient);
}

TEST_F(CudaHeadGroup, FromLogitsWithinTheWholeHeadsBounds) {
  for (const char* kernel : {"head_rows_sm90_cluster", "head_rows_sm80_streamed"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      int round = 0;
      for (const auto& mix : mixes()) {
        const lossk::HeadOptions scaled = {.logits_scale = 0.8, .softcap = 6};
        RandomHead head =
            draw(rng, mix, 9, 0, 1500, dtype, round++ % 2 ? scaled : lossk::HeadOptions{});
        const std::string where = std::string(kernel) + " " + std::string(name_of(dtype)) +
                                  " mix " + std::to_string(round);
        expect_logits(head, {600, 1, 899}, {.dtype = dtype, .kernel = kernel}, where);
        expect_logits(head, {1100, 400}, {.dtype = dtype, .kernel = kernel, .in_place = true},
                      where);
        if (HasFailure()) return;
      }
    }
  }
  const RandomHead large = draw(rng, mixes()[1], 5, 0, 100003, DType::kBF16);
  expect_logits(large, {50000, 50003}, {.dtype = DType::kBF16}, "100003 columns");
}

// R19 and R11: an offset costs nothing; a shard of banned columns alone has no part; a banned label
// is an honest infinity.
TEST_F(CudaHeadGroup, OffsetsAndShardsWithoutMass) {
  RandomHead head = draw(rng, mixes()[0], 8, 0, 700, DType::kF32);
  for (double& z : head.inputs.logits) z = std::round(z * 64) / 64;
  const GroupRun plain = run_logits(head, {300, 400}, {});
  RandomHead far = head;
  for (double& z : far.inputs.logits) z += 0x1p14;
  const GroupRun moved = run_logits(far, {300, 400}, {});
  for (size_t i = 0; i < plain.whole.token_loss.size(); ++i) {
    EXPECT_NEAR(moved.whole.token_loss[i], plain.whole.token_loss[i], 4e-6);
  }
  for (size_t i = 0; i < plain.whole.d_logits.size(); ++i) {
    EXPECT_NEAR(moved.whole.d_logits[i], plain.whole.d_logits[i],
                1e-7 + 4e-6 * std::abs(plain.whole.d_logits[i]));
  }
  for (int64_t i = 0; i < 8; ++i) {
    for (int64_t j = 300; j < 700; ++j) head.inputs.logits[i * 700 + j] = -INFINITY;
    if (head.inputs.labels[i] >= 0) head.inputs.labels[i] = i;
  }
  head.inputs.labels[6] = 699;
  const GroupRun banned = run_logits(head, {300, 400}, {});
  const HeadResult right = reference::head_losses(head.config, head.inputs);
  for (size_t i = 0; i < 8; ++i) {
    if (i == 6) {
      EXPECT_EQ(banned.whole.token_loss[i], INFINITY);
    } else {
      EXPECT_NEAR(banned.whole.token_loss[i], right.token_loss[i], 4e-6);
    }
  }
  for (int64_t j = 300; j < 700; ++j) EXPECT_EQ(banned.whole.d_logits[j], 0);
}

// The oracle's bounds, with logits and their gradient in the storage type between the products
// (the fused head has the exponentials in it, and once more the hidden rows: as much). What rows
// report is float32 throughout in the fused head; there thrice the bound of float32 alone: the
// tensor core truncates, and see expect_logits.
void expect_hidden(const RandomHead& head, const std::vector<int64_t>& sizes,
                   const LinearOptions& options, const std::string& where) {
  std::string mode;
  const GroupRun run = run_hidden(head, sizes, options, &mode);
  if (testing::Test::HasFailure()) {
    ADD_FAILURE() << where;
    return;
  }
  const HeadResult& is = run.whole;
  const HeadResult right = reference::head_losses(head.config, head.inputs);
  const bool fused = options.kernel == kFused;
  const reference::HeadErrorBounds stored =
      reference::head_error_bounds(head.config, head.inputs, right, DType::kF32, options.dtype);
  const reference::HeadErrorBounds plain =
      reference::head_error_bounds(head.config, head.inputs, right, DType::kF32);
  const auto rows = [&](const char* what, const std::vector<double>& found,
                        const std::vector<double>& expected, const std::vector<double>& narrow,
                        const std::vector<double>& wide) {
    expect_close(
        what, found, expected,
        [&](size_t i) {
          return (fused ? 3 * narrow[i] : 2 * wide[i]) + 0x1p-22 * std::abs(expected[i]);
        },
        where);
  };
  rows("lse", is.lse, right.lse, plain.lse, stored.lse);
  rows("log_prob", is.label_log_prob, right.label_log_prob, plain.label_log_prob,
       stored.label_log_prob);
  rows("token_loss", is.token_loss, right.token_loss, plain.token_loss, stored.token_loss);
  if (!fused) rows("entropy", is.entropy, right.entropy, plain.entropy, stored.entropy);
  const auto gradient = [&](const char* what, std::vector<double> HeadResult::* field,
                            const std::vector<double>& bound, DType dtype) {
    expect_close(
        what, is.*field, right.*field,
        [&](size_t i) {
          double largest = std::abs((right.*field)[i]) + bound[i];
          for (const HeadResult& part : run.results) {
            if (i < (part.*field).size()) {
              largest = std::max(largest, std::abs((part.*field)[i]));
            }
          }
          const auto parts = static_cast<double>(sizes.size());
          return 2 * bound[i] + parts * reference::rounding_error(dtype, largest) + 1e-30;
        },
        where);
  };
  gradient("d_hidden", &HeadResult::d_hidden, stored.d_hidden, options.dtype);
  gradient("d_weight", &HeadResult::d_weight, stored.d_weight, options.d_weight_dtype);
  if (head.config.options.bias) {
    gradient("d_bias", &HeadResult::d_bias, stored.d_bias, options.d_weight_dtype);
  }
  if (head.config.options.adapter_rank > 0) {
    gradient("d_adapter_a", &HeadResult::d_adapter_a, stored.d_adapter_a, options.d_weight_dtype);
    gradient("d_adapter_b", &HeadResult::d_adapter_b, stored.d_adapter_b, options.d_weight_dtype);
  }
}

TEST_F(CudaHeadGroup, ChunkedProductsWithinTheWholeHeadsBounds) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    int round = 0;
    for (const auto& mix : mixes()) {
      const bool more = round++ % 2 == 1;
      lossk::HeadOptions options;
      if (more) options = {.softcap = 8, .bias = true, .adapter_rank = 2, .adapter_scale = 0.5};
      const RandomHead head = draw(rng, mix, 20, 24, 420, dtype, options);
      expect_hidden(head, {200, 28, 192}, {.dtype = dtype, .chunk = 8, .kernel = kChunked},
                    "chunked " + std::string(name_of(dtype)) + " mix " + std::to_string(round));
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaHeadGroup, ScaledExponentialsWithinTheWholeHeadsBounds) {
  int major = 0;
  expect_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
  if (major != 9) GTEST_SKIP() << "the fused head needs Hopper";
  int round = 0;
  for (const auto& mix : mixes()) {
    if (mix[0].label_smoothing > 0) continue;
    const RandomHead head =
        draw(rng, mix, 70, 64, 501, DType::kBF16, {.logits_scale = round++ % 2 ? 0.75 : 1});
    const std::string where = "fused mix " + std::to_string(round);
    expect_hidden(head, {300, 8, 193}, {.kernel = kFused}, where);
    expect_hidden(head, {250, 251}, {.d_weight_dtype = DType::kBF16, .kernel = kFused}, where);
    if (HasFailure()) return;
  }
  const RandomHead chunks = draw(rng, mixes()[4], 300, 72, 410, DType::kBF16);
  expect_hidden(chunks, {210, 200}, {.chunk = 256, .kernel = kFused}, "fused, two chunks");
  const RandomHead half = draw(rng, mixes()[1], 70, 64, 410, DType::kF16);
  expect_hidden(half, {210, 200}, {.dtype = DType::kF16, .kernel = kFused}, "fused, f16");
  const RandomHead strips = draw(rng, mixes()[1], 40, 64, 3000, DType::kBF16);
  const LinearOptions narrow = {
      .d_weight_dtype = DType::kBF16, .budget_bytes = 700000, .kernel = kFused};
  expect_hidden(strips, {1700, 1300}, narrow, "fused, strips");

  // Rows whose exponentials are relative to a shift, in one shard, in the other, in both.
  for (const int where : {0, 1, 2}) {
    RandomHead shifted = draw(rng, mixes()[0], 24, 64, 900, DType::kBF16);
    for (int64_t i = 0; i < 24; ++i) shifted.inputs.hidden[i * 64] = 1;
    for (int64_t j = 0; j < 900; ++j) {
      const bool far = j % 90 == 17 && (where == 2 || (j >= 450) == (where == 1));
      shifted.inputs.weight[j * 64] = far ? 150 : 0;
    }
    for (int64_t i = 0; i < 24; i += 2) shifted.inputs.labels[i] = 17 + 90 * (i % 10);
    expect_hidden(shifted, {450, 450}, {.kernel = kFused},
                  "fused, shifted " + std::to_string(where));
  }
}

TEST_F(CudaHeadGroup, ALabelOutsideTheGroupIsReported) {
  RandomHead head = draw(rng, mixes()[0], 4, 0, 30, DType::kF32);
  std::vector<Shard> shards = shards_of(head.config, head.inputs, {10, 20});
  shards[1].inputs.labels = {29, 0, -1, 30};
  const DeviceResult result =
      run_on_device(shards[1].config, shards[1].inputs, {.statistics = true});
  EXPECT_EQ(result.checked.code(), kLossTargetOutOfRange);
  EXPECT_NE(result.checked.message().find("labels[3]"), std::string::npos);
  EXPECT_NE(result.checked.message().find("0 to 29"), std::string::npos);
  EXPECT_TRUE(std::isfinite(result.label_log_prob[0]));
  EXPECT_EQ(result.label_log_prob[1], -INFINITY);
  EXPECT_EQ(result.label_log_prob[2], 0);
  const DeviceResult alone = run_on_device(shards[0].config, shards[0].inputs, {});
  EXPECT_EQ(alone.ran.code(), kGroupStatistics);
}

}  // namespace
}  // namespace ullage::test
