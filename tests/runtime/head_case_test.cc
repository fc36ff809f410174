// The JSON face of the loss algebra: round trips, and what is refused.
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "runtime/head_case_run.h"
#include "runtime/head_config_json.h"
#include "support/seed.h"

namespace ullage::test {
namespace {

using nlohmann::json;

Status parse_status(const std::string& text) {
  const auto config = runtime::head_config_from_json(text);
  return config ? Status(kHeadOk) : config.status();
}

TEST(HeadConfigJson, RoundTripsEveryField) {
  const std::string text = R"({"losses": [
    {"name": "a", "kind": "cross_entropy", "weight": 0.1, "label_smoothing": 0.3, "divisor": 7},
    {"name": "b", "kind": "z_loss", "weight": -1e-300, "mask": "own"},
    {"name": "c", "kind": "distillation", "weight": 1, "divergence": "jensen_shannon",
     "teacher": 1, "temperature": 1.5, "student_temperature": 2.5, "t_squared": true, "beta": 0.3,
     "top_k_tail": "renormalized", "truncate_teacher": true, "mask": "none"},
    {"name": "d", "kind": "gspo", "weight": 1, "epsilon_low": 0.1, "epsilon_high": 0.28,
     "kl_beta": 0.04, "normalizer": "max_length", "max_length": 4096, "logits_scale": 0.7},
    {"name": "e", "kind": "cispo", "weight": 1, "normalizer": "sequence_means"},
    {"name": "f", "kind": "dpo", "weight": 1, "beta": 0.1},
    {"name": "g", "kind": "grpo", "weight": 0.0}],
    "teachers": [{"kind": "top_k", "k": 8},
                 {"kind": "hidden", "vocab": 100, "d_model": 16, "dtype": "bf16",
                  "weight_dtype": "f16"}],
    "logits_scale": 1.3, "softcap": 30.0, "bias": true, "adapter_rank": 4, "adapter_scale": 0.5,
    "vocab_offset": 50, "group_vocab": 300})";
  const auto config = runtime::head_config_from_json(text);
  ASSERT_TRUE(config) << config.status().to_string();
  EXPECT_EQ(config->terms[2].divergence, lossk::Divergence::kJensenShannon);
  EXPECT_EQ(config->terms[3].max_length, 4096);
  EXPECT_EQ(json::parse(runtime::head_config_to_json(*config)), json::parse(text));
}

TEST(HeadConfigJson, DefaultsAndMasked) {
  const auto config = runtime::head_config_from_json(
      R"({"losses": [{"kind": "z_loss", "masked": true}, {"kind": "z_loss", "masked": false}]})");
  ASSERT_TRUE(config);
  EXPECT_EQ(config->terms[0].mask, lossk::RowMask::kAuto);
  EXPECT_EQ(config->terms[1].mask, lossk::RowMask::kNone);
  EXPECT_EQ(config->terms[0].name, "z_loss");
  EXPECT_EQ(lossk::validate(*config).code(), kHeadDuplicateName);
}

TEST(HeadConfigJson, RefusesWithTheNearestName) {
  const Status field = parse_status(R"({"losses": [{"kind": "grpo", "epsilon_hihg": 1}]})");
  EXPECT_EQ(field.code(), kHeadBadConfig);
  EXPECT_NE(field.message().find("losses[0]: field 'epsilon_hihg'"), std::string::npos);
  EXPECT_NE(field.message().find("did you mean 'epsilon_high'?"), std::string::npos);
  const Status kind = parse_status(R"({"losses": [{"kind": "cross_entrpoy"}]})");
  EXPECT_EQ(kind.code(), kHeadUnknownKind);
  EXPECT_NE(kind.message().find("did you mean 'cross_entropy'?"), std::string::npos);
  EXPECT_EQ(parse_status(R"({"losses": [{"kind": "distillation", "divergence": "kl"}]})").code(),
            kHeadUnknownKind);
}

TEST(HeadConfigJson, RefusesWhatIsMalformed) {
  for (const char* text :
       {"", "[", "3", "[]", "{\"losses\": 3}", "{\"losses\": [3]}", "{\"losses\": [{}]}",
        R"({"losses": [{"kind": "grpo", "weight": "heavy"}]})",
        R"({"losses": [{"kind": "grpo", "max_length": 1.5}]})",
        R"({"losses": [{"kind": "grpo", "max_length": 18446744073709551615}]})",
        R"({"losses": [{"kind": "grpo", "teacher": 4294967296}]})",
        R"({"losses": [{"kind": "z_loss", "masked": 1}]})",
        R"({"losses": [{"kind": "z_loss", "masked": true, "mask": "own"}]})",
        R"({"losses": [{"kind": 7}]})", R"({"losses": [{"kind": "grpo", "name": 7}]})",
        R"({"teachers": {}})", R"({"loss": []})"}) {
    EXPECT_EQ(parse_status(text).code(), kHeadBadConfig) << text;
  }
}

json run_case(const std::string& text) {
  const auto cases = runtime::head_cases_from_json(text);
  EXPECT_TRUE(cases);
  if (!cases) return {};
  const auto& head = cases->cases[0];
  const auto result = head ? runtime::run_head_case(*head, {.reference = true}) : head.status();
  return json::parse(runtime::head_result_to_json(head, result, {.rows = true, .metrics = true}));
}

TEST(HeadCase, FromHiddenWithEverythingGiven) {
  const json out = run_case(R"({"hidden": [[1, 0]], "weight": [[1, 0], [0, 1]], "labels": [0],
      "adapter_a": [[1, 1]], "adapter_b": [[1], [0]], "bias": [0, 0], "upstream": 1,
      "losses": [{"kind": "cross_entropy"}]})");
  ASSERT_EQ(out["status"], 680) << out;
  EXPECT_NEAR(out["total"].get<double>(), .126928, 6e-7);
  EXPECT_NEAR(out["d_adapter_b"][0][0].get<double>(), -.119203, 6e-7);
  EXPECT_NEAR(out["d_bias"][1].get<double>(), .119203, 6e-7);
  EXPECT_EQ(out["argmax"][0], 0);
}

TEST(HeadCase, TeachersInEveryForm) {
  const std::string head = R"({"logits": [[1, 2, 3]], "losses": [{"kind": "distillation",
      "divergence": "forward_kl"}], )";
  EXPECT_NEAR(run_case(head + R"("teacher_logits": [[3, 1, 0]]})")["total"].get<double>(), 1.685124,
              6e-7);
  EXPECT_NEAR(run_case(head + R"("teachers": [{"logits": [[3, 1, 0]]}]})")["total"].get<double>(),
              1.685124, 6e-7);
  EXPECT_NEAR(
      run_case(head + R"("teacher_hidden": [[1]], "teacher_weight": [[3], [1], [0]]})")["total"]
          .get<double>(),
      1.685124, 6e-7);
  const json top = run_case(head + R"("teacher_ids": [[0]], "teacher_log_probs": [[-0.1]]})");
  EXPECT_EQ(top["status"], 680) << top;
}

TEST(HeadCase, NonFiniteNumbersBothWays) {
  const json out = run_case(R"({"logits": [[0, "-inf"], [0, "nan"]], "labels": [0, 0],
      "losses": [{"kind": "cross_entropy"}]})");
  EXPECT_EQ(out["total"], "nan");
  EXPECT_EQ(out["grad_logits"][0], (json{0.0, 0.0}));
  EXPECT_EQ(out["grad_logits"][1][1], "nan");
}

TEST(HeadCase, RefusalsStayWithTheirCase) {
  const struct {
    const char* text;
    int status;
  } cases[] = {
      {R"({"logits": [[1, 2], [3]], "labels": [0, 0], "losses": [{"kind": "z_loss"}]})", 695},
      {R"({"logits": [[1, 2]], "labels": [2], "losses": [{"kind": "cross_entropy"}]})", 586},
      {R"({"logits": [[1, 2]], "losses": [{"kind": "cross_entropy"}]})", 683},
      {R"({"logits": [[1, 2]], "losses": [{"kind": "z_loss"}], "lables": [0]})", 699},
      {R"({"logits": [[1, "x"]], "losses": [{"kind": "z_loss"}]})", 699},
      {R"({"logits": [1, 2], "losses": [{"kind": "z_loss"}]})", 699},
      {R"({"logits": [], "losses": [{"kind": "z_loss"}]})", 581},
      {R"({"logits": [[1]], "labels": [[[0]]], "losses": [{"kind": "z_loss"}]})", 699},
      {R"({"logits": [[1]], "hidden": [[1]], "losses": [{"kind": "z_loss"}]})", 699},
      {R"({"logits": [[1]], "labels": [0], "segments": [9223372036854775807], "losses": [{"kind": "z_loss"}]})",
       692}};
  for (const auto& [text, status] : cases) EXPECT_EQ(run_case(text)["status"], status) << text;
  EXPECT_FALSE(runtime::head_cases_from_json("{"));
  EXPECT_FALSE(runtime::head_cases_from_json("[]"));
  EXPECT_FALSE(runtime::head_cases_from_json(R"({"cases": 3})"));
  const auto listed = runtime::head_cases_from_json(R"({"cases": [3, {}]})");
  ASSERT_TRUE(listed);
  EXPECT_EQ(listed->cases.size(), 2u);
  EXPECT_FALSE(listed->cases[0]);
}

// Documents with bytes replaced, dropped and doubled are answered or refused, and nothing worse
// (the sanitizers watch).
TEST(HeadCase, MutatedDocumentsAreAnsweredOrRefused) {
  const std::string text = R"({"hidden": [[1, 0.5], [2, -1]], "weight": [[1, 0], [0, 1], [2, 3]],
      "bias": [0, 1, 2], "adapter_a": [[1, 2]], "adapter_b": [[1], [2], [3]], "labels": [0, -1],
      "segments": [0, 1], "n_segments": 2, "pairs": [[0, 1]], "mask": [1, 0], "softcap": 3,
      "teachers": [{"ids": [[0, 1], [2, 1]], "log_probs": [[-1, -2], [-1, "-inf"]]}],
      "advantages": [1, 2], "old_log_probs": [-1, -1], "reference_log_probs": [-1, -1],
      "losses": [{"name": "a", "kind": "gspo"}, {"name": "b", "kind": "dpo"},
                 {"name": "c", "kind": "distillation", "mask": "own"},
                 {"name": "d", "kind": "cross_entropy", "label_smoothing": 0.1}]})";
  ASSERT_EQ(run_case(text)["status"], 680) << run_case(text);
  Rng rng(test_seed());
  int answered = 0;
  for (int round = 0; round < 5000; ++round) {
    std::string mutated = text;
    for (int64_t n = 1 + below(rng, 3); n > 0; --n) {
      const auto at = static_cast<size_t>(below(rng, static_cast<int64_t>(mutated.size())));
      const int64_t kind = below(rng, 3);
      if (kind == 0) mutated[at] = "0123456789-.,[]{}\"aei"[below(rng, 21)];
      if (kind == 1) mutated.erase(at, 1);
      if (kind == 2) mutated.insert(at, 1, mutated[at]);
    }
    const auto cases = runtime::head_cases_from_json(mutated);
    if (!cases) continue;
    for (const auto& head : cases->cases) {
      if (!head) continue;
      const bool ran = runtime::run_head_case(*head, {}).ok();
      EXPECT_EQ(runtime::run_head_case(*head, {.reference = true}).ok(), ran) << mutated;
      answered += ran;
    }
  }
  EXPECT_GT(answered, 100);
}

// Two shards of z = [1, 2, 3 | 0], label 3: first their statistics, then with the group's the
// losses.
TEST(HeadCase, AShardsStatisticsAndThenItsLosses) {
  const double rest = std::log1p(std::exp(-1) + std::exp(-2) + std::exp(-3));
  json shards[2] = {{{"logits", {{1, 2, 3}}}, {"vocab_offset", 0}},
                    {{"logits", {{0}}}, {"vocab_offset", 3}}};
  for (json& shard : shards) {
    shard.update({{"labels", {3}}, {"group_vocab", 4}, {"losses", {{{"kind", "cross_entropy"}}}}});
    for (const bool reference : {false, true}) {
      const auto answer = [&] {
        const auto parsed = runtime::head_cases_from_json(shard.dump());
        const auto& one = parsed->cases[0];
        return json::parse(runtime::head_result_to_json(
            one, runtime::run_head_case(*one, {.reference = reference}), {}));
      };
      shard.erase("group_shift");
      shard.erase("group_log_sum");
      shard.erase("group_label_log_prob");
      const bool here = shard["vocab_offset"] == 3;
      json own = answer();
      EXPECT_FALSE(own.contains("total"));
      EXPECT_EQ(own["shift"][0], here ? 0 : 3);
      EXPECT_EQ(own["label_log_prob"][0], here ? json(0) : json("-inf"));
      shard.update(
          {{"group_shift", {3}}, {"group_log_sum", {rest}}, {"group_label_log_prob", {-3 - rest}}});
      own = answer();
      EXPECT_NEAR(own["total"], 3 + rest, 1e-12) << own.dump();
      EXPECT_NEAR(own["grad_logits"][0][0], std::exp((here ? -3 : -2) - rest) - (here ? 1 : 0),
                  1e-12);
    }
  }
}

}  // namespace
}  // namespace ullage::test
