// Every refusal of the loss algebra, provoked; and that each names the field and what is accepted.
#include "contract/head_validate.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>

namespace ullage::lossk {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInf = std::numeric_limits<double>::infinity();

void expect_refused(const Status& status, StatusCode code, const std::string& names) {
  EXPECT_EQ(status.code(), code) << status.to_string() << " instead of " << code << " for "
                                 << names;
  EXPECT_NE(status.message().find(names), std::string::npos) << status.to_string();
  EXPECT_TRUE(status.message().find("accepted") != std::string::npos ||
              status.message().find("need") != std::string::npos ||
              status.message().find("request") != std::string::npos)
      << status.to_string();
}

// --- The configuration ---------------------------------------------------------------------------

LossTerm distillation() { return {.name = "kd", .kind = LossKind::kDistillation}; }

struct BadTerm {
  const char* names;  // what the message must hold
  StatusCode code;
  LossTerm term;
};

TEST(HeadValidate, RefusesMeaninglessTerms) {
  const auto with = [](LossKind kind, const std::function<void(LossTerm&)>& change) {
    LossTerm term = {.name = "t", .kind = kind};
    change(term);
    return term;
  };
  using T = LossTerm;
  const LossKind ce = LossKind::kCrossEntropy, kd = LossKind::kDistillation, grpo = LossKind::kGrpo,
                 dpo = LossKind::kDpo;
  std::vector<BadTerm> bad;
  const auto add = [&](StatusCode code, const char* names, LossKind kind,
                       const std::function<void(LossTerm&)>& change) {
    bad.push_back({names, code, with(kind, change)});
  };
  add(kHeadUnknownKind, "kind", ce, [](T& t) { t.kind = static_cast<LossKind>(7); });
  add(kHeadUnknownKind, "divergence", kd, [](T& t) { t.divergence = static_cast<Divergence>(-1); });
  add(kHeadUnknownKind, "mask", ce, [](T& t) { t.mask = static_cast<RowMask>(4); });
  add(kHeadUnknownKind, "normalizer", grpo,
      [](T& t) { t.normalizer = static_cast<PolicyNormalizer>(5); });
  add(kHeadUnknownKind, "top_k_tail", kd, [](T& t) { t.top_k_tail = static_cast<TopKTail>(3); });
  add(kHeadBadConfig, "name", ce, [](T& t) { t.name.clear(); });
  add(kHeadMissingInput, "teacher", kd, [](T& t) { t.teacher = 2; });
  add(kHeadMissingInput, "teacher", kd, [](T& t) { t.teacher = -1; });
  for (const double value : {kNan, kInf, -kInf}) {
    add(kHeadBadWeight, "weight", ce, [=](T& t) { t.weight = value; });
  }
  for (const double value : {0.0, -1.0, kNan, kInf}) {
    add(kHeadBadTemperature, "temperature", kd, [=](T& t) { t.temperature = value; });
    add(kHeadBadTemperature, "student_temperature", kd,
        [=](T& t) { t.student_temperature = value; });
    add(kHeadBadDivisor, "divisor", ce, [=](T& t) { t.divisor = value; });
    add(kHeadBadScale, "logits_scale", ce, [=](T& t) { t.logits_scale = value; });
    add(kHeadBadBeta, "beta", dpo, [=](T& t) { t.beta = value; });
    add(kHeadBadBeta, "beta", kd, [=](T& t) {
      t.divergence = Divergence::kJensenShannon;
      t.beta = value;
    });
  }
  for (const double value : {-1e-9, kNan, kInf}) {
    add(kHeadBadEpsilon, "epsilon_low", grpo, [=](T& t) { t.epsilon_low = value; });
    add(kHeadBadEpsilon, "epsilon_high", grpo, [=](T& t) { t.epsilon_high = value; });
    add(kHeadBadBeta, "kl_beta", grpo, [=](T& t) { t.kl_beta = value; });
  }
  for (const double value : {-1e-9, 1.0000001, kNan}) {
    add(kHeadBadSmoothing, "label_smoothing", ce, [=](T& t) { t.label_smoothing = value; });
  }
  add(kHeadBadBeta, "beta", kd, [](T& t) {
    t.divergence = Divergence::kJensenShannon;
    t.beta = 1;
  });
  add(kHeadBadTemperature, "top-k", kd, [](T& t) {
    t.teacher = 1;
    t.temperature = 2;
  });
  add(kHeadBadDivergence, "reverse_kl", ce, [](T& t) { t.divergence = Divergence::kReverseKl; });
  add(kHeadBadDivergence, "jensen_shannon", ce,
      [](T& t) { t.divergence = Divergence::kJensenShannon; });
  add(kHeadBadDivergence, "forward_kl with smoothing", ce, [](T& t) {
    t.divergence = Divergence::kForwardKl;
    t.label_smoothing = .1;
  });
  add(kHeadBadDivisor, "max_length", grpo,
      [](T& t) { t.normalizer = PolicyNormalizer::kMaxLength; });
  for (const BadTerm& each : bad) {
    HeadConfig config;
    config.terms = {{.name = "first"}, each.term};
    config.teachers = {{.vocab = 5}, {.kind = TeacherKind::kTopK, .k = 2}};
    const Status status = validate(config);
    expect_refused(status, each.code, each.names);
    if (!each.term.name.empty()) {
      EXPECT_NE(status.message().find("term 't'"), std::string::npos) << status.to_string();
    }
  }
}

TEST(HeadValidate, RefusesMeaninglessConfigurations) {
  expect_refused(validate({}), kHeadBadConfig, "terms");
  expect_refused(validate({.terms = {{.name = "a"}, {.name = "b"}, {.name = "a"}}}),
                 kHeadDuplicateName, "'a'");
  expect_refused(validate({.terms = {distillation()}}), kHeadMissingInput, "no teachers");
  const auto teacher = [](Teacher each) {
    return validate({.terms = {{.name = "a"}}, .teachers = {each}});
  };
  expect_refused(teacher({.kind = static_cast<TeacherKind>(3)}), kHeadUnknownKind, "kind");
  expect_refused(teacher({}), kHeadTeacherVocab, "vocab");
  expect_refused(teacher({.kind = TeacherKind::kTopK}), kHeadBadTopK, "k is 0");
  expect_refused(teacher({.kind = TeacherKind::kHidden, .vocab = 5}), kHeadShapeMismatch,
                 "d_model");
  expect_refused(teacher({.vocab = 5, .dtype = static_cast<DType>(9)}), kHeadBadDtype, "dtype");
  const auto options = [](HeadOptions each) {
    return validate({.terms = {{.name = "a"}}, .options = each});
  };
  expect_refused(options({.logits_scale = 0}), kHeadBadScale, "logits_scale");
  expect_refused(options({.softcap = -1}), kHeadBadScale, "softcap");
  expect_refused(options({.softcap = kInf}), kHeadBadScale, "softcap");
  expect_refused(options({.adapter_scale = kNan}), kHeadBadScale, "adapter_scale");
  expect_refused(options({.adapter_rank = -1}), kHeadShapeMismatch, "adapter_rank");
  expect_refused(options({.vocab_offset = -1}), kHeadShapeMismatch, "vocab_offset");
}

// What the seed's system rejects because its kernels cannot works here.
TEST(HeadValidate, AcceptsEveryMix) {
  HeadConfig config;
  for (int kind = 0; kind < 7; ++kind) {
    config.terms.push_back({.name = std::to_string(kind), .kind = static_cast<LossKind>(kind)});
    config.terms.push_back({.name = std::to_string(kind) + " again",
                            .kind = static_cast<LossKind>(kind),
                            .weight = -0.5,
                            .logits_scale = 2});
  }
  config.teachers = {{.vocab = 5}};
  EXPECT_EQ(validate(config).code(), kHeadOk) << validate(config).to_string();
  config.terms = {{.name = "a", .divergence = Divergence::kForwardKl}};
  EXPECT_TRUE(validate(config).ok());
}

// --- The plan ------------------------------------------------------------------------------------

TEST(HeadCheckPlan, RefusesShapesAndRequestsThatDoNotFit) {
  const HeadConfig plain = {.terms = {{.name = "a"}}};
  const auto shape = [&](Shape each) { return check_plan(each, plain, {}); };
  expect_refused(shape({-1, 0, 5}), kLossEmptyDimension, "n_tok");
  expect_refused(shape({1, -1, 5}), kLossEmptyDimension, "d_model");
  expect_refused(shape({1, 0, 0}), kLossEmptyDimension, "vocab");
  expect_refused(shape({int64_t{1} << 40, 0, int64_t{1} << 40}), kLossDimensionTooLarge,
                 "n_tok * vocab");
  expect_refused(shape({1, int64_t{1} << 40, int64_t{1} << 40}), kLossDimensionTooLarge,
                 "vocab * d_model");
  EXPECT_TRUE(shape({0, 0, 1}).ok());

  const Shape logits = {2, 0, 5}, hidden = {2, 3, 5};
  const auto request = [&](const Shape& s, Request each, HeadOptions options = {}) {
    return check_plan(s, {.terms = {{.name = "a"}}, .options = options}, each);
  };
  expect_refused(request(hidden, {.d_logits = true}), kHeadShapeMismatch, "d_logits");
  expect_refused(request(logits, {.d_hidden = true}), kHeadShapeMismatch, "d_hidden");
  expect_refused(request(logits, {.d_weight = true}), kHeadShapeMismatch, "d_weight");
  expect_refused(request(hidden, {.d_bias = true}), kHeadShapeMismatch, "d_bias");
  expect_refused(request(hidden, {.d_adapter = true}), kHeadShapeMismatch, "d_adapter");
  expect_refused(request(logits, {}, {.bias = true}), kHeadShapeMismatch, "bias");
  expect_refused(request(logits, {}, {.adapter_rank = 1}), kHeadShapeMismatch, "adapter_rank");
  expect_refused(request(logits, {}, {.vocab_offset = INT64_MAX - 3}), kHeadShapeMismatch,
                 "vocab_offset");
  expect_refused(request(logits, {.grad_dtype = static_cast<DType>(4)}), kHeadBadDtype, "dtype");

  const auto teacher = [&](Teacher each, bool truncate) {
    LossTerm term = distillation();
    term.truncate_teacher = truncate;
    return check_plan(logits, {.terms = {term}, .teachers = {each}}, {});
  };
  expect_refused(teacher({.vocab = 6}, false), kHeadTeacherVocab, "6");
  expect_refused(teacher({.vocab = 4}, false), kHeadTeacherVocab, "4");
  expect_refused(teacher({.vocab = 4}, true), kHeadTeacherVocab, "4");
  EXPECT_TRUE(teacher({.vocab = 6}, true).ok());
  expect_refused(teacher({.kind = TeacherKind::kTopK, .k = 6}, false), kHeadBadTopK, "6");
}

// --- The inputs ----------------------------------------------------------------------------------

// Four rows, five columns, every kind of term and everything each asks for.
struct HeadRun {
  Shape shape = {4, 0, 5};
  HeadConfig config;
  Request request = {.d_logits = true, .entropy = true, .policy_metrics = true};
  Inputs inputs;
  Outputs outputs;

  std::vector<float> logits = std::vector<float>(20, 0);
  std::vector<float> d_logits = std::vector<float>(20, -7);
  std::vector<int64_t> labels = {0, 4, -100, 2};
  std::vector<double> rows = std::vector<double>(4, -1);
  std::vector<int32_t> segments = {0, 0, 99, 1};
  std::vector<int64_t> pairs = {0, 1};
  std::vector<uint8_t> mask = {1, 0, 1, 1};
  std::vector<int64_t> ids = {0, 1, 2, 3, -5, -5, 4, 0};
  std::vector<double> log_probs = {-1, -2, -1, -2, 9, kNan, -3, -kInf};
  std::vector<double> terms = std::vector<double>(8, -7);

  HeadRun() {
    for (int kind = 0; kind < 7; ++kind) {
      config.terms.push_back({.name = std::to_string(kind), .kind = static_cast<LossKind>(kind)});
    }
    config.terms[3].kl_beta = .1;
    config.terms.push_back({.name = "7", .kind = LossKind::kDistillation, .teacher = 1});
    config.teachers = {{.vocab = 5}, {.kind = TeacherKind::kTopK, .k = 2}};
    inputs.logits = {logits.data(), DType::kF32, 4, 5, 5};
    inputs.labels = {labels.data(), 8, 4};
    inputs.advantages = inputs.old_log_probs = inputs.reference_log_probs =
        inputs.token_weights = {rows.data(), DType::kF64, 4};
    inputs.segments = {segments.data(), 4, 4};
    inputs.n_segments = 2;
    inputs.pairs = {pairs.data(), 8, 2};
    inputs.mask = mask;
    inputs.teachers = {
        {.logits = inputs.logits, .hidden = {}, .weight = {}, .ids = {}, .log_probs = {}},
        {.logits = {},
         .hidden = {},
         .weight = {},
         .ids = {ids.data(), 8, 8},
         .log_probs = {log_probs.data(), DType::kF64, 8}}};
    outputs.terms = terms;
    outputs.d_logits = {d_logits.data(), DType::kF32, 4, 5, 5};
  }
  HeadRun(const HeadRun&) = delete;

  Status check() const { return check_inputs(shape, config, request, inputs, outputs); }
};

TEST(HeadCheckInputs, AcceptsWhatIsComplete) {
  HeadRun run;
  EXPECT_TRUE(validate(run.config).ok());
  EXPECT_TRUE(check_plan(run.shape, run.config, run.request).ok());
  EXPECT_EQ(run.check().code(), kHeadOk) << run.check().to_string();
}

TEST(HeadCheckInputs, RefusesEachFault) {
  const struct {
    StatusCode code;
    const char* names;
    std::function<void(HeadRun&)> fault;
  } faults[] = {
      {kLossNonFiniteScalar, "upstream", [](HeadRun& r) { r.inputs.upstream = kNan; }},
      {kLossTargetOutOfRange, "labels[1] is 5", [](HeadRun& r) { r.labels[1] = 5; }},
      {kLossTargetOutOfRange, "labels[3]", [](HeadRun& r) { r.labels[3] = INT64_MAX; }},
      {kLossTargetOutOfRange, "labels[0]", [](HeadRun& r) { r.config.options.vocab_offset = 1; }},
      {kHeadMissingInput, "logits", [](HeadRun& r) { r.inputs.logits = {}; }},
      {kHeadMissingInput, "term '0': labels", [](HeadRun& r) { r.inputs.labels = {}; }},
      {kHeadMissingInput, "term '3': advantages", [](HeadRun& r) { r.inputs.advantages = {}; }},
      {kHeadMissingInput, "term '3': old_log_probs",
       [](HeadRun& r) { r.inputs.old_log_probs = {}; }},
      {kHeadMissingInput, "reference_log_probs",
       [](HeadRun& r) { r.inputs.reference_log_probs = {}; }},
      {kHeadMissingInput, "term '4': segments", [](HeadRun& r) { r.inputs.segments = {}; }},
      {kHeadMissingInput, "term '4': n_segments",
       [](HeadRun& r) {
         r.config.terms.resize(5);
         r.labels.assign(4, -1);
         r.inputs.n_segments = 0;
       }},
      {kHeadMissingInput, "term '6': pairs", [](HeadRun& r) { r.inputs.pairs = {}; }},
      {kHeadMissingInput, "mask",
       [](HeadRun& r) {
         r.config.terms[1].mask = RowMask::kOwn;
         r.inputs.mask = {};
       }},
      {kHeadMissingInput, "term '2': teachers[0].logits",
       [](HeadRun& r) { r.inputs.teachers[0].logits = {}; }},
      {kHeadMissingInput, "term '7': teachers[1]", [](HeadRun& r) { r.inputs.teachers.resize(1); }},
      {kHeadMissingInput, "teachers[1].ids", [](HeadRun& r) { r.inputs.teachers[1].ids = {}; }},
      {kHeadMissingInput, "teachers[1].log_probs",
       [](HeadRun& r) { r.inputs.teachers[1].log_probs = {}; }},
      {kHeadMissingInput, "label_log_prob",
       [](HeadRun& r) {
         r.config.terms = {r.config.terms[1]};
         r.outputs.terms = {};
         r.inputs.labels = {};
         r.inputs.segments = {};
         r.outputs.label_log_prob = {r.rows.data(), DType::kF64, 4};
       }},
      {kHeadBadSegments, "segments[3] is 2", [](HeadRun& r) { r.segments[3] = 2; }},
      {kHeadBadSegments, "segments[0] is -1", [](HeadRun& r) { r.segments[0] = -1; }},
      {kHeadBadSegments, "n_segments", [](HeadRun& r) { r.inputs.n_segments = -1; }},
      {kHeadBadPairs, "pairs[1] is 2", [](HeadRun& r) { r.pairs[1] = 2; }},
      {kHeadBadPairs, "pairs[1] is 0", [](HeadRun& r) { r.pairs[1] = 0; }},
      {kHeadBadPairs, "pairs has 1", [](HeadRun& r) { r.inputs.pairs.size = 1; }},
      {kHeadBadTopK, "teachers[1].ids[3] is 5", [](HeadRun& r) { r.ids[3] = 5; }},
      {kHeadBadTopK, "teachers[1].ids[7] is 4", [](HeadRun& r) { r.ids[7] = 4; }},
      {kHeadBadTopK, "teachers[1].log_probs[0] is 0.5", [](HeadRun& r) { r.log_probs[0] = .5; }},
      {kHeadBadTopK, "teachers[1].log_probs[6] is nan", [](HeadRun& r) { r.log_probs[6] = kNan; }},
      {kHeadShapeMismatch, "logits is [4][6]", [](HeadRun& r) { r.inputs.logits.cols = 6; }},
      {kHeadShapeMismatch, "logits.row_stride", [](HeadRun& r) { r.inputs.logits.row_stride = 4; }},
      {kHeadShapeMismatch, "labels has 3", [](HeadRun& r) { r.inputs.labels.size = 3; }},
      {kHeadShapeMismatch, "class_weights has 4",
       [](HeadRun& r) { r.inputs.class_weights = r.inputs.advantages; }},
      {kHeadShapeMismatch, "upstream_rows has 5",
       [](HeadRun& r) { r.inputs.upstream_rows = {r.rows.data(), DType::kF64, 5, 0}; }},
      {kHeadShapeMismatch, "mask has 3", [](HeadRun& r) { r.inputs.mask = {r.mask.data(), 3}; }},
      {kHeadShapeMismatch, "teachers[0].logits",
       [](HeadRun& r) { r.inputs.teachers[0].logits.rows = 3; }},
      {kHeadShapeMismatch, "terms has 1",
       [](HeadRun& r) { r.outputs.terms = {r.terms.data(), 1}; }},
      {kHeadShapeMismatch, "d_logits", [](HeadRun& r) { r.outputs.d_logits.cols = 4; }},
      {kHeadShapeMismatch, "d_logits", [](HeadRun& r) { r.request.d_logits = false; }},
      {kHeadShapeMismatch, "entropy",
       [](HeadRun& r) {
         r.request.entropy = false;
         r.outputs.entropy = {r.rows.data(), DType::kF64, 4};
       }},
      {kHeadShapeMismatch, "lse.stride",
       [](HeadRun& r) { r.outputs.lse = {r.rows.data(), DType::kF64, 4, 0}; }},
      {kHeadShapeMismatch, "the logits themselves",
       [](HeadRun& r) {
         r.outputs.d_logits.data = r.logits.data();
         r.outputs.accumulate = true;
       }},
      {kHeadShapeMismatch, "the logits themselves",
       [](HeadRun& r) {
         r.outputs.d_logits.data = r.logits.data();
         r.outputs.d_logits.row_stride = 6;
       }},
      {kHeadBadDtype, "logits is f16", [](HeadRun& r) { r.inputs.logits.dtype = DType::kF16; }},
      {kHeadBadDtype, "teachers[0].logits is bf16",
       [](HeadRun& r) { r.inputs.teachers[0].logits.dtype = DType::kBF16; }},
      {kHeadBadDtype, "d_logits is f64",
       [](HeadRun& r) { r.outputs.d_logits.dtype = DType::kF64; }},
      {kHeadBadDtype, "lse is bf16",
       [](HeadRun& r) { r.outputs.lse = {r.rows.data(), DType::kBF16, 4}; }},
      {kHeadBadDtype, "labels.id_bytes", [](HeadRun& r) { r.inputs.labels.id_bytes = 2; }},
      {kHeadBadDtype, "advantages",
       [](HeadRun& r) { r.inputs.advantages.dtype = static_cast<DType>(17); }},
  };
  for (const auto& [code, names, fault] : faults) {
    HeadRun run;
    fault(run);
    expect_refused(run.check(), code, names);
  }
}

// A divisor of one's own makes the number of segments unnecessary.
TEST(HeadCheckInputs, SegmentsAreAskedForOnlyWhereTheyMatter) {
  HeadRun run;
  run.config.terms = {{.name = "grpo",
                       .kind = LossKind::kGrpo,
                       .divisor = 3,
                       .normalizer = PolicyNormalizer::kSequences}};
  run.outputs.terms = {};
  run.inputs.segments = {};
  run.inputs.n_segments = 0;
  EXPECT_TRUE(run.check().ok()) << run.check().to_string();
  run.config.terms[0].divisor.reset();
  expect_refused(run.check(), kHeadMissingInput, "n_segments");
  run.config.terms[0].normalizer = PolicyNormalizer::kSequenceMeans;
  expect_refused(run.check(), kHeadMissingInput, "segments");
}

TEST(HeadCheckInputs, HiddenDoor) {
  HeadRun run;
  run.shape = {4, 3, 5};
  run.config = {.terms = {{.name = "a"}}, .options = {.bias = true, .adapter_rank = 2}};
  run.request = {.input_dtype = DType::kF32, .weight_dtype = DType::kF16, .d_hidden = true};
  run.outputs = {};
  std::vector<float> hidden(12);
  std::vector<uint16_t> weight(15), a(6), b(10);
  std::vector<double> bias(5);
  const auto check = [&](StatusCode code, const char* names) {
    expect_refused(run.check(), code, names);
  };
  check(kHeadMissingInput, "hidden");
  run.inputs.hidden = {hidden.data(), DType::kF32, 4, 3, 3};
  check(kHeadMissingInput, "weight");
  run.inputs.weight = {weight.data(), DType::kF16, 5, 3, 3};
  check(kHeadMissingInput, "bias");
  run.inputs.bias = {bias.data(), DType::kF64, 5};
  check(kHeadMissingInput, "adapter_a");
  run.inputs.adapter_a = {a.data(), DType::kF16, 2, 3, 3};
  check(kHeadMissingInput, "adapter_b");
  run.inputs.adapter_b = {b.data(), DType::kF16, 5, 2, 2};
  EXPECT_TRUE(run.check().ok()) << run.check().to_string();
  run.inputs.adapter_b.rows = 4;
  check(kHeadShapeMismatch, "adapter_b");
  run.inputs.adapter_b.rows = 5;
  run.inputs.bias.size = 4;
  check(kHeadShapeMismatch, "bias");
}

// No rows: nothing is asked for, whatever the terms.
// --- A shard of a vocabulary
// -----------------------------------------------------------------------

TEST(HeadGroupCheck, RefusesWhatAShardCannotServe) {
  const auto of = [](LossTerm term, HeadOptions options = {.group_vocab = 10}) {
    term.name = "t";
    return validate({.terms = {term}, .teachers = {{.vocab = 5}}, .options = options});
  };
  EXPECT_TRUE(of({}).ok());
  EXPECT_TRUE(of({.kind = LossKind::kDpo}).ok());
  expect_refused(of({}, {.group_vocab = -1}), kGroupBadRange, "group_vocab is -1");
  expect_refused(of({.kind = LossKind::kDistillation}), kGroupUnsupported, "term 't': kind");
  EXPECT_TRUE(of({.label_smoothing = .1}).ok());
  expect_refused(of({.logits_scale = 2}), kGroupUnsupported, "logits_scale is 2");

  const auto plan = [](int64_t offset, int64_t group) {
    return check_plan(
        {1, 0, 5},
        {.terms = {{.name = "a"}}, .options = {.vocab_offset = offset, .group_vocab = group}}, {});
  };
  EXPECT_TRUE(plan(5, 10).ok());
  expect_refused(plan(6, 10), kGroupBadRange, "vocab_offset is 6 and vocab 5");
  expect_refused(plan(0, 4), kGroupBadRange, "group_vocab = 4");
}

TEST(HeadGroupCheck, AsksForTheGroupsStatisticsWithLossesAndGradients) {
  std::vector<double> row(1), total(1);
  std::vector<int64_t> ids(1);
  std::vector<uint8_t> flags(1);
  const VectorView given = {row.data(), DType::kF64, 1};
  const MutableVectorView out = {row.data(), DType::kF64, 1};
  const HeadConfig whole = {.terms = {{.name = "ce"}}};
  HeadConfig shard = whole, smoothed = whole;
  shard.options.group_vocab = smoothed.options.group_vocab = 10;
  smoothed.terms[0].label_smoothing = 0.1;
  Inputs in;
  in.labels = {ids.data(), 8, 1};
  const auto check = [&](const Outputs& outputs, const HeadConfig& config) {
    return check_group_inputs({1, 0, 5}, config, in, outputs);
  };
  Outputs statistics, losses;
  statistics.shift = statistics.log_sum = statistics.label_log_prob = statistics.lse = out;
  losses.total = total.data();
  EXPECT_TRUE(check(statistics, shard).ok());
  expect_refused(check(losses, shard), kGroupStatistics, "group_shift is not given");
  in.group_shift = given;
  expect_refused(check(statistics, shard), kGroupStatistics, "group_log_sum is not given");
  in.group_log_sum = given;
  expect_refused(check(losses, shard), kGroupStatistics, "group_label_log_prob is not given");
  in.group_label_log_prob = given;
  EXPECT_TRUE(check(losses, shard).ok());
  expect_refused(check(losses, smoothed), kGroupStatistics, "group_distance is not given");
  expect_refused(check(losses, whole), kGroupStatistics, "options.group_vocab is 0");
  statistics.distance = out;
  expect_refused(check(statistics, shard), kHeadShapeMismatch, "distance");
  EXPECT_EQ(check(statistics, smoothed).code(), kGroupStatistics);
  in.group_distance = given;
  EXPECT_TRUE(check(statistics, smoothed).ok());
  losses.entropy = out;
  expect_refused(check(losses, shard), kGroupStatistics, "group_entropy is not given");
  in.group_entropy = given;
  EXPECT_TRUE(check(losses, shard).ok());
  in = {};
  Outputs own, of_policy;
  own.entropy = out;
  EXPECT_TRUE(check(own, shard).ok());
  std::vector<PolicyMetrics> metrics(1);
  of_policy.policy_metrics = metrics;
  expect_refused(check(of_policy, shard), kGroupStatistics, "group_shift");
  losses.argmax = ids;
  expect_refused(check(losses, shard), kGroupUnsupported, "argmax");
  losses.argmax = {};
  losses.correct = flags;
  expect_refused(check(losses, shard), kGroupUnsupported, "correct");
  losses.correct = {};
  in.class_weights = given;
  expect_refused(check(losses, shard), kGroupUnsupported, "class_weights");
}

TEST(HeadCheckInputs, NoRowsNeedNoInputs) {
  HeadRun run;
  run.shape.n_tok = 0;
  run.inputs = {};
  run.inputs.teachers.resize(2);
  run.outputs = {};
  EXPECT_TRUE(run.check().ok()) << run.check().to_string();
}

}  // namespace
}  // namespace ullage::lossk
