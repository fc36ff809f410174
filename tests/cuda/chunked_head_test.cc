// The chunked products on the device: against the logits door bit for bit where products are exact,
// against the float64 oracle within derived bounds, and against themselves.
#include <gtest/gtest.h>

#include <cmath>

#include "contract/head_validate.h"
#include "cuda/device_linear_head.h"
#include "cuda/expect_close.h"
#include "cuda/head_logits/passes.h"
#include "reference/error_bound.h"

namespace ullage::test {
namespace {

constexpr DType kTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

std::string where_of(const RandomHead& head, const LinearOptions& options) {
  std::string text;
  for (const LossTerm& term : head.config.terms) text += term.name + " ";
  const auto [n, d, v] = head.inputs.shape;
  return text + std::string(name_of(options.dtype)) + " " + std::to_string(n) + " x " +
         std::to_string(d) + " x " + std::to_string(v) + ", chunk " + std::to_string(options.chunk);
}

// Ratios on both sides of the clip bounds and none so near one that a 16-bit logit could cross it.
void move_policy(const HeadConfig& config, HeadInputs& in, Rng& rng) {
  HeadConfig plain = config;
  plain.terms = {{.name = "lp"}};
  const std::vector<double> lp = reference::head_losses(plain, in).label_log_prob;
  constexpr double kSteps[] = {-0.6, -0.02, 0.02, 0.6};
  for (int attempt = 0; attempt < 100; ++attempt) {
    for (size_t i = 0; i < lp.size(); ++i) {
      in.old_log_probs[i] = static_cast<float>(lp[i] - kSteps[below(rng, 4)]);
      in.reference_log_probs[i] = static_cast<float>(lp[i] + 0.3 * normal(rng));
    }
    if (distance_to_clip(config, in) > 0.08) return;
  }
}

RandomHead draw(Rng& rng, const std::vector<LossTerm>& terms, int64_t n, int64_t d, int64_t v,
                DType dtype) {
  RandomHead head = random_head(rng, n, d, v);
  HeadInputs& in = head.inputs;
  head.config.terms = terms;
  in.n_segments = std::min<int64_t>(in.n_segments, n);
  in.upstream = 0.75;
  for (double& x : in.weight) x /= 2;
  store_linear_inputs(in, dtype);
  if (n < 4) in.pairs.clear();  // four segments are needed
  const bool clips = std::any_of(terms.begin(), terms.end(),
                                 [](const LossTerm& term) { return lossk::is_policy(term.kind); });
  if (clips && n > 0) move_policy(head.config, in, rng);
  return head;
}

void with_bias_and_adapter(RandomHead& head) {
  head.config.options.bias = true;
  head.config.options.adapter_rank = 2;
  head.config.options.adapter_scale = 0.5;
}

std::vector<LossTerm> mix(const std::vector<std::string>& names) {
  std::vector<LossTerm> terms;
  for (const std::string& name : names) {
    for (LossTerm term : term_variants()) {
      if (term.name != name) continue;
      if (name.starts_with("kd_hidden")) term.logits_scale = 1;
      term.weight = 0.5 + 0.25 * static_cast<double>(terms.size());
      terms.push_back(term);
    }
  }
  return terms;
}

const std::vector<std::vector<std::string>> kMixes = {
    {"ce", "z", "grpo_0"},
    {"ce_smoothed", "gspo_0", "cispo", "z_every", "dpo"},
    {"kd_hidden_ce", "kd_hidden_fkl", "ce", "z"},
    {"kd_hidden_rkl", "ce"},
    {"kd_hidden_jsd", "z"},
    {"kd_jsd", "kd_ce", "kd_fkl", "kd_rkl", "ce_smoothed", "grpo_2"},
    {"kd_tempered_fkl", "ce"},
    {"kd_hidden_jsd", "kd_jsd", "ce_scaled", "gspo_0", "z_own"}};

bool ran(const LinearResult& result, const std::string& where) {
  for (const Status& status : {result.planned, result.ran, result.checked}) {
    EXPECT_TRUE(status.ok()) << where << ": " << status.to_string();
    if (!status.ok()) return false;
  }
  EXPECT_TRUE(result.workspace_kept) << where;
  return true;
}

void expect_oracle(const RandomHead& head, const LinearOptions& options) {
  const std::string where = where_of(head, options);
  const HeadInputs& in = head.inputs;
  const LinearResult actual = run_linear(head.config, in, options);
  if (!ran(actual, where)) return;
  const HeadResult expected = reference::head_losses(head.config, in);
  const int64_t parts = lossk::cuda::n_gradients(lossk::cuda::passes_of(head.config));
  const reference::HeadErrorBounds bounds =
      reference::head_error_bounds(head.config, in, expected, DType::kF32, options.dtype, parts);
  EXPECT_EQ(actual.n_valid, expected.n_valid) << where;
  const auto losses = [&](const char* what, const std::vector<double>& is,
                          const std::vector<double>& right, const std::vector<double>& bound) {
    // Row outputs are stored in f32.
    expect_close(
        what, is, right,
        [&](size_t i) { return bound[i] + 0x1p-23 * std::abs(right[i]) + 0x1p-60; }, where);
  };
  losses("terms", actual.terms, expected.terms, bounds.terms);
  losses("total", actual.total, {expected.total}, {bounds.total});
  losses("token_loss", actual.token_loss, expected.token_loss, bounds.token_loss);
  losses("lse", actual.lse, expected.lse, bounds.lse);
  losses("label_log_prob", actual.label_log_prob, expected.label_log_prob, bounds.label_log_prob);
  losses("entropy", actual.entropy, expected.entropy, bounds.entropy);

  const double before = options.accumulate ? 0.5 : 0;
  // An f16 gradient is stored with a largest factor of 1 to 2, in steps of 2^-24 or more, once a
  // part.
  double largest = 0;
  for (const double weight : in.weight) largest = std::max(largest, std::abs(weight));
  for (const double x : in.hidden) largest = std::max(largest, std::abs(x));
  const double step = options.dtype == DType::kF16
                          ? 0x1p-23 * largest * static_cast<double>(in.shape.vocab * parts)
                          : 0;
  const auto gradient = [&](const char* what, const std::vector<double>& is,
                            std::vector<double> right, const std::vector<double>& bound,
                            DType dtype) {
    if (is.empty()) return;
    for (double& g : right) g += before;
    expect_close(
        what, is, right,
        [&](size_t i) {
          return bound[i] + step + reference::rounding_error(dtype, std::abs(right[i]) + bound[i]) +
                 0x1p-24 * before * static_cast<double>(in.shape.n_tok + 4) + 0x1p-120;
        },
        where);
  };
  const DType hidden =
      options.d_hidden_dtype == DType::kF64 ? options.dtype : options.d_hidden_dtype;
  const DType sums = options.d_weight_dtype;
  gradient("d_hidden", actual.d_hidden, expected.d_hidden, bounds.d_hidden, hidden);
  gradient("d_weight", actual.d_weight, expected.d_weight, bounds.d_weight, sums);
  gradient("d_bias", actual.d_bias, expected.d_bias, bounds.d_bias, sums);
  gradient("d_adapter_a", actual.d_adapter_a, expected.d_adapter_a, bounds.d_adapter_a, sums);
  gradient("d_adapter_b", actual.d_adapter_b, expected.d_adapter_b, bounds.d_adapter_b, sums);
}

void expect_same_rows(const LinearResult& a, const LinearResult& b, const std::string& where) {
  EXPECT_EQ(a.terms, b.terms) << where;
  EXPECT_EQ(a.total, b.total) << where;
  EXPECT_EQ(a.token_loss, b.token_loss) << where;
  EXPECT_EQ(a.lse, b.lse) << where;
  EXPECT_EQ(a.label_log_prob, b.label_log_prob) << where;
  EXPECT_EQ(a.entropy, b.entropy) << where;
  EXPECT_EQ(a.argmax, b.argmax) << where;
  EXPECT_EQ(a.d_hidden, b.d_hidden) << where;
  EXPECT_EQ(a.d_bias, b.d_bias) << where;
}

using CudaChunkedHead = OnDevice;

TEST_F(CudaChunkedHead, EveryTermAgreesWithTheOracle) {
  int taken = 0;
  for (const LossTerm& term : term_variants()) {
    for (const DType dtype : kTypes) {
      RandomHead head = draw(rng, {term}, 33, 24, 3 + below(rng, 300), dtype);
      const LinearOptions options = {.dtype = dtype, .chunk = taken % 2 == 0 ? 16 : 0};
      ++taken;
      expect_oracle(head, options);
      if (HasFailure()) return;
    }
  }
  EXPECT_EQ(taken, static_cast<int>(3 * term_variants().size()));
}

TEST_F(CudaChunkedHead, MixesWithEveryOption) {
  for (size_t m = 0; m < kMixes.size(); ++m) {
    for (const DType dtype : kTypes) {
      RandomHead head = draw(rng, mix(kMixes[m]), 70, 64, 501, dtype);
      with_bias_and_adapter(head);
      if (m % 2 == 0) head.config.options.softcap = 5;
      head.config.options.logits_scale = 0.8;
      move_policy(head.config, head.inputs, rng);
      expect_oracle(head, {.dtype = dtype, .chunk = 24});
      expect_oracle(head, {.dtype = dtype, .d_hidden_dtype = DType::kF32, .d_weight_dtype = dtype});
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaChunkedHead, OddShapes) {
  const std::vector<LossTerm> terms = mix({"ce_smoothed", "z", "kd_hidden_fkl"});
  for (const DType dtype : kTypes) {
    for (const int64_t n : {1, 7, 257}) {
      for (const int64_t d : {1, 3, 8, 100, 576}) {
        expect_oracle(draw(rng, terms, n, d, 1 + below(rng, 700), dtype), {.dtype = dtype});
      }
    }
    expect_oracle(draw(rng, terms, 7, 576, 8003, dtype), {.dtype = dtype});
    expect_oracle(draw(rng, terms, 5, 40, 50257, dtype), {.dtype = dtype});
    expect_oracle(draw(rng, terms, 5, 64, 1, dtype), {.dtype = dtype});
    if (HasFailure()) return;
  }
}

TEST_F(CudaChunkedHead, AccumulatesAndRoundsOnce) {
  for (const DType dtype : kTypes) {
    for (const DType sums : {DType::kF32, dtype}) {
      for (const int64_t chunk : {0, 128}) {
        for (const bool accumulate : {false, true}) {
          RandomHead head = draw(rng, mix({"ce"}), 300, 64, 301, dtype);
          if (chunk == 0) with_bias_and_adapter(head);
          expect_oracle(
              head,
              {.dtype = dtype, .d_weight_dtype = sums, .chunk = chunk, .accumulate = accumulate});
          if (HasFailure()) return;
        }
      }
    }
  }
  const RandomHead head = draw(rng, mix({"ce"}), 60, 64, 301, DType::kBF16);
  expect_oracle(head, {.d_weight = false});
  expect_oracle(head, {.d_hidden = false});
  expect_oracle(head, {.d_hidden = false, .d_weight = false});
}

// Small integers make every product exact, in any order and in bf16: what is left is what the
// logits door does with the same logits, bit for bit, and gradients of the logit gradient that it
// stores.
TEST_F(CudaChunkedHead, IntegersGiveTheBitsOfTheLogitsDoor) {
  for (size_t m = 0; m < kMixes.size(); ++m) {
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      constexpr int64_t kRows = 90, kWidth = 48, kVocab = 1003, kRank = 2, kTeacherWidth = 3;
      RandomHead head = draw(rng, mix(kMixes[m]), kRows, kWidth, kVocab, dtype);
      head.config.options = {.logits_scale = 0.25, .bias = true, .adapter_rank = kRank};
      HeadInputs& in = head.inputs;
      const auto integers = [&](std::vector<double>& values, int64_t most) {
        for (double& x : values) x = static_cast<double>(below(rng, 2 * most + 1) - most);
      };
      integers(in.hidden, 1);
      integers(in.weight, 2);
      integers(in.bias, 3);
      integers(in.adapter_a, 1);
      integers(in.adapter_b, 1);
      for (size_t i = 0; i < in.adapter_a.size(); ++i) in.adapter_a[i] *= i % 8 == 0;
      integers(in.teachers[1].hidden, 4);
      integers(in.teachers[1].weight, 4);
      for (double& x : in.teachers[0].logits) x = std::round(x);
      move_policy(head.config, in, rng);

      RandomHead logits = head;
      logits.config.options = {.logits_scale = 0.25};
      logits.inputs.shape.d_model = 0;
      const auto product = [](const std::vector<double>& a, const std::vector<double>& b, int64_t i,
                              int64_t j, int64_t width) {
        double sum = 0;
        for (int64_t k = 0; k < width; ++k) sum += a[i * width + k] * b[j * width + k];
        return sum;
      };
      std::vector<double> xa(kRows * kRank);
      logits.inputs.logits.resize(kRows * kVocab);
      auto& teacher_logits = logits.inputs.teachers[1].logits;
      teacher_logits.resize(kRows * kVocab);
      for (int64_t i = 0; i < kRows; ++i) {
        for (int64_t r = 0; r < kRank; ++r) {
          xa[i * kRank + r] = product(in.hidden, in.adapter_a, i, r, kWidth);
        }
        for (int64_t j = 0; j < kVocab; ++j) {
          const double z = product(in.hidden, in.weight, i, j, kWidth) + in.bias[j] +
                           product(xa, in.adapter_b, i, j, kRank);
          ASSERT_LE(std::abs(z), 256);
          logits.inputs.logits[i * kVocab + j] = z;
          teacher_logits[i * kVocab + j] =
              product(in.teachers[1].hidden, in.teachers[1].weight, i, j, kTeacherWidth);
        }
      }
      logits.config.teachers[1] = {.kind = lossk::TeacherKind::kLogits, .vocab = kVocab};
      const DeviceResult door = run_on_device(logits.config, logits.inputs, {.dtype = dtype});
      ASSERT_TRUE(door.checked.ok()) << door.planned.to_string() << door.checked.to_string();

      for (const int64_t chunk : {0, 40}) {
        const LinearOptions options = {
            .dtype = dtype, .d_hidden_dtype = DType::kF32, .chunk = chunk};
        const std::string where = where_of(head, options);
        const LinearResult is = run_linear(head.config, in, options);
        ASSERT_TRUE(ran(is, where));
        EXPECT_EQ(is.terms, door.terms) << where;
        EXPECT_EQ(is.total, door.total) << where;
        EXPECT_EQ(is.token_loss, door.token_loss) << where;
        EXPECT_EQ(is.lse, door.lse) << where;
        EXPECT_EQ(is.label_log_prob, door.label_log_prob) << where;
        EXPECT_EQ(is.entropy, door.entropy) << where;
        EXPECT_EQ(is.argmax, door.argmax) << where;
        EXPECT_EQ(is.correct, door.correct) << where;
        for (size_t t = 0; t < head.config.terms.size(); ++t) {
          const LossKind kind = head.config.terms[t].kind;
          if (kind != LossKind::kGrpo && kind != LossKind::kGspo) continue;
          EXPECT_EQ(std::memcmp(&is.policy_metrics[t], &door.policy_metrics[t],
                                sizeof(lossk::PolicyMetrics)),
                    0)
              << where;
        }
        // d_weight and d_bias: sums over rows of exact products, in f32.
        const double unit = 0x1p-23 * (kRows + 4);
        std::vector<double> d_weight(kVocab * kWidth, 0), weight_size = d_weight, d_bias(kVocab, 0),
                                                          bias_size = d_bias;
        for (int64_t i = 0; i < kRows; ++i) {
          for (int64_t j = 0; j < kVocab; ++j) {
            const double g = door.gradient[i * kVocab + j];
            d_bias[j] += g;
            bias_size[j] += std::abs(g);
            for (int64_t k = 0; k < kWidth; ++k) {
              const double x = in.hidden[i * kWidth + k];
              d_weight[j * kWidth + k] += g * x;
              weight_size[j * kWidth + k] += std::abs(g * x);
            }
          }
        }
        expect_close(
            "d_weight", is.d_weight, d_weight,
            [&](size_t i) { return unit * weight_size[i] + 0x1p-120; }, where);
        expect_close(
            "d_bias", is.d_bias, d_bias, [&](size_t i) { return unit * bias_size[i] + 0x1p-120; },
            where);
      }
      if (HasFailure()) return;
    }
  }
}

TEST_F(CudaChunkedHead, TheSameBitsForEveryChunkRunAndGraph) {
  struct Size {
    int64_t n, d, v;
  };
  for (const Size& size : {Size{1100, 128, 1503}, Size{300, 576, 8003}, Size{300, 100, 257}}) {
    for (const DType dtype : kTypes) {
      for (const size_t m : {1u, 2u, 6u}) {
        RandomHead head = draw(rng, {}, size.n, size.d, size.v, dtype);
        head.config.terms = mix(kMixes[m]);
        // Near the log-probabilities themselves: e^(reference - lp) stays in f16's range.
        head.inputs.old_log_probs.assign(static_cast<size_t>(size.n), -7.5);
        head.inputs.reference_log_probs.assign(static_cast<size_t>(size.n), -7.5);
        if (m == 1) with_bias_and_adapter(head);
        if (m == 1) head.config.options.softcap = 8;
        const LinearResult whole =
            run_linear(head.config, head.inputs, {.dtype = dtype, .chunk = size.n});
        ASSERT_TRUE(ran(whole, where_of(head, {.dtype = dtype})));
        ASSERT_EQ(whole.n_chunks, 1);
        for (const int64_t chunk : {8, 64, 136, 256, 512}) {
          const LinearOptions options = {.dtype = dtype, .chunk = chunk};
          const LinearResult part = run_linear(head.config, head.inputs, options);
          ASSERT_TRUE(ran(part, where_of(head, options)));
          EXPECT_EQ(part.mode, m == 1 && chunk < size.n ? "chunk_two_pass" : "chunk");
          expect_same_rows(whole, part, where_of(head, options));
        }
        const LinearOptions again = {.dtype = dtype, .chunk = 256, .capture = true};
        const LinearResult a = run_linear(head.config, head.inputs, {.dtype = dtype, .chunk = 256});
        const LinearResult b = run_linear(head.config, head.inputs, again);
        expect_same_rows(a, b, "graph");
        EXPECT_EQ(a.d_weight, b.d_weight);
        EXPECT_EQ(a.d_adapter_a, b.d_adapter_a);
        EXPECT_EQ(a.d_adapter_b, b.d_adapter_b);
        if (HasFailure()) return;
      }
    }
  }
}

// A row's bits do not depend on its neighbours, nor on their number.
TEST_F(CudaChunkedHead, TheSameBitsInEveryBatch) {
  for (const DType dtype : kTypes) {
    RandomHead head = draw(rng, {{.name = "ce", .divisor = 7}}, 1500, 256, 3001, dtype);
    const LinearResult all = run_linear(head.config, head.inputs, {.dtype = dtype});
    ASSERT_TRUE(ran(all, "all"));
    for (const auto& [first, rows] : {std::pair{int64_t{0}, int64_t{1}}, {129, 1}, {640, 7}}) {
      HeadInputs in = head.inputs;
      in.shape.n_tok = rows;
      const auto cut = [&](auto& values, int64_t width) {
        values = {values.begin() + first * width, values.begin() + (first + rows) * width};
      };
      cut(in.hidden, 256);
      cut(in.labels, 1);
      cut(in.token_weights, 1);
      for (auto* unused : {&in.advantages, &in.old_log_probs, &in.reference_log_probs}) {
        unused->clear();
      }
      in.segments.clear();
      in.pairs.clear();
      in.mask.clear();
      in.n_segments = 0;
      const LinearResult few = run_linear(head.config, in, {.dtype = dtype});
      ASSERT_TRUE(ran(few, "few"));
      EXPECT_TRUE(std::equal(few.lse.begin(), few.lse.end(), all.lse.begin() + first));
      EXPECT_TRUE(
          std::equal(few.token_loss.begin(), few.token_loss.end(), all.token_loss.begin() + first));
      EXPECT_TRUE(
          std::equal(few.d_hidden.begin(), few.d_hidden.end(), all.d_hidden.begin() + first * 256));
    }
  }
}

// Nor where a sequence's slopes are waited for, with all logits kept or made again.
TEST_F(CudaChunkedHead, IgnoredRowsAreNeverHeard) {
  const struct {
    std::vector<std::string> names;
    int64_t chunk;
  } cases[] = {{{"ce", "z"}, 40}, {{"ce", "gspo_0"}, 40}, {{"ce", "gspo_0"}, 0}};
  for (int c = 0; c < 9; ++c) {
    const DType dtype = kTypes[c % 3];
    const auto& [names, chunk] = cases[c / 3];
    RandomHead head = draw(rng, mix(names), 100, 64, 700, dtype);
    head.config.terms.push_back({.name = "kd", .kind = LossKind::kDistillation, .teacher = 1});
    with_bias_and_adapter(head);
    HeadInputs& in = head.inputs;
    const LinearOptions options = {.dtype = dtype, .chunk = chunk};
    const LinearResult clean = run_linear(head.config, in, options);
    for (int64_t i = 0; i < 100; ++i) {
      if (in.labels[i] >= 0) continue;
      for (int64_t k = 0; k < 64; ++k) in.hidden[i * 64 + k] = k % 2 ? NAN : INFINITY;
      for (int64_t k = 0; k < 3; ++k) in.teachers[1].hidden[i * 3 + k] = NAN;
    }
    const LinearResult poisoned = run_linear(head.config, in, options);
    ASSERT_TRUE(ran(poisoned, "poisoned"));
    expect_same_rows(clean, poisoned, "poisoned");
    EXPECT_EQ(clean.d_weight, poisoned.d_weight);
    EXPECT_EQ(clean.d_adapter_a, poisoned.d_adapter_a);
    EXPECT_EQ(clean.d_adapter_b, poisoned.d_adapter_b);
    for (int64_t i = 0; i < 100; ++i) {
      for (int64_t k = 0; k < 64 && in.labels[i] < 0; ++k) {
        ASSERT_EQ(poisoned.d_hidden[i * 64 + k], 0);
      }
    }
  }
}

// A mean over many rows in f16: a gradient of 2^-16 / 8192 a column would be 0 unscaled.
TEST_F(CudaChunkedHead, SmallF16GradientsSurvive) {
  constexpr int64_t kRows = 8192, kWidth = 64, kVocab = 32768;
  HeadInputs in;
  in.shape = {kRows, kWidth, kVocab};
  in.hidden.assign(kRows * kWidth, 1);
  in.weight.assign(kVocab * kWidth, 0);
  in.labels.assign(kRows, 0);
  HeadConfig config;
  config.terms = {{.name = "ce"}};
  const LinearResult result = run_linear(config, in, {.dtype = DType::kF16, .chunk = 1024});
  ASSERT_TRUE(ran(result, "f16"));
  for (int64_t j = 1; j < kVocab; ++j) ASSERT_EQ(result.d_weight[j * kWidth], 0x1p-15) << j;
  EXPECT_NEAR(result.d_weight[0], 0x1p-15 - 1, 0x1p-11);
}

TEST_F(CudaChunkedHead, FaultsAndRefusals) {
  const RandomHead head = draw(rng, mix({"ce"}), 20, 64, 50, DType::kBF16);
  HeadInputs in = head.inputs;
  in.labels[7] = 50;
  EXPECT_EQ(run_linear(head.config, in, {}).checked.code(), kLossTargetOutOfRange);
  in = head.inputs;
  in.weight[3 * 64] = NAN;
  const LinearResult nan = run_linear(head.config, in, {});
  EXPECT_EQ(nan.checked.code(), kCudaNonFinite);
  EXPECT_TRUE(std::isnan(nan.total[0]));
  RandomHead biased = head;
  biased.config.options.bias = true;
  biased.inputs.bias.clear();
  EXPECT_EQ(run_linear(biased.config, biased.inputs, {}).ran.code(), kHeadMissingInput);
  RandomHead taught = head;
  taught.config.terms = mix({"kd_hidden_ce"});
  taught.inputs.teachers[1].hidden.clear();
  EXPECT_EQ(run_linear(taught.config, taught.inputs, {}).ran.code(), kHeadMissingInput);

  // Operands that the products cannot read as they lie: refused, and nothing written.
  const lossk::Request request = {.input_dtype = DType::kBF16, .weight_dtype = DType::kBF16};
  HeadConfig capped;
  capped.terms = {{.name = "z", .kind = LossKind::kZLoss}};
  capped.options.softcap = 1;
  const auto plan = lossk::plan_cuda_linear({4, 64, 50}, capped, request, {});
  ASSERT_TRUE(plan.ok()) << plan.status().to_string();
  const DeviceMemory memory(size_t{1} << 16), total(8);
  const DeviceMemory workspace(static_cast<size_t>(plan->workspace_bytes()));
  lossk::Outputs outputs;
  outputs.total = total.data<double>();
  const auto run = [&](int64_t offset, int64_t stride) {
    lossk::Inputs inputs;
    inputs.hidden = {memory.data<uint16_t>() + offset, DType::kBF16, 4, 64, stride};
    inputs.weight = {memory.data(), DType::kBF16, 50, 64, 64};
    return plan->run(nullptr, inputs, outputs, {workspace.data<std::byte>(), workspace.bytes()})
        .code();
  };
  EXPECT_EQ(run(1, 64), kHeadShapeMismatch);
  EXPECT_EQ(run(0, 65), kHeadShapeMismatch);
  EXPECT_EQ(run(0, 63), kHeadShapeMismatch);
  expect_cuda(cudaDeviceSynchronize());
  EXPECT_TRUE(std::isnan(total.read<double>()[0]));
}

TEST_F(CudaChunkedHead, NoRowsGiveZeroGradients) {
  RandomHead head = draw(rng, mix({"z_every"}), 0, 64, 100, DType::kBF16);
  with_bias_and_adapter(head);
  const LinearResult result = run_linear(head.config, head.inputs, {});
  ASSERT_TRUE(ran(result, "no rows"));
  EXPECT_EQ(result.total[0], 0);
  for (const auto* gradient :
       {&result.d_weight, &result.d_bias, &result.d_adapter_a, &result.d_adapter_b}) {
    EXPECT_FALSE(gradient->empty());
    for (const double g : *gradient) ASSERT_EQ(g, 0);
  }
}

// Planned bytes are the only ones: a further run takes none of the device's. Other programs may run
// beside this one, so one try of several must see the device's memory unchanged.
TEST_F(CudaChunkedHead, RunsTakeNoMemory) {
  const RandomHead head = draw(rng, mix({"ce", "z"}), 600, 256, 2003, DType::kBF16);
  const LinearOptions options = {.budget_bytes = 2 << 20};
  const LinearResult first = run_linear(head.config, head.inputs, options);
  ASSERT_TRUE(ran(first, "first"));
  EXPECT_LE(first.workspace_bytes, options.budget_bytes);
  EXPECT_GT(first.n_chunks, 1);
  bool unchanged = false;
  for (int attempt = 0; attempt < 200 && !unchanged; ++attempt) {
    size_t before = 0, after = 0, all = 0;
    expect_cuda(cudaMemGetInfo(&before, &all));
    ASSERT_TRUE(ran(run_linear(head.config, head.inputs, options), "again"));
    expect_cuda(cudaMemGetInfo(&after, &all));
    unchanged = before == after;
  }
  EXPECT_TRUE(unchanged);
}

}  // namespace
}  // namespace ullage::test
