// The CUDA kernels against the float64 oracle, within the bound of head_bound.h.
#include <gtest/gtest.h>

#include "cuda/device_head.h"
#include "cuda/expect_close.h"
#include "cuda/head_bound.h"

namespace ullage::test {
namespace {

constexpr const char* kKernels[] = {"head_rows_sm90_cluster", "head_rows_sm80_streamed"};

// Log-probabilities of a policy that moved a little from the one that sampled: ratios on both sides
// of the clip bounds, none within 1e-3 of one.
void move_policy(const HeadConfig& config, HeadInputs& in, Rng& rng) {
  HeadConfig plain = config;
  plain.terms = {{.name = "lp"}};
  const std::vector<double> lp = reference::head_losses(plain, in).label_log_prob;
  constexpr double kSteps[] = {-0.6, -0.15, 0.02, 0.1, 0.5};
  for (int attempt = 0; attempt < 100; ++attempt) {
    for (size_t i = 0; i < lp.size(); ++i) {
      in.old_log_probs[i] =
          static_cast<float>(lp[i] - kSteps[below(rng, 5)] * uniform(rng, 0.9, 1));
      in.reference_log_probs[i] = static_cast<float>(lp[i] + 0.3 * normal(rng));
    }
    if (distance_to_clip(config, in) > 1e-3) return;
  }
  FAIL() << "no ratios away from the clip bounds";
}

RandomHead draw(const std::vector<LossTerm>& terms, Rng& rng, int64_t n_tok, int64_t vocab,
                DType dtype) {
  RandomHead head = random_head(rng, n_tok, 0, vocab);
  head.config.terms = terms;
  head.inputs.n_segments = std::min<int64_t>(head.inputs.n_segments, n_tok);
  head.inputs.upstream = 0.75;
  store_inputs(head.inputs, dtype);
  move_policy(head.config, head.inputs, rng);
  return head;
}

double before_of(const DeviceOptions& options) { return options.accumulate ? 0.5 : 0; }

void expect_oracle(const RandomHead& head, const DeviceOptions& options, const std::string& where) {
  const DeviceResult actual = run_on_device(head.config, head.inputs, options);
  ASSERT_TRUE(actual.planned.ok()) << where << ": " << actual.planned.to_string();
  ASSERT_TRUE(actual.ran.ok()) << where << ": " << actual.ran.to_string();
  ASSERT_TRUE(actual.checked.ok()) << where << ": " << actual.checked.to_string();
  HeadResult expected = reference::head_losses(head.config, head.inputs);
  HeadBound bound(head.config, head.inputs, options.dtype);
  bound.compute(expected, before_of(options));
  EXPECT_EQ(actual.n_valid, expected.n_valid) << where;
  expect_close("terms", actual.terms, expected.terms, bound.terms, where);
  double total_bound = 0;
  for (size_t t = 0; t < bound.terms.size(); ++t) {
    total_bound += std::abs(head.config.terms[t].weight) * bound.terms[t];
  }
  expect_close("total", actual.total, {&expected.total, 1}, {total_bound}, where);
  if (options.row_outputs) {
    expect_close("token_loss", actual.token_loss, expected.token_loss, bound.token_loss, where);
    expect_close("lse", actual.lse, expected.lse, bound.lse, where);
    expect_close("entropy", actual.entropy, expected.entropy, bound.entropy, where);
    if (options.argmax) {
      EXPECT_EQ(actual.argmax, expected.argmax) << where;
    }
    if (!head.inputs.labels.empty()) {
      expect_close("label_log_prob", actual.label_log_prob, expected.label_log_prob,
                   bound.label_log_prob, where);
      if (options.argmax) {
        EXPECT_EQ(actual.correct, expected.correct) << where;
      }
    }
  }
  if (options.gradient) {
    for (double& g : expected.d_logits) g += before_of(options);
    expect_close("d_logits", actual.gradient, expected.d_logits, bound.gradient, where);
    EXPECT_TRUE(actual.padding_untouched) << where;
  }
}

using CudaHead = OnDevice;

TEST_F(CudaHead, EveryTermByItself) {
  int taken = 0;
  for (const LossTerm& term : term_variants()) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const char* kernel : kKernels) {
        const int64_t vocab = 1 + below(rng, 1500);
        const RandomHead head = draw({term}, rng, 9, std::max<int64_t>(vocab, 3), dtype);
        const DeviceOptions options = {.dtype = dtype, .kernel = kernel};
        const std::string where = term.name + " " + std::string(name_of(dtype)) + " " + kernel +
                                  " vocab " + std::to_string(vocab);
        const DeviceResult result = run_on_device(head.config, head.inputs, options);
        if (result.planned.code() == kHeadUnknownKind && term.name.starts_with("kd_hidden")) {
          continue;
        }
        ++taken;
        expect_oracle(head, options, where);
        if (vocab <= 1000 && kernel == kKernels[0]) {
          expect_oracle(head, {.dtype = dtype}, where + ", as planned");
        }
        if (HasFailure()) return;
      }
    }
  }
  // All but four whose teacher gives hidden states.
  EXPECT_EQ(taken, static_cast<int>(6 * (term_variants().size() - 4)));
}

std::vector<LossTerm> mix(const std::vector<std::string>& names) {
  std::vector<LossTerm> terms;
  for (const std::string& name : names) {
    for (const LossTerm& term : term_variants()) {
      if (term.name != name) continue;
      terms.push_back(term);
      terms.back().weight = 0.5 + 0.25 * static_cast<double>(terms.size());
    }
  }
  return terms;
}

const std::vector<std::vector<std::string>> kMixes = {
    {"ce", "z", "grpo_0"},
    {"ce_smoothed", "gspo_0", "cispo", "z_every", "dpo"},
    {"kd_ce", "kd_fkl", "ce", "z"},
    {"kd_rkl", "ce", "z_own"},
    {"kd_jsd", "ce", "z"},
    {"kd_jsd", "kd_ce", "kd_fkl", "kd_rkl", "ce_smoothed", "grpo_2"},
    {"kd_top_k1_fkl", "ce", "z"},
    {"kd_top_k1_jsd", "kd_top_k0_rkl", "kd_top_k2_ce", "ce_smoothed"},
    // Of more than one softmax or teacher.
    {"kd_tempered_fkl", "ce"},
    {"kd_tempered_jsd", "kd_jsd", "ce_scaled", "kd_top_k1_fkl", "ce_smoothed", "gspo_0"}};

TEST_F(CudaHead, MixesAtEveryVocabulary) {
  for (const int64_t vocab :
       {1, 2, 31, 127, 129, 1000, 8003, 32000, 50257, 128256, 129920, 151936, 256000, 262144}) {
    for (size_t m = 0; m < kMixes.size(); ++m) {
      // The long rows, a mix each in turn: the oracle takes its time.
      if (vocab > 10'000 && (m + static_cast<size_t>(vocab)) % 2 != 0) continue;
      const DType dtype = m % 2 == 0 ? DType::kBF16 : DType::kF32;
      const RandomHead head = draw(mix(kMixes[m]), rng, 5, vocab, dtype);
      for (const char* kernel : {kKernels[0], kKernels[1], ""}) {
        expect_oracle(
            head, {.dtype = dtype, .kernel = kernel},
            "mix " + std::to_string(m) + " vocab " + std::to_string(vocab) + " " + kernel);
        if (HasFailure()) return;
      }
    }
  }
}

// So many that they are counted, and their losses summed, in two and in eight parts.
TEST_F(CudaHead, ManyRows) {
  for (const int64_t n_tok : {9001, 33007}) {
    for (const auto& names : {std::vector<std::string>{"ce_smoothed", "z_own", "grpo_1", "gspo_0"},
                              std::vector<std::string>{"kd_fkl", "ce", "z"}}) {
      const RandomHead head = draw(mix(names), rng, n_tok, 3, DType::kF32);
      for (const char* kernel : {"head_rows_sm80_streamed", "head_rows_sm80_short"}) {
        expect_oracle(head, {.kernel = kernel}, std::to_string(n_tok) + " rows " + kernel);
        if (HasFailure()) return;
      }
    }
  }
}

TEST_F(CudaHead, OptionsOfTheRow) {
  for (const std::string variant :
       {"softcap", "scale", "offset", "accumulate", "no labels", "upstream rows", "given divisor",
        "forward only", "temperature", "no row outputs", "misaligned"}) {
    for (const char* kernel : kKernels) {
      for (size_t m : {0u, 2u, 3u, 4u, 6u, 7u, 8u, 9u}) {
        const DType dtype = m == 0 ? DType::kF32 : DType::kBF16;
        DeviceOptions options = {.dtype = dtype, .kernel = kernel};
        RandomHead head = draw(mix(variant == "no labels" && m == 0 ? std::vector<std::string>{"z"}
                                   : variant == "no labels" ? std::vector<std::string>{kMixes[m][0]}
                                                            : kMixes[m]),
                               rng, 7, 2000 + static_cast<int64_t>(m), dtype);
        if (variant == "softcap") head.config.options.softcap = 3;
        if (variant == "scale") head.config.options.logits_scale = 0.6;
        if (variant == "offset") head.config.options.vocab_offset = 100;
        if (variant == "offset") {
          for (int64_t& label : head.inputs.labels) label += label >= 0 ? 100 : 0;
        }
        if (variant == "accumulate") options.accumulate = true;
        if (variant == "no labels") {
          head.inputs.labels.clear();
          head.inputs.mask.clear();
          for (LossTerm& term : head.config.terms) term.mask = RowMask::kAuto;
        }
        if (variant == "upstream rows") {
          head.inputs.upstream_rows = normals(rng, 7, 1);
          store_inputs(head.inputs, dtype);
        }
        if (variant == "given divisor") head.config.terms[0].divisor = 0.3;
        if (variant == "forward only") options.gradient = false;
        if (variant == "temperature") {
          for (LossTerm& term : head.config.terms) {
            // Top-k teachers give log-probabilities, at the temperature they have.
            if (term.name.starts_with("kd_top_k")) continue;
            term.temperature = 2;
            term.t_squared = true;
          }
        }
        if (variant == "no row outputs") options.row_outputs = false;
        if (variant == "misaligned") {
          options.logits = {.pad = 3, .shift = 1};
          options.teacher = {.pad = 0, .shift = 5};
          options.gradient_at = {.pad = 1, .shift = 0};
        }
        if (variant != "no labels") move_policy(head.config, head.inputs, rng);
        expect_oracle(head, options, variant + " mix " + std::to_string(m) + " " + kernel);
        if (HasFailure()) return;
      }
    }
  }
}

// Without arg max and smoothed labels the entropy is summed with the softmax, in one pass: rows of
// one strip, of several sections and of several blocks; whole words and others, with a short last
// round and without.
TEST_F(CudaHead, EntropyInTheFirstPass) {
  for (const int64_t vocab : {1, 3, 700, 2048, 2051, 9001, 50257, 151936}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (const std::string variant :
           {"plain", "softcap", "scale", "forward only", "accumulate", "misaligned", "masked"}) {
        const bool masked = variant == "masked";
        // The long rows in one type and two variants: the oracle takes its time.
        if (vocab > 10'000 && (dtype != DType::kBF16 || (variant != "plain" && !masked))) continue;
        RandomHead head = draw(mix({"ce", "z", "grpo_0"}), rng, 5, vocab, dtype);
        DeviceOptions options = {.dtype = dtype, .argmax = false};
        if (variant == "softcap") head.config.options.softcap = 3;
        if (variant == "scale") head.config.options.logits_scale = 0.6;
        if (variant == "forward only") options.gradient = false;
        if (variant == "accumulate") options.accumulate = true;
        if (variant == "misaligned") {
          options.logits = {.pad = 3, .shift = 1};
          options.gradient_at = {.pad = 1, .shift = 0};
        }
        for (int64_t r = 0; masked && r < 5; ++r) {
          int64_t& label = head.inputs.labels[r];
          label = std::max<int64_t>(label, 0);
          // Every third column, and of half the row, so of whole strips, all but the label's.
          for (int64_t j = 0; j < vocab; ++j) {
            const bool in_block = j >= vocab / 4 && j < vocab / 4 * 3;
            if (j == label || (j % 3 != r % 3 && !in_block)) continue;
            head.inputs.logits[r * vocab + j] = -INFINITY;
          }
        }
        move_policy(head.config, head.inputs, rng);
        for (const char* kernel : kKernels) {
          options.kernel = kernel;
          expect_oracle(head, options,
                        variant + " " + std::string(name_of(dtype)) + " " + kernel + " vocab " +
                            std::to_string(vocab));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// The labels' softmax and the tempered student's in one pass; at a power of two one is squared from
// the other.
TEST_F(CudaHead, TextbookDistillation) {
  const std::vector<std::vector<std::string>> mixes = {
      {"kd_tempered_fkl", "ce"}, {"ce_smoothed", "kd_tempered_ce", "z", "grpo_0", "gspo_0"}};
  // Beside a label term that has the tempered student's softmax, it stays in a pass with that.
  RandomHead halved = draw(mix({"kd_tempered_fkl", "ce", "ce_scaled"}), rng, 5, 3000, DType::kF32);
  halved.config.terms[0].student_temperature = 2;
  halved.config.terms[2].logits_scale = 0.5;
  expect_oracle(halved, {.dtype = DType::kF32}, "beside a label term of its softmax");
  for (const double temperature : {0.5, 1.3, 2.0, 4.0, 8.0, 16.0}) {
    for (const int64_t vocab : {3, 256, 1000, 2051, 9001, 50257}) {
      for (const std::string variant : {"plain", "softcap", "scale", "forward only", "accumulate",
                                        "misaligned", "in place", "no row outputs"}) {
        // The long rows in two variants: the oracle takes its time.
        if (vocab > 10'000 && (temperature != 2 || (variant != "plain" && variant != "in place"))) {
          continue;
        }
        const auto which = static_cast<size_t>(vocab % 2);
        const DType dtype = std::array{DType::kBF16, DType::kF32, DType::kF16}[below(rng, 3)];
        RandomHead head = draw(mix(mixes[which]), rng, 5, vocab, dtype);
        for (LossTerm& term : head.config.terms) {
          if (term.kind == LossKind::kDistillation) term.student_temperature = temperature;
        }
        DeviceOptions options = {.dtype = dtype};
        if (variant == "softcap") head.config.options.softcap = 3;
        if (variant == "scale") head.config.options.logits_scale = 0.6;
        if (variant == "forward only") options.gradient = false;
        if (variant == "accumulate") options.accumulate = true;
        if (variant == "in place") options.in_place = true;
        if (variant == "no row outputs") options.row_outputs = false;
        if (variant == "misaligned") {
          options.logits = {.pad = 3, .shift = 1};
          options.teacher = {.pad = 0, .shift = 5};
          options.gradient_at = {.pad = 1, .shift = 0};
        }
        move_policy(head.config, head.inputs, rng);
        for (const char* kernel : {kKernels[0], kKernels[1], ""}) {
          options.kernel = kernel;
          expect_oracle(head, options,
                        variant + " " + std::string(name_of(dtype)) + " " + kernel + " vocab " +
                            std::to_string(vocab) + " temperature " + std::to_string(temperature));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Held in registers with their teacher's, where nothing else is asked for.
TEST_F(CudaHead, ShortRowsOfTeachers) {
  for (const auto& names :
       {std::vector<std::string>{"kd_fkl", "ce"}, std::vector<std::string>{"kd_rkl", "z"},
        std::vector<std::string>{"kd_ce"}, std::vector<std::string>{"kd_tempered_fkl", "ce"}}) {
    for (const int64_t vocab : {8, 256, 504, 760, 1000}) {
      for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
        for (const std::string variant :
             {"plain", "softcap", "forward only", "accumulate", "in place", "masked"}) {
          RandomHead head = draw(mix(names), rng, 21, vocab, dtype);
          DeviceOptions options = {.dtype = dtype, .row_outputs = false};
          if (variant == "softcap") head.config.options.softcap = 3;
          if (variant == "forward only") options.gradient = false;
          if (variant == "accumulate") options.accumulate = true;
          if (variant == "in place") options.in_place = true;
          for (int64_t r = 0; variant == "masked" && r < 21; ++r) {
            head.inputs.labels[r] = std::max<int64_t>(head.inputs.labels[r], 0);
            for (int64_t j = 0; j < vocab; ++j) {
              if (j == head.inputs.labels[r] || j % 3 == r % 3) continue;
              head.inputs.logits[r * vocab + j] = -INFINITY;
              head.inputs.teachers[0].logits[r * vocab + j] = -INFINITY;
            }
          }
          expect_oracle(head, options,
                        names[0] + " " + variant + " " + std::string(name_of(dtype)) + " vocab " +
                            std::to_string(vocab));
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CudaHead, PolicyMetrics) {
  // Each case twice: of the head's softmax, and of one of each term's own.
  for (const bool scaled : {false, true}) {
    for (const char* kernel : kKernels) {
      const bool argmax = below(rng, 2) == 0;
      std::vector<LossTerm> terms = mix({"grpo_0", "gspo_0"});
      if (scaled) terms[0].logits_scale = 1.2, terms[1].logits_scale = 0.9;
      const RandomHead head = draw(terms, rng, 12, 1003, DType::kF32);
      const DeviceResult actual = run_on_device(
          head.config, head.inputs, {.dtype = DType::kF32, .kernel = kernel, .argmax = argmax});
      const HeadResult expected = reference::head_losses(head.config, head.inputs);
      ASSERT_EQ(actual.policy_metrics.size(), 2u);
      for (size_t t = 0; t < 2; ++t) {
        const lossk::PolicyMetrics &a = actual.policy_metrics[t], &e = expected.policy_metrics[t];
        const auto near = [&](double x, double y) { EXPECT_NEAR(x, y, 1e-5 * (1 + std::abs(y))); };
        near(a.old_log_probs, e.old_log_probs);
        near(a.new_log_probs, e.new_log_probs);
        near(a.ratio, e.ratio);
        near(a.kl, e.kl);
        near(a.clipped, e.clipped);
        near(a.advantage, e.advantage);
        near(a.entropy, e.entropy);
        near(a.ratio_sum, e.ratio_sum);
        near(a.ratio_squared_sum, e.ratio_squared_sum);
        EXPECT_EQ(a.max_advantage, e.max_advantage);
        EXPECT_EQ(a.min_advantage, e.min_advantage);
        EXPECT_EQ(a.n_tokens, e.n_tokens);
        EXPECT_EQ(a.n_segments, e.n_segments);
      }
    }
  }
}

// Sequences wait for the labels' log-probabilities of their own softmax, in a pass that is not the
// first.
TEST_F(CudaHead, PoliciesOfTheirOwnSoftmax) {
  std::vector<LossTerm> terms = mix({"ce", "grpo_1", "gspo_0", "dpo"});
  terms[1].logits_scale = 0.9;
  terms[2].logits_scale = 1.1;
  terms[3].logits_scale = 0.8;
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t vocab : {304, 5003}) {
      for (const bool gradient : {true, false}) {
        const RandomHead head = draw(terms, rng, 11, vocab, dtype);
        for (const char* kernel : {kKernels[0], kKernels[1], ""}) {
          expect_oracle(head, {.dtype = dtype, .kernel = kernel, .gradient = gradient},
                        std::string(name_of(dtype)) + " " + std::to_string(vocab) + " " + kernel);
          if (HasFailure()) return;
        }
      }
    }
  }
}

TEST_F(CudaHead, RefusesTopKTeachers) {
  for (const int64_t bad : {int64_t{0}, int64_t{1}, int64_t{2}, int64_t{3}}) {
    RandomHead head = draw(mix({"kd_top_k1_fkl"}), rng, 4, 500, DType::kBF16);
    reference::HeadTeacher& teacher = head.inputs.teachers[2];
    const int64_t k = head.config.teachers[2].k, at = 2 * k;
    if (bad == 0) teacher.ids[at] = 500;
    if (bad == 1) teacher.ids[at] = -1;
    if (bad == 2) teacher.ids[at] = teacher.ids[at + 1];
    if (bad == 3) teacher.log_probs[at] = 0.5;
    if (bad == 2 && k < 2) continue;
    const DeviceResult result = run_on_device(head.config, head.inputs, {.dtype = DType::kBF16});
    ASSERT_TRUE(result.ran.ok()) << result.ran.to_string();
    EXPECT_EQ(result.checked.code(), kHeadBadTopK) << bad;
    EXPECT_NE(result.checked.message().find("row 2"), std::string::npos);
  }
}

// A common offset costs nothing beyond what the storage type loses of the logits.
TEST_F(CudaHead, LargeOffsets) {
  for (const double offset : {-1e4, 1e4}) {
    for (const char* kernel : kKernels) {
      for (size_t m : {0u, 2u, 3u, 4u}) {
        RandomHead head = draw(mix(kMixes[m]), rng, 5, 3001, DType::kF32);
        for (double& x : head.inputs.logits) x = static_cast<float>(x + offset);
        for (double& x : head.inputs.teachers[0].logits) x = static_cast<float>(x - offset);
        move_policy(head.config, head.inputs, rng);
        expect_oracle(head, {.kernel = kernel}, "offset " + std::to_string(offset));
      }
    }
  }
}

TEST_F(CudaHead, MaskedColumns) {
  for (const char* kernel : {kKernels[0], kKernels[1], "head_rows_sm80_short"}) {
    for (const std::string name : {"ce", "kd_ce", "kd_fkl", "kd_rkl", "kd_jsd"}) {
      RandomHead head = draw(mix({name}), rng, 6, 700, DType::kBF16);
      for (int64_t r = 0; r < 6; ++r) {
        for (int64_t j = 0; j < 700; ++j) {
          if (j % 3 != r % 3 || j == head.inputs.labels[r]) continue;
          head.inputs.logits[r * 700 + j] = -INFINITY;
          head.inputs.teachers[0].logits[r * 700 + j] = -INFINITY;
        }
      }
      expect_oracle(head, {.dtype = DType::kBF16, .kernel = kernel}, name);
    }
  }
}

// A block of the vocabulary is masked, whole strips of it, by -inf or a finite number in its place;
// or in one row by -inf where the other is far below its maximum. No sum of such a strip is
// anything beside the row's.
TEST_F(CudaHead, MaskedBlocks) {
  constexpr int64_t kVocab = 8192, kFirst = 1000, kLast = 5200;
  const float lowest[] = {-INFINITY, -1e9f, -1e10f, -1e12f, -1e30f, -3.3e38f};
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const char* kernel : kKernels) {
      for (const std::string name : {"ce", "kd_ce", "kd_fkl", "kd_rkl", "kd_jsd"}) {
        const auto check = [&](float student, float teacher, bool argmax = true) {
          RandomHead head = draw(mix({name}), rng, 6, kVocab, dtype);
          for (int64_t r = 0; r < 6; ++r) {
            head.inputs.labels[r] %= kFirst;
            for (int64_t j = kFirst; j < kLast; ++j) {
              head.inputs.logits[r * kVocab + j] = student;
              head.inputs.teachers[0].logits[r * kVocab + j] = teacher;
            }
          }
          const std::string where = name + " " + std::string(name_of(dtype)) + " " + kernel +
                                    " student " + std::to_string(student) + " teacher " +
                                    std::to_string(teacher);
          const DeviceOptions options = {.dtype = dtype, .kernel = kernel, .argmax = argmax};
          const DeviceResult result = run_on_device(head.config, head.inputs, options);
          ASSERT_TRUE(result.ran.ok()) << where;
          for (int64_t r = 0; r < 6; ++r) {
            ASSERT_TRUE(std::isfinite(result.token_loss[r])) << where << " row " << r;
            ASSERT_TRUE(std::isfinite(result.entropy[r])) << where << " row " << r;
            for (int64_t j = 0; j < kVocab; ++j) {
              const double g = result.gradient[r * kVocab + j];
              ASSERT_TRUE(std::isfinite(g)) << where << " row " << r << " column " << j;
              if (j < kFirst || j >= kLast) continue;
              ASSERT_EQ(g, 0) << where << " row " << r << " column " << j;
            }
          }
          if (student >= -1e4f || std::isinf(student)) expect_oracle(head, options, where);
        };
        for (const float masked : lowest) {
          check(masked, masked);
          if (name == "ce") check(masked, masked, false);  // the entropy by the first pass
        }
        if (name == "kd_rkl") check(-1e4f, -INFINITY);
        if (name == "kd_fkl" || name == "kd_ce") check(-INFINITY, -1e4f);
        if (HasFailure()) return;
      }
    }
  }
}

// The family of Jensen-Shannon alone: every storage type, mixtures near either row, label losses
// beside it and second-pass outputs or none, columns that are masked in either row or in both.
TEST_F(CudaHead, JensenShannonByItself) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const double beta : {0.1, 0.5, 0.9}) {
      for (const std::string masked : {"none", "student", "teacher", "both"}) {
        RandomHead head = draw(mix({"kd_jsd", "ce", "z"}), rng, 6, 1900, dtype);
        head.config.terms[0].beta = beta;
        for (int64_t r = 0; r < 6; ++r) {
          for (int64_t j = 0; j < 1900; ++j) {
            if (j % 3 != r % 3 || j == head.inputs.labels[r]) continue;
            const auto at = static_cast<size_t>(r * 1900 + j);
            if (masked == "student" || masked == "both") head.inputs.logits[at] = -INFINITY;
            if (masked == "teacher" || masked == "both") {
              head.inputs.teachers[0].logits[at] = -INFINITY;
            }
          }
        }
        move_policy(head.config, head.inputs, rng);
        const std::string where = std::string(name_of(dtype)) + " beta " + std::to_string(beta) +
                                  " masked " + masked + " ";
        for (const char* kernel : kKernels) {
          for (const bool outputs : {true, false}) {
            const DeviceOptions options = {
                .dtype = dtype, .kernel = kernel, .row_outputs = outputs};
            expect_oracle(head, options, where + kernel);
            const DeviceResult result = run_on_device(head.config, head.inputs, options);
            for (size_t i = 0; i < head.inputs.logits.size(); ++i) {
              if (std::isfinite(head.inputs.logits[i])) continue;
              ASSERT_EQ(result.gradient[i], 0) << where << kernel << " element " << i;
            }
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

}  // namespace
}  // namespace ullage::test
