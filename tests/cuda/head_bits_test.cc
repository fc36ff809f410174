// What must not change a bit, what must be zero, and what a run reports.
#include <gtest/gtest.h>

#include "cuda/device_head.h"

namespace ullage::test {
namespace {

class CudaHeadBits : public testing::Test {
 protected:
  void SetUp() override { ULLAGE_SKIP_WITHOUT_DEVICE(); }
  Rng rng{test_seed()};
};

// Bits, so that NaN equals itself.
std::vector<uint64_t> bits(const std::vector<double>& values) {
  std::vector<uint64_t> result;
  for (const double value : values) result.push_back(std::bit_cast<uint64_t>(value));
  return result;
}

void expect_same_rows(const DeviceResult& a, const DeviceResult& b, const std::string& where) {
  ASSERT_TRUE(a.ran.ok() && b.ran.ok()) << where << a.ran.to_string() << b.ran.to_string();
  EXPECT_EQ(a.gradient_bits, b.gradient_bits) << where;
  EXPECT_EQ(bits(a.token_loss), bits(b.token_loss)) << where;
  EXPECT_EQ(bits(a.lse), bits(b.lse)) << where;
  EXPECT_EQ(bits(a.label_log_prob), bits(b.label_log_prob)) << where;
  EXPECT_EQ(bits(a.entropy), bits(b.entropy)) << where;
  EXPECT_EQ(a.argmax, b.argmax) << where;
}

void expect_same(const DeviceResult& a, const DeviceResult& b, const std::string& where) {
  expect_same_rows(a, b, where);
  EXPECT_EQ(bits(a.terms), bits(b.terms)) << where;
  EXPECT_EQ(bits(a.total), bits(b.total)) << where;
}

RandomHead draw(const std::vector<std::string>& names, Rng& rng, int64_t n_tok, int64_t vocab,
                DType dtype) {
  RandomHead head = random_head(rng, n_tok, 0, vocab);
  for (const std::string& name : names) {
    for (const LossTerm& term : term_variants()) {
      if (term.name == name) head.config.terms.push_back(term);
    }
  }
  store_inputs(head.inputs, dtype);
  return head;
}

const std::vector<std::vector<std::string>> kMixes = {{"ce_smoothed", "z", "grpo_1", "gspo_0"},
                                                      {"kd_top_k1_rkl", "ce"},
                                                      {"kd_fkl", "kd_ce", "ce"},
                                                      {"kd_rkl", "z_every"},
                                                      {"kd_tempered_fkl", "ce"},
                                                      {"kd_jsd", "ce"}};

// The last mix with the entropy of the first pass: no arg max is asked for.
TEST_F(CudaHeadBits, DoNotDependOnRunPlacementOrKernel) {
  auto mixes = kMixes;
  mixes.push_back({"ce", "z", "grpo_1", "gspo_0"});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& names : mixes) {
      for (const int64_t vocab : {5000, 50257}) {
        const RandomHead head = draw(names, rng, 6, vocab, dtype);
        const DeviceOptions plain = {.dtype = dtype, .argmax = names != mixes.back()};
        const DeviceResult first = run_on_device(head.config, head.inputs, plain);
        ASSERT_TRUE(first.ran.ok()) << first.ran.to_string();
        EXPECT_TRUE(first.padding_untouched);
        const std::string where =
            names[0] + " " + std::string(name_of(dtype)) + " " + std::to_string(vocab);
        const auto same = [&](const char* what, const DeviceOptions& options) {
          const DeviceResult result = run_on_device(head.config, head.inputs, options);
          expect_same(first, result, where + ": " + what);
          EXPECT_TRUE(result.padding_untouched) << where << ": " << what;
        };
        same("again", plain);
        DeviceOptions options = plain;
        options.in_place = true;
        same("in place", options);
        options.logits = {.pad = 7, .shift = 3};
        same("in place, misaligned", options);
        options = plain;
        options.logits = {.pad = 1, .shift = 1};
        options.teacher = {.pad = 2, .shift = 7};
        options.gradient_at = {.pad = 5, .shift = 2};
        same("misaligned", options);
        options.kernel = "head_rows_sm80_streamed";
        same("streamed, misaligned", options);
        options = plain;
        options.kernel = "head_rows_sm80_streamed";
        same("streamed", options);
        options.in_place = true;
        same("streamed, in place", options);
        for (const int cluster : {1, 2, 4, 8, 16}) {
          for (const auto& [warps, slots] : {std::pair{1, 2}, {4, 3}, {16, 3}, {16, 5}}) {
            options = plain;
            options.tuning = {.cluster = cluster, .warps = warps, .slots = slots};
            const DeviceResult result = run_on_device(head.config, head.inputs, options);
            if (result.kernel != first.kernel) continue;  // that many columns a block do not fit
            expect_same(first, result,
                        where + ": cluster " + std::to_string(cluster) + ", warps " +
                            std::to_string(warps) + ", slots " + std::to_string(slots));
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

// Each softmax, and each teacher, in a pass of its own: its losses are those of its terms by
// themselves, and rows report the head's softmax.
TEST_F(CudaHeadBits, PassesChangeNoLoss) {
  const std::vector<std::vector<std::string>> passes = {{"ce", "z", "kd_jsd"},
                                                        {"kd_tempered_fkl", "kd_tempered_rkl"},
                                                        {"ce_scaled"},
                                                        {"kd_top_k1_fkl"}};
  std::vector<std::string> all;
  for (const auto& names : passes) all.insert(all.end(), names.begin(), names.end());
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t vocab : {100, 5000, 50257}) {
      const RandomHead head = draw(all, rng, 6, vocab, dtype);
      for (const char* kernel :
           {"head_rows_sm90_cluster", "head_rows_sm80_streamed", "head_rows_sm80_short"}) {
        const std::string where =
            std::string(kernel) + " " + std::string(name_of(dtype)) + " " + std::to_string(vocab);
        const DeviceOptions options = {.dtype = dtype, .kernel = kernel};
        const DeviceResult whole = run_on_device(head.config, head.inputs, options);
        if (kernel == std::string("head_rows_sm80_short")) {
          EXPECT_FALSE(whole.planned.ok()) << "a top-k teacher's rows are not short";
          continue;
        }
        ASSERT_TRUE(whole.ran.ok()) << where << whole.planned.to_string();
        expect_same(whole, run_on_device(head.config, head.inputs, options), where + " again");
        DeviceOptions placed = options;
        placed.logits = {.pad = 1, .shift = 1};
        placed.teacher = {.pad = 2, .shift = 7};
        placed.gradient_at = {.pad = 5, .shift = 2};
        const DeviceResult misaligned = run_on_device(head.config, head.inputs, placed);
        expect_same(whole, misaligned, where + " misaligned");
        EXPECT_TRUE(misaligned.padding_untouched) << where;
        size_t t = 0;
        for (const auto& names : passes) {
          RandomHead part = head;
          part.config.terms.assign(
              head.config.terms.begin() + static_cast<std::ptrdiff_t>(t),
              head.config.terms.begin() + static_cast<std::ptrdiff_t>(t + names.size()));
          const DeviceResult alone = run_on_device(part.config, part.inputs, options);
          ASSERT_TRUE(alone.ran.ok()) << where << alone.planned.to_string();
          if (t == 0) {
            EXPECT_EQ(bits(alone.lse), bits(whole.lse)) << where;
            EXPECT_EQ(bits(alone.entropy), bits(whole.entropy)) << where;
            EXPECT_EQ(bits(alone.label_log_prob), bits(whole.label_log_prob)) << where;
          }
          EXPECT_EQ(alone.argmax, whole.argmax) << where << names[0];
          for (const double term : alone.terms) {
            EXPECT_EQ(term, whole.terms[t]) << where << " " << head.config.terms[t].name;
            ++t;
          }
        }
        DeviceOptions in_place = options;
        in_place.in_place = true;
        const Status refused = run_on_device(head.config, head.inputs, in_place).ran;
        EXPECT_EQ(refused.code(), kHeadShapeMismatch);
        EXPECT_NE(refused.message().find("4 passes"), std::string::npos) << refused.to_string();
        if (HasFailure()) return;
      }
    }
  }
}

// A tempered student beside labels: each term's loss is the one it has in a head of one softmax.
TEST_F(CudaHeadBits, TwoSoftmaxesOfAPassAreThoseOfTwo) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const int64_t vocab : {100, 1000, 5000, 50257}) {
      const RandomHead both = draw({"kd_tempered_fkl", "ce", "z"}, rng, 6, vocab, dtype);
      RandomHead tempered = both, labels = both;
      tempered.config.terms = {both.config.terms[0]};
      labels.config.terms[0].student_temperature = 1;
      for (const char* kernel : {"head_rows_sm90_cluster", "head_rows_sm80_streamed", ""}) {
        const std::string where =
            std::string(kernel) + " " + std::string(name_of(dtype)) + " " + std::to_string(vocab);
        const DeviceOptions options = {.dtype = dtype, .kernel = kernel};
        const DeviceResult whole = run_on_device(both.config, both.inputs, options);
        const DeviceResult first = run_on_device(tempered.config, tempered.inputs, options);
        const DeviceResult others = run_on_device(labels.config, labels.inputs, options);
        ASSERT_TRUE(whole.ran.ok() && first.ran.ok() && others.ran.ok()) << where;
        EXPECT_EQ(whole.terms[0], first.terms[0]) << where;
        EXPECT_EQ(whole.terms[1], others.terms[1]) << where;
        EXPECT_EQ(whole.terms[2], others.terms[2]) << where;
        EXPECT_EQ(bits(whole.lse), bits(others.lse)) << where;
        EXPECT_EQ(bits(whole.entropy), bits(others.entropy)) << where;
        EXPECT_EQ(whole.argmax, others.argmax) << where;
      }
    }
  }
}

// The tempered student's, at a temperature of which the labels' exponentials are squares or not.
void temper(RandomHead& head, double temperature) {
  for (LossTerm& term : head.config.terms) {
    if (term.student_temperature != 1) term.student_temperature = temperature;
  }
}

// A teacher's rows of odd and of even length, whatever word they begin in.
TEST_F(CudaHeadBits, ClustersOfThreeAreThoseOfTheOtherKernels) {
  const struct {
    DType dtype;
    int64_t vocab;
  } cases[] = {
      {DType::kBF16, 41001}, {DType::kF16, 50257}, {DType::kBF16, 50264}, {DType::kF32, 25000}};
  for (const auto& names : {std::vector<std::string>{"kd_fkl", "ce"},
                            {"kd_rkl"},
                            {"kd_ce"},
                            {"kd_tempered_fkl", "ce"},
                            {"kd_tempered_fkl", "z"}}) {
    for (const auto& [dtype, vocab] : cases) {
      RandomHead head = draw(names, rng, 7, vocab, dtype);
      temper(head, names.back() == "z" ? 1.3 : 2);
      for (const bool added : {false, true}) {
        for (const int64_t shift : {0, 3}) {
          DeviceOptions options = {.dtype = dtype, .accumulate = added, .row_outputs = false};
          options.logits = options.teacher = options.gradient_at = {.pad = 0, .shift = shift};
          const DeviceResult first = run_on_device(head.config, head.inputs, options);
          EXPECT_EQ(first.kernel, "head_rows_sm90_cluster");
          EXPECT_TRUE(first.padding_untouched);
          options.kernel = "head_rows_sm80_streamed";
          expect_same(first, run_on_device(head.config, head.inputs, options),
                      names[0] + " " + std::string(name_of(dtype)) + " " + std::to_string(vocab) +
                          " shift " + std::to_string(shift) + (added ? " added" : ""));
        }
      }
      if (HasFailure()) return;
    }
  }
}

// Several rows a warp, each with a lane for its terms.
TEST_F(CudaHeadBits, ShortRowsAreThoseOfTheOtherKernels) {
  auto mixes = kMixes;
  mixes.push_back({"ce", "z", "grpo_1", "gspo_0"});
  mixes.push_back({"ce", "z", "z_every", "grpo_1", "ce_smoothed"});
  mixes.push_back({"kd_fkl", "kd_rkl", "kd_jsd"});
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const auto& names : mixes) {
      for (const int64_t vocab :
           {1,   2,   8,   31,   127,  129,  248,  255,  256,  257,  264,  500, 511,
            512, 760, 768, 1000, 1024, 1032, 1992, 2048, 2056, 3000, 4088, 4096}) {
        // Beyond one strip, those whose softmax alone is summed, without a teacher.
        if (vocab > 1024 && names[0] != "ce") continue;
        for (const int64_t n_tok : {5, 9, 40}) {
          if (vocab == 1 && names[0] == "kd_top_k1_rkl") continue;
          RandomHead head = draw(names, rng, n_tok, vocab, dtype);
          const auto one_in = [&](int n) { return below(rng, n) == 0; };
          if (one_in(4)) head.config.options.softcap = 3;
          for (int64_t r = 2; r < n_tok; r += 3) head.inputs.labels[r] = -100;
          const bool asked = one_in(2);
          DeviceOptions options = {.dtype = dtype, .row_outputs = asked, .entropy = asked};
          options.argmax = asked && one_in(2);
          if (one_in(6)) {  // masked columns: of a round, or of all but the label
            const int64_t from = below(rng, vocab), to = one_in(2) ? vocab : from + 300;
            for (int64_t r = 0; r < n_tok; ++r) {
              for (int64_t j = from; j < std::min(vocab, to); ++j) {
                if (j != head.inputs.labels[r]) head.inputs.logits[r * vocab + j] = -INFINITY;
              }
            }
          }
          options.gradient = !one_in(4);
          options.in_place = options.gradient && one_in(2);
          options.accumulate = options.gradient && !options.in_place && one_in(3);
          if (one_in(3)) options.logits = {.pad = 1, .shift = 1};
          if (one_in(3)) options.teacher = {.pad = 2, .shift = 5};
          if (one_in(3)) options.gradient_at = {.pad = 3, .shift = 2};
          const DeviceResult result = run_on_device(head.config, head.inputs, options);
          ASSERT_TRUE(result.ran.ok()) << result.ran.to_string();
          EXPECT_TRUE(result.padding_untouched);
          const bool is_short = result.kernel == "head_rows_sm80_short";
          if (vocab <= 768) {
            EXPECT_EQ(is_short, names[0] != "kd_top_k1_rkl") << names[0] << " " << vocab;
          }
          const std::string where = names[0] + " " + std::string(name_of(dtype)) + " " +
                                    std::to_string(n_tok) + " x " + std::to_string(vocab) +
                                    (options.in_place ? " in place" : "") +
                                    (options.accumulate ? " accumulating" : "");
          options.kernel = "head_rows_sm80_streamed";
          expect_same(run_on_device(head.config, head.inputs, options), result, where);
          options.kernel = {};
          options.tuning.cluster = 1;
          expect_same(run_on_device(head.config, head.inputs, options), result,
                      where + ", a block alone");
          if (HasFailure()) return;
        }
      }
    }
  }
  // More rows than all warps take at a time.
  for (const int64_t vocab : {100, 104}) {
    const RandomHead head = draw({"ce", "z"}, rng, 70'001, vocab, DType::kBF16);
    DeviceOptions options = {.dtype = DType::kBF16, .argmax = false};
    options.kernel = "head_rows_sm80_short";
    const DeviceResult several = run_on_device(head.config, head.inputs, options);
    ASSERT_TRUE(several.ran.ok()) << several.ran.to_string();
    options.kernel = "head_rows_sm80_streamed";
    expect_same(run_on_device(head.config, head.inputs, options), several, "70001 rows");
  }
}

// Few rows, some ignored, of each kind that registers hold, and of gradients that a cluster adds to
// what is there: what the sanitizer can go through.
TEST_F(CudaHeadBits, RowsHeldInRegistersAndGradientsAddedTo) {
  struct Case {
    DType dtype;
    int64_t vocab;
    const char* kernel;
  };
  const Case with_teacher[] = {
      {DType::kBF16, 8, "head_rows_sm80_short"},  {DType::kBF16, 248, "head_rows_sm80_short"},
      {DType::kF16, 400, "head_rows_sm80_short"}, {DType::kBF16, 1000, "head_rows_sm80_short"},
      {DType::kF32, 256, "head_rows_sm80_short"}, {DType::kF32, 504, "head_rows_sm80_short"},
      {DType::kF32, 760, "head_rows_sm80_short"}};
  const Case cases[] = {{DType::kBF16, 8, "head_rows_sm80_short"},
                        {DType::kBF16, 248, "head_rows_sm80_short"},
                        {DType::kBF16, 400, "head_rows_sm80_short"},
                        {DType::kF32, 1000, "head_rows_sm80_short"},
                        {DType::kF32, 1544, "head_rows_sm80_short"},
                        {DType::kBF16, 2000, "head_rows_sm80_short"},
                        {DType::kF16, 4088, "head_rows_sm80_short"},
                        {DType::kBF16, 4104, "head_rows_sm90_cluster"},
                        {DType::kBF16, 4101, "head_rows_sm90_cluster"},
                        {DType::kF32, 4101, "head_rows_sm90_cluster"}};
  std::vector<std::pair<std::vector<std::string>, Case>> mixes;
  for (const Case& each : cases) mixes.push_back({{"ce", "z"}, each});
  for (const Case& each : with_teacher) {
    mixes.push_back({{"kd_fkl", "ce"}, each});
    mixes.push_back({{"kd_rkl"}, each});
    mixes.push_back({{"kd_ce", "z"}, each});
    mixes.push_back({{"kd_tempered_fkl", "ce"}, each});
  }
  for (const auto& [names, each] : mixes) {
    const auto& [dtype, vocab, kernel] = each;
    RandomHead head = draw(names, rng, 37, vocab, dtype);
    if (below(rng, 4) == 0) head.config.options.softcap = 3;
    temper(head, below(rng, 2) == 0 ? 4 : 1.3);
    for (int64_t r = 0; r < 37; r += 3) head.inputs.labels[r] = -100;
    for (const bool added : {false, true}) {
      // Short rows of several strips are chosen, and not forced, for they are not for all.
      const bool chosen = kernel == std::string("head_rows_sm80_short");
      DeviceOptions options = {.dtype = dtype, .kernel = chosen ? "" : kernel, .in_place = !added};
      options.accumulate = added;
      options.row_outputs = false;
      const DeviceResult result = run_on_device(head.config, head.inputs, options);
      EXPECT_EQ(result.kernel, kernel) << vocab;
      EXPECT_TRUE(result.padding_untouched) << vocab;
      options.kernel = "head_rows_sm80_streamed";
      expect_same(run_on_device(head.config, head.inputs, options), result,
                  names[0] + " " + std::string(name_of(dtype)) + " " + std::to_string(vocab) +
                      (added ? " added" : " in place"));
    }
  }
}

// Rows of whose 16-byte words others have a part: their own words, their neighbours' and those that
// lie across the ends of strips, of warps and of blocks. What leaks from a neighbour shows, for
// rows are high and low in turn and have spikes beside every end.
TEST_F(CudaHeadBits, DoNotDependOnTheShiftOfTheirWords) {
  const struct {
    std::vector<std::string> names;
    double softcap;
  } mixes[] = {{{"ce", "z", "grpo_1"}, 0},     {{"kd_fkl", "ce"}, 0},
               {{"kd_tempered_fkl", "ce"}, 0}, {{"kd_rkl"}, 0},
               {{"kd_jsd", "ce"}, 0},          {{"kd_rkl", "ce"}, 30}};
  const struct {
    int64_t vocab;
    int cluster;
  } cases[] = {{1, 1},    {3, 1},    {7, 1},     {8, 1},    {9, 1},    {255, 1},
               {256, 1},  {257, 1},  {1281, 1},  {2055, 1}, {4097, 2}, {5120, 4},
               {5121, 4}, {9001, 2}, {12289, 8}, {16391, 4}};
  constexpr int64_t kRows = 17;
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const auto& [names, softcap] : mixes) {
      for (const auto& [vocab, cluster] : cases) {
        RandomHead head = draw(names, rng, kRows, vocab, dtype);
        temper(head, vocab % 2 == 0 ? 2 : 1.3);
        head.config.options.softcap = softcap;
        for (int64_t r = 0; r < kRows; ++r) {
          for (int64_t j = 0; j < vocab; ++j) {
            const int64_t to_end = std::min((j + 8) % 256, vocab - 1 - j);
            const double spike = to_end < 16 && below(rng, 3) == 0 ? 8 : 0;
            for (auto* const matrix : {&head.inputs.logits, &head.inputs.teachers[0].logits}) {
              (*matrix)[r * vocab + j] += (r % 2 == 0 ? 20 : -20) + spike;
            }
          }
          if (r % 5 == 4) continue;  // some rows do not count
          // The labels of others lie where words are shared.
          const int64_t ends[] = {0, 1, 7, 255, 256, 259, vocab - 2, vocab - 1};
          head.inputs.labels[r] = std::clamp<int64_t>(ends[below(rng, 8)], 0, vocab - 1);
        }
        store_inputs(head.inputs, dtype);
        const int64_t per_word = 16 / size_of(dtype);
        const Placement whole = {.pad = -vocab & (per_word - 1)};
        const DeviceOptions plain = {.dtype = dtype,
                                     .tuning = {.cluster = cluster},
                                     .row_outputs = false,
                                     .entropy = false,
                                     .logits = whole,
                                     .teacher = whole,
                                     .gradient_at = whole};
        DeviceOptions streamed = plain;
        streamed.kernel = "head_rows_sm80_streamed";
        streamed.tuning = {};
        const DeviceResult first = run_on_device(head.config, head.inputs, streamed);
        const auto same = [&](const DeviceOptions& options, const std::string& what) {
          const DeviceResult result = run_on_device(head.config, head.inputs, options);
          EXPECT_EQ(result.kernel, "head_rows_sm90_cluster") << result.planned.to_string();
          EXPECT_TRUE(result.padding_untouched);
          const std::string where = names[0] + " " + std::string(name_of(dtype)) + " " +
                                    std::to_string(vocab) + ": " + what;
          if (options.gradient) {
            expect_same(first, result, where);
          } else {
            EXPECT_EQ(bits(first.terms), bits(result.terms)) << where;
          }
        };
        for (const int64_t pad : {int64_t{0}, whole.pad, int64_t{3}}) {
          for (const int64_t shift : {0, 1, 3, 6}) {
            DeviceOptions options = plain;
            options.logits = options.teacher = options.gradient_at = {.pad = pad, .shift = shift};
            const std::string what =
                "pad " + std::to_string(pad) + ", shift " + std::to_string(shift);
            same(options, what);
            options.in_place = true;
            same(options, what + ", in place");
            options.in_place = options.gradient = false;
            same(options, what + ", forward");
          }
        }
        if (HasFailure()) return;
      }
    }
  }
}

// The entropy is summed with the softmax, or by a second pass where arg max is asked for,
// and nothing else of a row hangs on that.
TEST_F(CudaHeadBits, AskingForTheEntropyChangesNothingElse) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const double softcap : {0.0, 3.0}) {
      for (const int64_t vocab : {1000, 5000, 50257, 151936}) {
        RandomHead head = draw({"ce", "z", "grpo_1", "gspo_0"}, rng, 4, vocab, dtype);
        head.config.options.softcap = softcap;
        for (const char* kernel :
             {"head_rows_sm90_cluster", "head_rows_sm80_streamed", "head_rows_sm80_short"}) {
          if (vocab > 1024 && kernel == std::string("head_rows_sm80_short")) continue;
          for (const int64_t shift : {0, 3}) {
            DeviceOptions options = {.dtype = dtype, .kernel = kernel, .argmax = false};
            options.logits = {.pad = shift, .shift = shift};
            const DeviceResult with_entropy = run_on_device(head.config, head.inputs, options);
            options.gradient = false;
            const DeviceResult forward = run_on_device(head.config, head.inputs, options);
            options.gradient = options.argmax = true;
            DeviceResult with_both = run_on_device(head.config, head.inputs, options);
            options.entropy = options.argmax = false;
            DeviceResult without = run_on_device(head.config, head.inputs, options);
            const std::string where = std::string(name_of(dtype)) + " " + kernel + " vocab " +
                                      std::to_string(vocab) + " shift " + std::to_string(shift);
            ASSERT_EQ(with_entropy.entropy.size(), 4u) << with_entropy.planned.to_string();
            EXPECT_EQ(bits(forward.entropy), bits(with_entropy.entropy)) << where;
            EXPECT_EQ(bits(forward.terms), bits(with_entropy.terms)) << where;
            with_both.argmax.clear();
            with_both.entropy = without.entropy = with_entropy.entropy;
            expect_same(with_entropy, without, where);
            expect_same(with_entropy, with_both, where + " with arg max");
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// A NaN, an infinity, and a row of nothing but -inf, in the last column's strip.
TEST_F(CudaHeadBits, TheEntropyOfNoDistributionIsNaN) {
  for (const char* kernel : {"head_rows_sm90_cluster", "head_rows_sm80_streamed"}) {
    for (const bool argmax : {true, false}) {
      for (const double bad : {double{NAN}, double{INFINITY}, -double{INFINITY}}) {
        RandomHead head = draw({"ce"}, rng, 20, 7777, DType::kBF16);
        head.inputs.labels[8] = 3;
        double* const row = head.inputs.logits.data() + 8 * 7777;
        row[7776] = bad;
        if (std::isinf(bad) && bad < 0) std::fill(row, row + 7777, bad);
        const DeviceResult result = run_on_device(
            head.config, head.inputs, {.dtype = DType::kBF16, .kernel = kernel, .argmax = argmax});
        ASSERT_TRUE(result.ran.ok()) << result.ran.to_string();
        for (int64_t r = 0; r < 20; ++r) {
          EXPECT_EQ(std::isnan(result.entropy[r]), r == 8) << kernel << " " << bad << " row " << r;
        }
      }
    }
  }
}

// Clusters take rows as they come to them, those that count and those that do not: each
// once, from fewer rows than there are clusters to several for each; in clusters of one,
// two and eight blocks and one, two and four groups of warps; with a second pass for
// outputs and without, and with the entropy of the first.
TEST_F(CudaHeadBits, EveryRowIsTakenOnce) {
  const struct {
    int64_t vocab;
    int cluster;
    std::vector<int64_t> n_tok;
  } cases[] = {{1100, 1, {1, 5, 133, 1500}}, {4099, 1, {133, 700}},       {9001, 1, {133, 700}},
               {9001, 2, {1, 133, 700}},     {9001, 8, {1, 5, 133, 700}}, {41000, 2, {200}}};
  for (const auto& [vocab, cluster, counts] : cases) {
    for (const int64_t n_tok : counts) {
      RandomHead head = draw({"ce", "grpo_0"}, rng, n_tok, vocab, DType::kBF16);
      head.inputs.n_segments = 0;
      head.inputs.segments.clear();
      for (int64_t& label : head.inputs.labels) label = below(rng, vocab);
      const std::vector<int64_t> labels = head.inputs.labels;
      for (const int period : {1, 3, 10000}) {  // the last: no row counts
        for (int64_t r = 0; r < n_tok; ++r) {
          head.inputs.labels[r] = (r + 1) % period == 0 ? labels[r] : -100;
        }
        const DeviceOptions plain = {.dtype = DType::kBF16};
        DeviceOptions added = plain, forward = plain, in_place = plain, entropy = plain;
        added.accumulate = true;
        forward.gradient = forward.row_outputs = false;
        in_place.in_place = true;
        in_place.row_outputs = false;
        entropy.argmax = false;
        DeviceOptions scores = entropy;
        scores.gradient = false;
        for (DeviceOptions options : {plain, added, forward, in_place, entropy, scores}) {
          options.kernel = "head_rows_sm80_streamed";
          const DeviceResult streamed = run_on_device(head.config, head.inputs, options);
          options.kernel = "head_rows_sm90_cluster";
          options.tuning = {.cluster = cluster};
          const DeviceResult kept = run_on_device(head.config, head.inputs, options);
          ASSERT_EQ(kept.kernel, "head_rows_sm90_cluster") << kept.planned.to_string();
          expect_same(streamed, kept,
                      std::to_string(n_tok) + " x " + std::to_string(vocab) + ", every " +
                          std::to_string(period) + "th, cluster " + std::to_string(cluster));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// So many rows for blocks alone that they take four at a time, and the last of them fewer.
TEST_F(CudaHeadBits, RowsOfABlockAloneTakenSeveralAtATime) {
  constexpr int64_t kRows = 34'001, kVocab = 1031;
  RandomHead head = draw({"ce"}, rng, kRows, kVocab, DType::kBF16);
  for (int64_t r = 0; r < kRows; ++r) {
    head.inputs.labels[r] = r % 5 == 3 ? -100 : below(rng, kVocab);
  }
  for (const bool gradient : {true, false}) {
    DeviceOptions options = {.dtype = DType::kBF16,
                             .kernel = "head_rows_sm80_streamed",
                             .gradient = gradient,
                             .row_outputs = false};
    const DeviceResult streamed = run_on_device(head.config, head.inputs, options);
    options.kernel = "head_rows_sm90_cluster";
    options.tuning = {.cluster = 1};
    const DeviceResult kept = run_on_device(head.config, head.inputs, options);
    ASSERT_EQ(kept.kernel, "head_rows_sm90_cluster") << kept.planned.to_string();
    expect_same(streamed, kept, gradient ? "with a gradient" : "forward");
  }
}

// A row's results do not depend on the rows beside it; every term divides by a given
// number.
TEST_F(CudaHeadBits, DoNotDependOnTheBatch) {
  for (const auto& names : {std::vector<std::string>{"ce", "z", "grpo_0"}, kMixes[1], kMixes[2],
                            kMixes[4], kMixes[5]}) {
    RandomHead head = draw(names, rng, 300, 4099, DType::kBF16);
    for (LossTerm& term : head.config.terms) term.divisor = 3;
    const DeviceResult all = run_on_device(head.config, head.inputs, {.dtype = DType::kBF16});
    for (const int64_t first_row : {int64_t{0}, int64_t{131}, int64_t{299}}) {
      const int64_t n_rows = std::min<int64_t>(17, 300 - first_row);
      RandomHead part = head;
      part.inputs.n_segments = 0;
      part.inputs.segments.clear();
      const DeviceResult some =
          run_on_device(part.config, part.inputs,
                        {.dtype = DType::kBF16, .first_row = first_row, .n_rows = n_rows});
      ASSERT_TRUE(some.ran.ok()) << some.ran.to_string();
      for (int64_t r = 0; r < n_rows; ++r) {
        EXPECT_EQ(some.lse[r], all.lse[first_row + r]);
        EXPECT_EQ(some.token_loss[r], all.token_loss[first_row + r]);
      }
      const int64_t row_bytes = 4099 * 2;
      EXPECT_TRUE(std::equal(some.gradient_bits.begin(), some.gradient_bits.end(),
                             all.gradient_bits.begin() + first_row * row_bytes));
    }
  }
}

TEST_F(CudaHeadBits, AnEqualTeacherGivesExactlyZero) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const char* name : {"kd_fkl", "kd_rkl", "kd_jsd"}) {
      for (const char* kernel : {"head_rows_sm90_cluster", "head_rows_sm80_streamed"}) {
        RandomHead head = draw({name}, rng, 5, 9001, dtype);
        head.inputs.teachers[0].logits = head.inputs.logits;
        const DeviceResult result =
            run_on_device(head.config, head.inputs, {.dtype = dtype, .kernel = kernel});
        ASSERT_TRUE(result.ran.ok());
        EXPECT_EQ(result.terms[0], 0) << name;
        for (const double g : result.gradient) ASSERT_EQ(g, 0) << name;
      }
    }
  }
}

// Several rows for each cluster, of one block and of four.
TEST_F(CudaHeadBits, IgnoredRowsAreNotRead) {
  constexpr int64_t kRows = 200;
  const struct {
    const char* kernel;
    int cluster;
    int64_t vocab;  // odd: rows share words
  } cases[] = {{"head_rows_sm90_cluster", 1, 3000},  {"head_rows_sm90_cluster", 4, 3000},
               {"head_rows_sm90_cluster", 1, 3001},  {"head_rows_sm90_cluster", 4, 3001},
               {"head_rows_sm80_streamed", 0, 3000}, {"head_rows_sm80_streamed", 0, 3001},
               {"head_rows_sm80_short", 0, 512},     {"head_rows_sm80_short", 0, 999}};
  for (const auto& [kernel, cluster, vocab] : cases) {
    RandomHead head = draw({"ce", "z"}, rng, kRows, vocab, DType::kBF16);
    for (int64_t r = 0; r < kRows; ++r) {
      if (r % 3 == 0) head.inputs.labels[r] = -100;
      if (head.inputs.labels[r] >= 0) continue;
      for (int64_t j = 0; j < vocab; ++j) head.inputs.logits[r * vocab + j] = NAN;
    }
    const DeviceResult result =
        run_on_device(head.config, head.inputs,
                      {.dtype = DType::kBF16, .kernel = kernel, .tuning = {.cluster = cluster}});
    ASSERT_EQ(result.kernel, kernel);
    EXPECT_TRUE(result.checked.ok()) << result.checked.to_string();
    EXPECT_TRUE(std::isfinite(result.total[0]));
    for (int64_t r = 0; r < kRows; ++r) {
      if (head.inputs.labels[r] >= 0) continue;
      EXPECT_EQ(result.token_loss[r], 0);
      EXPECT_EQ(result.argmax[r], -1);
      for (int64_t j = 0; j < vocab; ++j) ASSERT_EQ(result.gradient[r * vocab + j], 0);
    }
  }
}

TEST_F(CudaHeadBits, NothingToDoIsZero) {
  RandomHead head = draw({"ce", "z"}, rng, 4, 100, DType::kF32);
  for (int64_t& label : head.inputs.labels) label = -1;
  DeviceResult result = run_on_device(head.config, head.inputs, {});
  EXPECT_EQ(result.total[0], 0);
  EXPECT_EQ(result.n_valid, 0);
  for (const double g : result.gradient) EXPECT_EQ(g, 0);
  head.inputs.n_segments = 0;
  result = run_on_device(head.config, head.inputs, {.n_rows = 0});
  EXPECT_TRUE(result.ran.ok()) << result.ran.to_string();
  EXPECT_EQ(result.total[0], 0);
}

TEST_F(CudaHeadBits, FaultsAreReportedWithTheirRow) {
  for (const char* kernel :
       {"head_rows_sm90_cluster", "head_rows_sm80_streamed", "head_rows_sm80_short"}) {
    const RandomHead clean = draw({"ce", "kd_fkl"}, rng, 20, 777, DType::kBF16);
    const auto check = [&](const RandomHead& head, StatusCode code, const char* text) {
      const DeviceResult result =
          run_on_device(head.config, head.inputs, {.dtype = DType::kBF16, .kernel = kernel});
      EXPECT_EQ(result.checked.code(), code) << result.checked.to_string();
      EXPECT_NE(result.checked.message().find(text), std::string::npos)
          << result.checked.to_string();
      return result;
    };
    RandomHead head = clean;
    head.inputs.labels[4] = head.inputs.labels[6] = 777;
    check(head, kLossTargetOutOfRange, "labels[4]");
    for (const double bad : {double{NAN}, double{INFINITY}}) {
      head = clean;
      head.inputs.logits[8 * 777 + 776] = bad;
      const DeviceResult result = check(head, kCudaNonFinite, "row 8 ");
      EXPECT_TRUE(std::isnan(result.lse[8]));
      EXPECT_TRUE(std::isnan(result.total[0]));
      EXPECT_TRUE(std::isnan(result.gradient[8 * 777]));
    }
    head = clean;
    head.inputs.teachers[0].logits[2 * 777] = NAN;
    check(head, kCudaNonFinite, "row 2 ");
    head = clean;
    for (int64_t j = 0; j < 777; ++j) head.inputs.logits[10 * 777 + j] = -INFINITY;
    const DeviceResult masked =
        run_on_device(head.config, head.inputs, {.dtype = DType::kBF16, .kernel = kernel});
    EXPECT_TRUE(std::isnan(masked.total[0]));
    head = draw({"gspo_0"}, rng, 20, 777, DType::kBF16);
    head.inputs.segments[2] = 4;
    check(head, kHeadBadSegments, "segments[2]");
    head = draw({"dpo"}, rng, 20, 777, DType::kBF16);
    head.inputs.pairs[3] = 9;
    check(head, kHeadBadPairs, "pair 1");
    head = draw({"ce"}, rng, 33'000, 3, DType::kBF16);
    head.inputs.labels[32'999] = head.inputs.labels[20'001] = 3;
    check(head, kLossTargetOutOfRange, "labels[20001]");
  }
}

TEST_F(CudaHeadBits, RefusesInputsThatDoNotMatchThePlan) {
  const RandomHead clean = draw({"ce", "grpo_0"}, rng, 4, 100, DType::kF32);
  RandomHead head = clean;
  head.inputs.labels.clear();
  EXPECT_EQ(run_on_device(head.config, head.inputs, {.row_outputs = false}).ran.code(),
            kHeadMissingInput);
  head = clean;
  head.inputs.advantages.resize(3);
  EXPECT_EQ(run_on_device(head.config, head.inputs, {}).ran.code(), kLossLengthMismatch);
  head = clean;
  head.inputs.n_segments = 5;
  EXPECT_EQ(run_on_device(head.config, head.inputs, {}).ran.code(), kHeadBadSegments);
  head = clean;
  head.inputs.upstream = NAN;
  EXPECT_EQ(run_on_device(head.config, head.inputs, {}).ran.code(), kLossNonFiniteScalar);
  EXPECT_EQ(
      run_on_device(clean.config, clean.inputs, {.in_place = true, .accumulate = true}).ran.code(),
      kHeadShapeMismatch);
}

// More elements than 2^31: the last rows repeat the first, and so must their gradients.
TEST_F(CudaHeadBits, OffsetsOf64Bits) {
  constexpr int64_t kVocab = 151936, kBlock = 20, kRepeats = 710;
  constexpr int64_t kRows = kRepeats * kBlock;
  static_assert(kRows * kVocab > int64_t{1} << 31);
  const RandomHead head = draw({"ce"}, rng, kBlock, kVocab, DType::kBF16);
  const DeviceMatrix block(head.inputs.logits.data(), kBlock, kVocab, DType::kBF16, {});
  const size_t block_bytes = static_cast<size_t>(kBlock * kVocab * 2);
  DeviceMemory logits(block_bytes * kRepeats);
  std::vector<int64_t> labels;
  for (int64_t i = 0; i < kRepeats; ++i) {
    expect_cuda(cudaMemcpy(logits.data<uint8_t>() + static_cast<size_t>(i) * block_bytes,
                           block.view.data, block_bytes, cudaMemcpyDeviceToDevice));
    labels.insert(labels.end(), head.inputs.labels.begin(), head.inputs.labels.end());
  }
  DeviceMemory device_labels(labels);
  lossk::HeadConfig config = head.config;
  config.teachers.clear();
  for (const char* kernel : {"head_rows_sm90_cluster", "head_rows_sm80_streamed"}) {
    const auto plan = lossk::plan_cuda(
        {kRows, 0, kVocab}, config,
        {.input_dtype = DType::kBF16, .grad_dtype = DType::kBF16, .d_logits = true},
        {.kernel = kernel});
    ASSERT_TRUE(plan.ok());
    DeviceMemory workspace(static_cast<size_t>(plan->workspace_bytes()));
    DeviceMemory gradient(block_bytes * kRepeats);
    lossk::Inputs inputs;
    inputs.logits = {logits.data(), DType::kBF16, kRows, kVocab, kVocab};
    inputs.labels = {device_labels.data(), 8, kRows, 1};
    lossk::Outputs outputs;
    outputs.d_logits = {gradient.data(), DType::kBF16, kRows, kVocab, kVocab};
    const std::span<std::byte> work{workspace.data<std::byte>(), workspace.bytes()};
    ASSERT_TRUE(plan->run(nullptr, inputs, outputs, work).ok());
    ASSERT_TRUE(plan->check(nullptr, work).ok());
    std::vector<uint8_t> first(block_bytes), last(block_bytes);
    expect_cuda(cudaMemcpy(first.data(), gradient.data(), block_bytes, cudaMemcpyDeviceToHost));
    expect_cuda(cudaMemcpy(last.data(), gradient.data<uint8_t>() + (kRepeats - 1) * block_bytes,
                           block_bytes, cudaMemcpyDeviceToHost));
    EXPECT_TRUE(first == last);
    EXPECT_GT(std::count_if(first.begin(), first.end(), [](uint8_t b) { return b != 0; }), 1000);
  }
}

TEST_F(CudaHeadBits, RunsInAGraph) {
  const RandomHead head = draw({"ce", "gspo_0"}, rng, 50, 5001, DType::kBF16);
  const DeviceResult plain = run_on_device(head.config, head.inputs, {.dtype = DType::kBF16});
  lossk::HeadConfig config = head.config;
  config.teachers.clear();
  const auto plan = lossk::plan_cuda(
      {50, 0, 5001}, config,
      {.input_dtype = DType::kBF16, .grad_dtype = DType::kBF16, .d_logits = true}, {});
  ASSERT_TRUE(plan.ok());
  const DeviceMatrix logits(head.inputs.logits.data(), 50, 5001, DType::kBF16, {});
  DeviceMatrix gradient(nullptr, 50, 5001, DType::kBF16, {});
  DeviceInputs held;
  DeviceMemory workspace(static_cast<size_t>(plan->workspace_bytes())), terms(16);
  lossk::Inputs inputs;
  inputs.logits = logits.view;
  inputs.labels = held.ids(head.inputs.labels, 0);
  inputs.token_weights = held.floats(head.inputs.token_weights, 0);
  inputs.class_weights = held.floats(head.inputs.class_weights, 0);
  inputs.advantages = held.floats(head.inputs.advantages, 0);
  inputs.old_log_probs = held.floats(head.inputs.old_log_probs, 0);
  inputs.reference_log_probs = held.floats(head.inputs.reference_log_probs, 0);
  inputs.segments = held.ids(head.inputs.segments, 0);
  inputs.n_segments = head.inputs.n_segments;
  lossk::Outputs outputs;
  outputs.d_logits = gradient.view;
  outputs.terms = {terms.data<double>(), 2};

  cudaStream_t stream;
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  expect_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  const Status status =
      plan->run(stream, inputs, outputs, {workspace.data<std::byte>(), workspace.bytes()});
  expect_cuda(cudaStreamEndCapture(stream, &graph));
  ASSERT_TRUE(status.ok()) << status.to_string();
  expect_cuda(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 3; ++replay) expect_cuda(cudaGraphLaunch(executable, stream));
  expect_cuda(cudaStreamSynchronize(stream));
  bool untouched = true;
  EXPECT_EQ(gradient.rows(untouched), plain.gradient_bits);
  EXPECT_EQ(bits(terms.read<double>()), bits(plain.terms));
  expect_cuda(cudaGraphExecDestroy(executable));
  expect_cuda(cudaGraphDestroy(graph));
  expect_cuda(cudaStreamDestroy(stream));
}

}  // namespace
}  // namespace ullage::test
