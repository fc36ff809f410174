// The fused head on Hopper against the float64 oracle over the same stored numbers, and against
// itself bit for bit.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "cuda/device_head.h"
#include "cuda/device_run.h"
#include "cuda/expect_close.h"
#include "support/head_random.h"
#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::test {
namespace {

using lossk::CudaLinearHeadOptions;

// The type of hidden, weight and d_hidden: every test runs in both.
DType element = DType::kBF16;

uint16_t bits_of(double value) {
  const auto f = static_cast<float>(value);
  return element == DType::kF16 ? F16::from_float(f).bits : BF16::from_float(f).bits;
}
double number_of(uint16_t bits) {
  return element == DType::kF16 ? F16{bits}.to_float() : BF16{bits}.to_float();
}
double rounded(double value) { return number_of(bits_of(value)); }

std::vector<uint16_t> stored(const std::vector<double>& values) {
  std::vector<uint16_t> bits;
  bits.reserve(values.size());
  for (const double value : values) bits.push_back(bits_of(value));
  return bits;
}

std::vector<double> widened(const std::vector<uint16_t>& bits) {
  std::vector<double> values;
  values.reserve(bits.size());
  for (const uint16_t b : bits) values.push_back(number_of(b));
  return values;
}

struct RunOptions {
  int64_t chunk = 0;
  int64_t budget_bytes = 0;
  bool gradients = true;
  bool d_weight = true;
  bool round_d_weight = false;
  bool accumulate = false;  // over gradients of 0.5
  bool told = false;        // the plan knows that
  bool capture = false;     // through a CUDA graph
  double filter_tolerance = 0;
};

struct RunResult {
  Status planned = kHeadOk, ran = kHeadOk, checked = kHeadOk;
  std::string mode;
  double operations = 0;
  int64_t chunk = 0, n_chunks = 0, lodged_rows = 0, n_valid = 0;
  lossk::FilterReport filter;
  std::vector<double> terms, total;
  std::vector<float> token_loss, lse, log_prob;
  std::vector<uint16_t> d_hidden;
  std::vector<float> d_weight;             // f32
  std::vector<uint16_t> d_weight_rounded;  // 16 bits
};

RunResult run(const HeadConfig& config, const HeadInputs& in, const RunOptions& options) {
  RunResult result;
  const int64_t n = in.shape.n_tok, d = in.shape.d_model, v = in.shape.vocab;
  const lossk::Request request = {.input_dtype = element,
                                  .weight_dtype = element,
                                  .grad_dtype = element,
                                  .d_weight_dtype = options.round_d_weight ? element : DType::kF32,
                                  .d_hidden = options.gradients,
                                  .d_weight = options.gradients && options.d_weight};
  const auto plan = lossk::plan_cuda_linear(in.shape, config, request,
                                            {.budget_bytes = options.budget_bytes,
                                             .chunk = options.chunk,
                                             .kernel = "linear_head_sm90_scaled_exponentials",
                                             .accumulate = options.told,
                                             .filter_tolerance = options.filter_tolerance});
  result.planned = plan.status();
  if (!plan) return result;
  result.mode = plan->mode();
  result.operations = plan->operations();
  result.chunk = plan->chunk();
  result.n_chunks = plan->n_chunks();
  result.lodged_rows = plan->lodged_rows();

  const DeviceMemory hidden(stored(in.hidden)), weight(stored(in.weight));
  const auto buffer = [&](size_t elements, auto value) {
    if (options.accumulate) return DeviceMemory(std::vector<decltype(value)>(elements, value));
    return DeviceMemory(elements * sizeof value);
  };
  const uint16_t half_bits = bits_of(0.5);
  const DeviceMemory d_hidden = buffer(static_cast<size_t>(n * d), half_bits);
  const DeviceMemory d_weight = options.round_d_weight
                                    ? buffer(static_cast<size_t>(v * d), half_bits)
                                    : buffer(static_cast<size_t>(v * d), 0.5F);
  DeviceInputs held;
  lossk::Inputs inputs = held.vectors(in, 0);
  inputs.hidden = {hidden.data(), element, n, d, d};
  inputs.weight = {weight.data(), element, v, d, d};

  const size_t n_terms = config.terms.size(), rows = static_cast<size_t>(n);
  const DeviceMemory terms(n_terms * 8), total(8), n_valid(8);
  const DeviceMemory token_loss(rows * 4), lse(rows * 4), log_prob(rows * 4);
  const auto vector = [&](const DeviceMemory& memory) {
    return MutableVectorView{memory.data(), DType::kF32, n, 1};
  };
  lossk::Outputs outputs;
  outputs.terms = {terms.data<double>(), n_terms};
  outputs.total = total.data<double>();
  outputs.n_valid = n_valid.data<int64_t>();
  outputs.token_loss = vector(token_loss);
  outputs.lse = vector(lse);
  if (!in.labels.empty()) outputs.label_log_prob = vector(log_prob);
  if (options.gradients) {
    outputs.d_hidden = {d_hidden.data(), element, n, d, d};
    if (request.d_weight) outputs.d_weight = {d_weight.data(), request.d_weight_dtype, v, d, d};
  }
  outputs.accumulate = options.accumulate;

  const DeviceMemory workspace(static_cast<size_t>(plan->workspace_bytes()));
  const std::span<std::byte> work{workspace.data<std::byte>(), workspace.bytes()};
  const PlanRun done = run_plan(*plan, inputs, outputs, work, options.capture);
  result.ran = done.ran;
  result.checked = done.checked;
  if (!options.capture && !result.ran.ok()) return result;
  if (result.checked.code() == kCudaLaunchFailed) return result;
  if (options.filter_tolerance > 0) {
    const auto report = plan->filter_report(nullptr, work);
    EXPECT_TRUE(report.ok()) << report.status().to_string();
    if (report) result.filter = *report;
  }
  result.terms = terms.read<double>();
  result.total = total.read<double>();
  result.n_valid = n_valid.read<int64_t>()[0];
  result.token_loss = token_loss.read<float>();
  result.lse = lse.read<float>();
  result.log_prob = log_prob.read<float>();
  if (options.gradients) {
    result.d_hidden = d_hidden.read<uint16_t>();
    if (options.round_d_weight) {
      result.d_weight_rounded = d_weight.read<uint16_t>();
    } else if (request.d_weight) {
      result.d_weight = d_weight.read<float>();
    }
  }
  return result;
}

// What the numbers may be off by. Per row, delta bounds a logit: a chain of d_model products of
// exact 16-bit factors, the tensor core's float32 additions truncating (2^-23 each). An exponential
// is then off by (2 delta + 2^-21) relative, the stored one by a rounding more, and so is the
// hidden row once scaled; the label's gradient is float32 throughout.
//
// f16 rounds twice where a row's exponentials are brought to another shift, and has a smallest step
// of 2^-24 besides. A row's exponentials add up to 2^-6 or more in their tiles' units and to 2^8 or
// more once stored: a probability is off by at most 2^-25 2^6 + 2^-25 2^-8. A scaled hidden element
// is off by at most 2^-25 / unit of what it stands for, times exponentials of at most 2^20 in all.
struct Bounds {
  std::vector<double> delta;  // [n]
  double unit = 0x1p-23;
  bool f16 = element == DType::kF16;
  double rounding = f16 ? 0x1p-11 : 0x1p-8;  // of a stored result
  double exponential = f16 ? 0x1.01p-10 : 0x1p-8;
  double probability = f16 ? 0x1.01p-19 : 0;
  double smallest = f16 ? 0x1p-25 : 0x1p-130;

  // Of a scaled hidden element, times the row's P: see weight_unit of the fused head.
  double scaled_hidden(const HeadConfig& config, const HeadInputs& in) const {
    if (!f16) return 0;
    double largest = 0;
    for (const LossTerm& term : config.terms) {
      const double divisor = term.divisor.value_or(static_cast<double>(in.shape.n_tok));
      largest = std::max(largest, std::abs(in.upstream * term.weight) / divisor);
    }
    return largest == 0 ? 0 : 0x1p-5 * std::ldexp(1.0, std::ilogb(largest) - 8);
  }

  Bounds(const HeadInputs& in, double scale) {
    const int64_t n = in.shape.n_tok, d = in.shape.d_model, v = in.shape.vocab;
    for (int64_t i = 0; i < n; ++i) {
      double largest = 0;
      for (int64_t j = 0; j < v; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < d; ++k)
          sum += std::abs(in.hidden[i * d + k] * in.weight[j * d + k]);
        largest = std::max(largest, sum);
      }
      delta.push_back(scale * largest * unit * static_cast<double>(d + 2));
    }
  }
  double log_sum(int64_t row, double lse) const {
    return 2 * delta[row] + 0x1p-18 + 0x1p-20 * std::abs(lse);
  }
};

double norm(const double* x, int64_t n) {
  double square = 0;
  for (int64_t i = 0; i < n; ++i) square += x[i] * x[i];
  return std::sqrt(square);
}

struct Case {
  RandomHead head;
  std::string where;
};

Case draw(Rng& rng, std::vector<LossTerm> terms, int64_t n, int64_t d, int64_t v) {
  Case drawn{random_head(rng, n, d, v), ""};
  HeadInputs& in = drawn.head.inputs;
  drawn.head.config.terms = std::move(terms);
  drawn.head.config.teachers.clear();
  in.teachers.clear();
  in.bias.clear();
  in.adapter_a.clear();
  in.adapter_b.clear();
  in.n_segments = std::min<int64_t>(in.n_segments, n);
  in.upstream = 0.75;
  for (double& x : in.hidden) x = rounded(x);
  for (double& x : in.weight) x = rounded(x);
  for (auto* vector : {&in.token_weights, &in.class_weights, &in.advantages, &in.old_log_probs,
                       &in.reference_log_probs}) {
    for (double& x : *vector) x = static_cast<float>(x);
  }
  // Ratios on both sides of the clip bounds, none near one.
  HeadConfig plain = drawn.head.config;
  plain.terms = {{.name = "lp"}};
  const std::vector<double> lp = reference::head_losses(plain, in).label_log_prob;
  constexpr double kSteps[] = {-0.6, -0.1, 0.02, 0.1, 0.5};
  for (int attempt = 0; attempt < 100; ++attempt) {
    for (size_t i = 0; i < lp.size(); ++i) {
      in.old_log_probs[i] = static_cast<float>(lp[i] - kSteps[below(rng, 5)]);
      in.reference_log_probs[i] = static_cast<float>(lp[i] + 0.3 * normal(rng));
    }
    if (distance_to_clip(drawn.head.config, in) > 1e-2) break;
  }
  std::string names;
  for (const LossTerm& term : drawn.head.config.terms) names += term.name + " ";
  drawn.where = names + std::to_string(n) + " x " + std::to_string(d) + " x " + std::to_string(v);
  return drawn;
}

void expect_oracle(const Case& drawn, const RunOptions& options) {
  const HeadInputs& in = drawn.head.inputs;
  const RunResult actual = run(drawn.head.config, in, options);
  ASSERT_TRUE(actual.planned.ok()) << drawn.where << ": " << actual.planned.to_string();
  ASSERT_TRUE(actual.ran.ok()) << drawn.where << ": " << actual.ran.to_string();
  ASSERT_TRUE(actual.checked.ok()) << drawn.where << ": " << actual.checked.to_string();
  const HeadResult expected = reference::head_losses(drawn.head.config, in);
  const double scale = drawn.head.config.options.logits_scale;
  const Bounds bounds(in, scale);
  const int64_t n = in.shape.n_tok, d = in.shape.d_model, v = in.shape.vocab;
  EXPECT_EQ(actual.n_valid, expected.n_valid);

  std::vector<double> row_bound, loss_bound;
  double largest_row_bound = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double lse = expected.lse.empty() ? 0 : expected.lse[i];
    row_bound.push_back(bounds.log_sum(i, lse) + 0x1p-20 * std::abs(expected.label_log_prob[i]));
    largest_row_bound = std::max(largest_row_bound, row_bound.back());
    // Losses are smooth in lp and lse with slopes of at most about 2 |lse| + 4 here (weights of at
    // most 2, ratios of at most e^0.6, kl slopes of at most 1), sequence terms with those of their
    // neighbours.
    const double slope = 16 + 4 * std::abs(lse) + 4 * std::abs(expected.label_log_prob[i]);
    loss_bound.push_back(slope * row_bound.back() + 0x1p-19 * std::abs(expected.token_loss[i]));
  }
  // A segment's mean is off by what any of its rows is; a preference margin by what all of them
  // are, times beta = 0.2.
  double sequences = 0;
  for (const LossTerm& term : drawn.head.config.terms) {
    if (term.kind == LossKind::kGspo) sequences += 16 * largest_row_bound;
    if (term.kind == LossKind::kDpo) sequences += 0.2 * largest_row_bound * static_cast<double>(n);
  }
  for (double& bound : loss_bound) bound += sequences;
  const auto doubles = [](const std::vector<float>& values) {
    return std::vector<double>(values.begin(), values.end());
  };
  expect_close("lse", doubles(actual.lse), expected.lse, row_bound, drawn.where);
  expect_close("log_prob", doubles(actual.log_prob), expected.label_log_prob, row_bound,
               drawn.where);
  expect_close("token_loss", doubles(actual.token_loss), expected.token_loss, loss_bound,
               drawn.where);
  if (!options.gradients) return;

  // How far a row's softmax coefficients may be off, relative, besides the stored roundings.
  std::vector<double> hidden_bound(static_cast<size_t>(n * d), 0),
      weight_bound(static_cast<size_t>(v * d), 0);
  const double scaled = bounds.scaled_hidden(drawn.head.config, in);
  for (int64_t i = 0; i < n; ++i) {
    const double* g = expected.d_logits.data() + i * v;
    double total = 0, soft_total = 0;
    for (int64_t j = 0; j < v; ++j) {
      total += std::abs(g[j]);
      if (j != in.labels[i]) soft_total += std::abs(g[j]);
    }
    const double relative = 16 * row_bound[i] + sequences;
    // P: the softmax outside the label's column has a gradient of P times its share.
    const double outside = in.labels[i] < 0 ? 1 : -std::expm1(expected.label_log_prob[i]);
    const double p = outside > 0 ? soft_total / outside : 0;
    for (int64_t j = 0; j < v; ++j) {
      const bool label = j == in.labels[i];
      const double soft = label ? 0
                                : std::abs(g[j]) * (bounds.exponential + relative + 0x1p-18) +
                                      p * bounds.probability;
      const double hard = label ? std::abs(g[j]) * 0x1p-20 + total * (relative + 0x1p-20) : 0;
      const double chain = std::abs(g[j]) * bounds.unit * static_cast<double>(v + n);
      for (int64_t k = 0; k < d; ++k) {
        hidden_bound[i * d + k] += (soft + hard + chain) * std::abs(in.weight[j * d + k]);
        // The hidden row is rounded once more after scaling.
        weight_bound[j * d + k] +=
            (soft + hard + chain + (label ? 0 : std::abs(g[j]) * 1.01 * bounds.rounding)) *
            std::abs(in.hidden[i * d + k]);
        if (!label && p > 0) weight_bound[j * d + k] += std::abs(g[j]) / p * scaled;
      }
    }
  }
  const double before = options.accumulate ? 0.5 : 0;
  std::vector<double> d_hidden = expected.d_hidden, d_weight = expected.d_weight;
  for (size_t i = 0; i < d_hidden.size(); ++i) {
    d_hidden[i] += before;
    hidden_bound[i] += bounds.rounding * std::abs(d_hidden[i]) + bounds.smallest;
  }
  for (size_t i = 0; i < d_weight.size(); ++i) {
    d_weight[i] += before;
    weight_bound[i] +=
        (options.round_d_weight ? 1.01 * bounds.rounding : 0x1p-22) * std::abs(d_weight[i]) +
        (options.round_d_weight ? bounds.smallest : 0x1p-130);
  }
  expect_close("d_hidden", widened(actual.d_hidden), d_hidden, hidden_bound, drawn.where);
  expect_close("d_weight",
               options.round_d_weight ? widened(actual.d_weight_rounded) : doubles(actual.d_weight),
               d_weight, weight_bound, drawn.where);
}

class CudaLinearHead : public testing::TestWithParam<DType> {
 protected:
  void SetUp() override {
    ULLAGE_SKIP_WITHOUT_DEVICE();
    element = GetParam();
    int major = 0;
    expect_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, 0));
    if (major != 9)
      GTEST_SKIP() << "the fused head needs Hopper, this device has capability " << major;
  }
  static void TearDownTestSuite() { print_worst_fraction(); }
  Rng rng{test_seed()};
};

INSTANTIATE_TEST_SUITE_P(Types, CudaLinearHead, testing::Values(DType::kBF16, DType::kF16),
                         [](const auto& tested) { return std::string(name_of(tested.param)); });

std::vector<LossTerm> named(std::vector<LossTerm> terms) {
  for (size_t i = 0; i < terms.size(); ++i) terms[i].name = "term" + std::to_string(i);
  return terms;
}

const std::vector<std::vector<LossTerm>>& mixes() {
  static const std::vector<std::vector<LossTerm>> all = {
      named({{}}),
      named({{.kind = LossKind::kZLoss, .weight = 0.1}}),
      named({{.weight = 0.5}, {.kind = LossKind::kZLoss, .weight = 0.01, .mask = RowMask::kNone}}),
      named({{.kind = LossKind::kGrpo,
              .kl_beta = 0.04,
              .normalizer = PolicyNormalizer::kSequenceMeans}}),
      named({{.kind = LossKind::kCispo, .weight = 2}, {.weight = 0}}),
      named({{.kind = LossKind::kGspo}, {.kind = LossKind::kZLoss, .weight = 1e-3}}),
      named({{.kind = LossKind::kDpo, .beta = 0.2}, {.weight = 0.3}}),
      named({{},
             {.kind = LossKind::kZLoss, .weight = 0.1},
             {.kind = LossKind::kGrpo, .epsilon_high = 0.28}}),
  };
  return all;
}

TEST_P(CudaLinearHead, EveryMixAgreesWithTheOracle) {
  for (const auto& mix : mixes()) {
    expect_oracle(draw(rng, mix, 70, 64, 501), {});
    expect_oracle(draw(rng, mix, 300, 72, 211), {.chunk = 256});
    if (HasFailure()) return;
  }
}

TEST_P(CudaLinearHead, EdgesOfTilesAndOddVocabularies) {
  const std::vector<LossTerm> mix = mixes()[2];
  for (const int64_t n : {1, 2, 63, 64, 65, 127, 129, 255, 257}) {
    expect_oracle(draw(rng, mix, n, 8 * (1 + below(rng, 20)), 1 + below(rng, 600)), {});
  }
  for (const int64_t v : {1, 2, 31, 127, 191, 192, 193, 255, 257, 383, 385, 8003}) {
    expect_oracle(draw(rng, mix, 5, 24, v), {});
  }
  for (const int64_t d : {8, 56, 64, 72, 256, 264, 576})
    expect_oracle(draw(rng, mix, 33, d, 300), {});
}

TEST_P(CudaLinearHead, AccumulatesAndRoundsOnce) {
  const std::vector<LossTerm> mix = mixes()[0];
  for (const bool round : {false, true}) {
    for (const bool accumulate : {false, true}) {
      expect_oracle(draw(rng, mix, 300, 64, 301),
                    {.chunk = 256, .round_d_weight = round, .accumulate = accumulate});
    }
  }
  expect_oracle(draw(rng, mix, 40, 64, 301), {.gradients = false});
}

void expect_same_bits(const RunResult& a, const RunResult& b, const std::string& where) {
  EXPECT_EQ(a.terms, b.terms) << where;
  EXPECT_EQ(a.total, b.total) << where;
  EXPECT_EQ(a.token_loss, b.token_loss) << where;
  EXPECT_EQ(a.lse, b.lse) << where;
  EXPECT_EQ(a.log_prob, b.log_prob) << where;
  EXPECT_EQ(a.d_hidden, b.d_hidden) << where;
  EXPECT_EQ(a.d_weight, b.d_weight) << where;
}

// Budgets that hold neither a float32 d_weight nor a chunk of the whole vocabulary: ranges of 768
// columns, the last ragged, rows whose exponentials are made again and rows whose lie in d_weight;
// one slab of rows and several.
TEST_P(CudaLinearHead, StripsHaveTheBitsOfChunks) {
  const struct {
    int64_t n, d, v, budget;
    bool round, told;
    size_t mix;
    double operations;  // 6: nothing is made again
  } cases[] = {{600, 160, 2400, 2000000, false, false, 2, 7.71},
               {600, 160, 2400, 1500000, false, false, 7, 7.71},
               {600, 160, 2400, 1400000, false, false, 5, 9.71},
               {600, 320, 5001, 2400000, false, false, 0, 6},
               {700, 320, 2400, 4000000, true, false, 2, 7.46},
               {700, 320, 2400, 3000000, true, false, 3, 7.46},
               {300, 72, 5001, 1400000, true, false, 0, 8},
               {300, 72, 5001, 1400000, true, true, 3, 8},
               {600, 64, 5001, 1500000, false, true, 7, 8}};
  for (const auto& c : cases) {
    const std::string where = std::to_string(c.n) + " x " + std::to_string(c.d) + " x " +
                              std::to_string(c.v) + " in " + std::to_string(c.budget);
    const Case drawn = draw(rng, mixes()[c.mix], c.n, c.d, c.v);
    RunOptions options = {
        .budget_bytes = c.budget, .round_d_weight = c.round, .accumulate = c.told, .told = c.told};
    const RunResult strips = run(drawn.head.config, drawn.head.inputs, options);
    ASSERT_TRUE(strips.planned.ok()) << where << strips.planned.to_string();
    ASSERT_TRUE(strips.checked.ok()) << where << strips.checked.to_string();
    EXPECT_EQ(strips.mode, "strip") << where;
    EXPECT_NEAR(strips.operations / static_cast<double>(c.n * c.d * c.v), c.operations, 0.01)
        << where;
    const RunResult chunks =
        run(drawn.head.config, drawn.head.inputs,
            {.chunk = 2048, .round_d_weight = c.round, .accumulate = c.told, .told = c.told});
    expect_same_bits(chunks, strips, where);
    EXPECT_EQ(chunks.d_weight_rounded, strips.d_weight_rounded) << where;
    options.capture = true;
    expect_same_bits(strips, run(drawn.head.config, drawn.head.inputs, options), where + ", graph");
    if (!c.told) {
      options = {.budget_bytes = c.budget, .round_d_weight = c.round, .accumulate = true};
      const RunResult added = run(drawn.head.config, drawn.head.inputs, options);
      EXPECT_EQ(added.ran.ok(), strips.lodged_rows == 0) << added.ran.to_string();
      if (!added.ran.ok()) {
        EXPECT_EQ(added.ran.code(), kHeadShapeMismatch);
      }
    }
  }
  expect_oracle(draw(rng, mixes()[2], 300, 160, 2501), {.budget_bytes = 1050000});
  expect_oracle(draw(rng, mixes()[0], 600, 160, 2400), {.budget_bytes = 1500000});
  Case shifted = draw(rng, mixes()[0], 40, 64, 3200);
  for (int64_t i = 0; i < 40; ++i) shifted.head.inputs.hidden[i * 64] = 1;
  for (int64_t j = 0; j < 3200; ++j) shifted.head.inputs.weight[j * 64] = j % 300 == 17 ? 150 : 0;
  for (int64_t i = 0; i < 40; i += 2) shifted.head.inputs.labels[i] = 17 + 300 * (i % 10);
  expect_oracle(shifted, {.budget_bytes = 500000, .round_d_weight = true});
  expect_oracle(shifted, {.budget_bytes = 1000000, .round_d_weight = true, .told = true});
}

// Where fewer than 256 rows of exponentials fit, and there is no d_weight to make by strips.
TEST_P(CudaLinearHead, ChunksOfFewRowsHaveTheSameBits) {
  const Case drawn = draw(rng, mixes()[2], 300, 64, 5001);
  const RunResult whole =
      run(drawn.head.config, drawn.head.inputs, {.chunk = 2048, .d_weight = false});
  const RunResult few =
      run(drawn.head.config, drawn.head.inputs, {.budget_bytes = 1000000, .d_weight = false});
  ASSERT_TRUE(few.checked.ok()) << few.planned.to_string() << few.checked.to_string();
  EXPECT_EQ(few.chunk, 64);
  expect_same_bits(whole, few, "64 rows");
}

TEST_P(CudaLinearHead, TheSameBitsForEveryChunkRunAndGraph) {
  for (const size_t mix : {2, 5, 7}) {
    const Case drawn = draw(rng, mixes()[mix], 1100, 128, 1503);
    const RunResult whole = run(drawn.head.config, drawn.head.inputs, {.chunk = 2048});
    ASSERT_TRUE(whole.checked.ok()) << whole.checked.to_string();
    ASSERT_EQ(whole.n_chunks, 1);
    for (const int64_t chunk : {256, 512, 768}) {
      const RunResult part = run(drawn.head.config, drawn.head.inputs, {.chunk = chunk});
      EXPECT_EQ(part.mode, mix == 5 ? "chunk_two_pass" : "chunk");
      expect_same_bits(whole, part, "chunk " + std::to_string(chunk));
    }
    expect_same_bits(whole, run(drawn.head.config, drawn.head.inputs, {.chunk = 2048}), "again");
    expect_same_bits(
        whole, run(drawn.head.config, drawn.head.inputs, {.chunk = 512, .capture = true}), "graph");
  }
}

// Exponentials in d_weight's own memory: all rows, or the first of them beside a chunk, which one
// product sums with them; ranges whose last is ragged; further chunks; with sequence terms in one
// part and in several.
TEST_P(CudaLinearHead, TheSameBitsWithExponentialsLodgedInDWeight) {
  const struct {
    int64_t n, d, v, budget, lodged;
    size_t mix;
  } cases[] = {{400, 320, 3200, 5000000, 400, 2},
               {400, 320, 3200, 5000000, 400, 5},
               {700, 192, 3200, 6500000, 256, 7},
               {1100, 192, 3200, 6500000, 256, 5},
               {1100, 192, 4700, 8000000, 256, 2}};
  for (const auto& c : cases) {
    const std::string where = std::to_string(c.n) + " rows, " + std::to_string(c.budget) + " bytes";
    const Case drawn = draw(rng, mixes()[c.mix], c.n, c.d, c.v);
    const RunResult whole = run(drawn.head.config, drawn.head.inputs, {.chunk = 2048});
    ASSERT_TRUE(whole.checked.ok()) << whole.checked.to_string();
    const RunResult lodged = run(drawn.head.config, drawn.head.inputs, {.budget_bytes = c.budget});
    ASSERT_TRUE(lodged.checked.ok()) << lodged.checked.to_string();
    EXPECT_EQ(lodged.lodged_rows, c.lodged) << where;
    EXPECT_EQ(lodged.n_chunks, c.n > 1000 ? 2 : 1) << where;
    expect_same_bits(whole, lodged, where);
    expect_same_bits(
        whole,
        run(drawn.head.config, drawn.head.inputs, {.budget_bytes = c.budget, .capture = true}),
        where + ", graph");
    // The plan was not told that it adds: it falls back to chunks, or says what to do.
    const RunResult added =
        run(drawn.head.config, drawn.head.inputs, {.budget_bytes = c.budget, .accumulate = true});
    const RunResult added_whole =
        run(drawn.head.config, drawn.head.inputs, {.chunk = 2048, .accumulate = true});
    if (added.ran.ok()) {
      expect_same_bits(added_whole, added, where + ", accumulated");
    } else {
      EXPECT_EQ(added.ran.code(), kHeadShapeMismatch) << added.ran.to_string();
    }
  }
  expect_oracle(draw(rng, mixes()[2], 300, 320, 3200), {.budget_bytes = 4000000});
}

// More tiles than the device holds at once, in 16 ranges: each is stored over exponentials that
// other blocks may be reading.
TEST_P(CudaLinearHead, TheSameBitsWhereManyBlocksTakeThePlaceOfExponentials) {
  constexpr int64_t kRows = 1100, kWidth = 256, kVocab = 24576, kBudget = 30000000;
  HeadInputs in;
  in.shape = {kRows, kWidth, kVocab};
  for (double& x : in.hidden = normals(rng, kRows * kWidth, 1)) x = rounded(x);
  for (double& x : in.weight = normals(rng, kVocab * kWidth, 0.1)) x = rounded(x);
  for (int64_t i = 0; i < kRows; ++i) in.labels.push_back(below(rng, kVocab));
  HeadConfig config;
  config.terms = {{.name = "ce"}};
  const RunResult whole = run(config, in, {.chunk = 2048});
  ASSERT_TRUE(whole.checked.ok()) << whole.checked.to_string();
  for (int i = 0; i < 5; ++i) {
    const RunResult lodged = run(config, in, {.budget_bytes = kBudget});
    ASSERT_EQ(lodged.lodged_rows, 512);
    ASSERT_EQ(lodged.n_chunks, 2);
    expect_same_bits(whole, lodged, "run " + std::to_string(i));
  }
}

// The same in a bf16 d_weight, which the product rounds: rows of labels, some of many rows, wait in
// float32.
TEST_P(CudaLinearHead, TheSameBitsWithExponentialsLodgedInABF16DWeight) {
  for (const size_t mix : {0, 2, 5}) {
    Case drawn = draw(rng, mixes()[mix], 200, 320, 3200);
    for (size_t i = 0; i < 100; ++i) {
      int64_t& label = drawn.head.inputs.labels[i];
      if (label >= 0) label = label % 3 == 0 ? 3199 : label % 7;
    }
    const RunOptions small = {.budget_bytes = 4000000, .round_d_weight = true};
    const RunResult whole =
        run(drawn.head.config, drawn.head.inputs, {.chunk = 256, .round_d_weight = true});
    const RunResult lodged = run(drawn.head.config, drawn.head.inputs, small);
    ASSERT_TRUE(lodged.checked.ok()) << lodged.checked.to_string();
    EXPECT_EQ(whole.lodged_rows, 0);
    EXPECT_EQ(lodged.lodged_rows, 200);
    EXPECT_EQ(lodged.mode, "chunk");
    expect_same_bits(whole, lodged, "bf16 d_weight");
    EXPECT_EQ(whole.d_weight_rounded, lodged.d_weight_rounded);
    if (mix != 5) expect_oracle(drawn, small);  // the bound of a sequence's mean says too little
    RunOptions added = small;
    added.accumulate = true;
    EXPECT_EQ(run(drawn.head.config, drawn.head.inputs, added).ran.code(), kHeadShapeMismatch);
  }
}

// A row's bits do not depend on its neighbours.
TEST_P(CudaLinearHead, TheSameBitsInEveryBatch) {
  const Case drawn = draw(rng, named({{.divisor = 7}}), 300, 64, 700);
  const RunResult all = run(drawn.head.config, drawn.head.inputs, {});
  for (const int64_t first : {0, 1, 129, 299}) {
    HeadInputs in = drawn.head.inputs;
    in.shape.n_tok = 1;
    const auto cut = [&](auto& values, int64_t width) {
      if (values.empty()) return;
      values = {values.begin() + first * width, values.begin() + (first + 1) * width};
    };
    cut(in.hidden, 64);
    cut(in.labels, 1);
    cut(in.token_weights, 1);
    in.segments.clear();
    in.pairs.clear();
    in.mask.clear();
    in.n_segments = 0;
    in.advantages.clear();
    in.old_log_probs.clear();
    in.reference_log_probs.clear();
    const RunResult one = run(drawn.head.config, in, {});
    ASSERT_TRUE(one.checked.ok()) << one.planned.to_string() << one.ran.to_string();
    EXPECT_EQ(one.token_loss[0], all.token_loss[first]);
    EXPECT_EQ(one.lse[0], all.lse[first]);
    EXPECT_TRUE(
        std::equal(one.d_hidden.begin(), one.d_hidden.end(), all.d_hidden.begin() + first * 64));
  }
}

TEST_P(CudaLinearHead, IgnoredRowsAreNeverHeard) {
  Case drawn = draw(rng, named({{}, {.kind = LossKind::kZLoss, .weight = 0.1}}), 300, 64, 700);
  HeadInputs& in = drawn.head.inputs;
  const RunResult clean = run(drawn.head.config, in, {});
  for (int64_t i = 0; i < 300; ++i) {
    if (in.labels[i] >= 0) continue;
    for (int64_t k = 0; k < 64; ++k) in.hidden[i * 64 + k] = k % 2 ? NAN : INFINITY;
  }
  const RunResult poisoned = run(drawn.head.config, in, {});
  EXPECT_TRUE(poisoned.checked.ok()) << poisoned.checked.to_string();
  expect_same_bits(clean, poisoned, "poisoned");
  for (int64_t i = 0; i < 300; ++i) {
    if (in.labels[i] >= 0) continue;
    EXPECT_EQ(poisoned.token_loss[i], 0);
    for (int64_t k = 0; k < 64; ++k) ASSERT_EQ(poisoned.d_hidden[i * 64 + k], 0);
  }
}

TEST_P(CudaLinearHead, FaultsAreReported) {
  Case drawn = draw(rng, named({{}}), 20, 64, 50);
  HeadInputs in = drawn.head.inputs;
  in.labels[7] = 50;
  EXPECT_EQ(run(drawn.head.config, in, {}).checked.code(), kLossTargetOutOfRange);
  in = drawn.head.inputs;
  in.weight[3 * 64] = NAN;
  const RunResult nan = run(drawn.head.config, in, {});
  EXPECT_EQ(nan.checked.code(), kCudaNonFinite);
  EXPECT_TRUE(std::isnan(nan.total[0]));
}

// Logits far from zero: every tile shifted alike (an offset of 100), and tiles shifted differently
// (some columns at 150).
TEST_P(CudaLinearHead, LargeOffsetsTakeAShift) {
  for (const bool everywhere : {true, false}) {
    Case drawn = draw(rng, named({{}, {.kind = LossKind::kZLoss, .weight = 1e-4}}), 130, 64, 900);
    HeadInputs& in = drawn.head.inputs;
    for (int64_t i = 0; i < 130; ++i) in.hidden[i * 64] = 1;
    for (int64_t j = 0; j < 900; ++j) {
      in.weight[j * 64] = everywhere ? 100 : (j % 300 == 17 ? 150 : 0);
      if (!everywhere && j % 300 == 17) in.labels[j % 130] = j;
    }
    expect_oracle(drawn, {});
  }
}

// Rows sure of their label, 1 - q_y from 1e-3 to 1e-9, with logits near zero and near 100. All
// products and their sums are exact here, so an exponential is off by what its argument was rounded
// by, twice, and 2^-22 for ex2; a sum over V columns by 2^-24 for each addition on an element's
// way: 24 of a lane's, 3 of the row's in the tile, those of V / 192 / 32 tiles, 5 of a warp; and
// the odds by 10 roundings more (two exponentials, a product, log1p). The loss is off by no more
// than the odds, relative to itself, and so is the label's gradient.
TEST_P(CudaLinearHead, SureRowsKeepTheDigitsOfTheirLoss) {
  constexpr int64_t kRows = 70, kWidth = 64, kVocab = 5001;
  for (const double offset : {0.0, 100.0}) {
    Case drawn = draw(rng, named({{.divisor = 9}}), kRows, kWidth, kVocab);
    HeadInputs& in = drawn.head.inputs;
    in.token_weights.clear();
    in.class_weights.clear();
    in.upstream_rows.clear();
    drawn.head.config.options.logits_scale = 1;
    drawn.where += ", offset " + std::to_string(offset);
    for (double& w : in.weight) w = 0x1p-4 * static_cast<double>(below(rng, 9) - 4);
    for (double& h : in.hidden) h = below(rng, 2) == 0 ? 1 : -1;
    for (int64_t i = 0; i < kRows; ++i) {
      in.labels[i] = i * 71 % kVocab;
      const double gain = 0x1p-6 * static_cast<double>(16 + below(rng, 15));
      for (int64_t k = 1; k < kWidth; ++k)
        in.weight[in.labels[i] * kWidth + k] = gain * in.hidden[i * kWidth + k];
      in.hidden[i * kWidth] = 1;
    }
    for (int64_t j = 0; j < kVocab; ++j) in.weight[j * kWidth] = offset;
    const RunResult actual = run(drawn.head.config, in, {});
    ASSERT_TRUE(actual.checked.ok()) << actual.planned.to_string() << actual.checked.to_string();
    const HeadResult expected = reference::head_losses(drawn.head.config, in);
    const Bounds bounds(in, 1);
    std::vector<double> loss, log_prob, loss_bound, lse_bound, hidden_bound(kRows * kWidth, 0);
    for (int64_t i = 0; i < kRows; ++i) {
      const int64_t label = in.labels[i];
      std::vector<double> logits(kVocab, 0);
      double top = -INFINITY, others = 0, argument = 0;
      for (int64_t j = 0; j < kVocab; ++j) {
        for (int64_t k = 0; k < kWidth; ++k)
          logits[j] += in.hidden[i * kWidth + k] * in.weight[j * kWidth + k];
        if (j != label) top = std::max(top, logits[j]);
      }
      for (int64_t j = 0; j < kVocab; ++j) {
        if (j == label) continue;
        // Of an exponent. A tile's shift brings its largest to within e^16 of 1 or e^6, e^4 of
        // that.
        const double from = offset == 0 ? std::abs(logits[j]) : 16 + top - logits[j];
        others += std::exp(logits[j] - top);
        argument += std::exp(logits[j] - top) * from;
      }
      const double relative = argument / others * 0x1p-23 + 0x1p-22 +
                              (24 + 3 + kVocab / 192 / 32 + 1 + 5 + 10) * 0x1p-24;
      EXPECT_LT(relative, 8e-6);
      // The oracle's own, lse - logit, is off by 1e-15 to 1e-14.
      loss.push_back(std::log1p(others * std::exp(top - logits[label])));
      log_prob.push_back(-loss.back());
      EXPECT_NEAR(loss.back(), expected.token_loss[i], 1e-12);
      loss_bound.push_back(relative * loss.back());
      lse_bound.push_back(0x1p-21 * std::abs(expected.lse[i]) + relative);
      // f16 stores an exponential to 2^-25, of its tile's sum, 2^-6 or more without the label's,
      // and once more of the row's, 2^8 or more with it (Bounds).
      const double p = in.upstream / 9, doubt = -std::expm1(log_prob[i]);
      const double tiny = bounds.f16 ? p * (0x1.01p-19 * doubt + 0x1p-33) : 0;
      for (int64_t j = 0; j < kVocab; ++j) {
        const double g = std::abs(expected.d_logits[i * kVocab + j]);
        const double off = j == label
                               ? g * (relative + 0x1p-22)
                               : g * (bounds.exponential + relative + kVocab * 0x1p-23) + tiny;
        for (int64_t k = 0; k < kWidth; ++k)
          hidden_bound[i * kWidth + k] += off * std::abs(in.weight[j * kWidth + k]);
      }
      for (int64_t k = 0; k < kWidth; ++k) {
        double& bound = hidden_bound[i * kWidth + k];
        bound += bounds.rounding * (std::abs(expected.d_hidden[i * kWidth + k]) + bound) +
                 bounds.smallest;
      }
    }
    const auto doubles = [](const std::vector<float>& values) {
      return std::vector<double>(values.begin(), values.end());
    };
    expect_close("token_loss", doubles(actual.token_loss), loss, loss_bound, drawn.where);
    expect_close("log_prob", doubles(actual.log_prob), log_prob, loss_bound, drawn.where);
    expect_close("lse", doubles(actual.lse), expected.lse, lse_bound, drawn.where);
    expect_close("d_hidden", widened(actual.d_hidden), expected.d_hidden, hidden_bound,
                 drawn.where);
    const RunResult lodged = run(drawn.head.config, in, {.budget_bytes = 600000});
    EXPECT_EQ(lodged.lodged_rows, kRows);
    expect_same_bits(actual, lodged, drawn.where + ", lodged");
    RunOptions added = {.accumulate = true, .told = true};
    const RunResult whole = run(drawn.head.config, in, added);
    added.budget_bytes = 850000;
    const RunResult strips = run(drawn.head.config, in, added);
    EXPECT_EQ(strips.mode, "strip");
    EXPECT_EQ(strips.token_loss, actual.token_loss);
    expect_same_bits(whole, strips, drawn.where + ", by strips");
  }
}

// A bf16 accumulator stalls at half of the truth here (256 partial sums of the same small number).
TEST_P(CudaLinearHead, LongSumsDoNotStall) {
  constexpr int64_t kRows = 4096, kWidth = 64, kVocab = 32768;
  HeadInputs in;
  in.shape = {kRows, kWidth, kVocab};
  in.hidden.assign(kRows * kWidth, 1);
  in.weight.assign(kVocab * kWidth, 0);
  in.labels.assign(kRows, 0);
  HeadConfig config;
  config.terms = {{.name = "ce", .divisor = 1}};
  const RunResult result = run(config, in, {.chunk = 512});
  ASSERT_TRUE(result.checked.ok()) << result.checked.to_string();
  for (int64_t j = 0; j < kVocab; ++j) {
    for (int64_t k = 0; k < kWidth; ++k) {
      ASSERT_EQ(result.d_weight[j * kWidth + k], j == 0 ? -4095.875F : 0.125F) << j;
    }
  }
}

// The first 256 rows are peaked: nearly all of their softmax lies in their label's column. What is
// left out stays within the tolerance, and the gradients within the bounds that the report implies.
TEST_P(CudaLinearHead, TheFilterKeepsItsBounds) {
  constexpr int64_t kRows = 600, kWidth = 160, kVocab = 5001, kLodgingBudget = 5500000;
  Case drawn = draw(rng, named({{.divisor = 9}}), kRows, kWidth, kVocab);
  HeadInputs& in = drawn.head.inputs;
  double largest_weight = 0, largest_hidden = 0;
  for (int64_t i = 0; i < 256; ++i) {
    in.labels[i] = i * 19 % kVocab;
    const double* const w = &in.weight[in.labels[i] * kWidth];
    double square = 0;
    for (int64_t k = 0; k < kWidth; ++k) square += w[k] * w[k];
    for (int64_t k = 0; k < kWidth; ++k) in.hidden[i * kWidth + k] = rounded(30 / square * w[k]);
  }
  for (int64_t j = 0; j < kVocab; ++j)
    largest_weight = std::max(largest_weight, norm(&in.weight[j * kWidth], kWidth));
  for (int64_t i = 0; i < kRows; ++i)
    largest_hidden = std::max(largest_hidden, norm(&in.hidden[i * kWidth], kWidth));
  const HeadConfig& config = drawn.head.config;
  const RunResult exact = run(config, in, {.chunk = 2048});
  ASSERT_TRUE(exact.checked.ok()) << exact.checked.to_string();
  for (const double tolerance : {1e-9, 1e-3, 0.3, 0.9}) {
    RunResult first;
    // The last: 256 rows in d_weight's memory, 256 beside them, the rest.
    for (const int64_t chunk : {2048, 256, 0}) {
      const RunResult part = run(config, in,
                                 {.chunk = chunk,
                                  .budget_bytes = chunk == 0 ? kLodgingBudget : 0,
                                  .filter_tolerance = tolerance});
      ASSERT_TRUE(part.checked.ok()) << part.checked.to_string();
      const std::string where = "tolerance " + std::to_string(tolerance);
      EXPECT_EQ(part.token_loss, exact.token_loss) << where;
      EXPECT_EQ(part.lse, exact.lse) << where;
      EXPECT_LE(part.filter.largest_share, tolerance) << where;
      if (chunk == 2048) {
        first = part;
        if (tolerance < 1e-6) {
          EXPECT_EQ(part.d_weight, exact.d_weight);
        }
        if (tolerance == 1e-3) {
          EXPECT_LT(part.filter.kept, 0.75) << where;
          EXPECT_GT(part.filter.largest_share, 0) << where;
        }
      } else {
        EXPECT_EQ(part.lodged_rows, chunk == 0 ? 256 : 0);
        EXPECT_EQ(part.n_chunks, chunk == 0 ? 2 : 3);
        expect_same_bits(first, part, where + ", chunk " + std::to_string(chunk));
      }
      double weight_square = 0;
      for (int64_t i = 0; i < kRows; ++i) {
        double square = 0, size = 0;
        for (int64_t k = 0; k < kWidth; ++k) {
          const double a = number_of(part.d_hidden[i * kWidth + k]);
          const double b = number_of(exact.d_hidden[i * kWidth + k]);
          square += (a - b) * (a - b);
          size += a * a + b * b;
        }
        // Beside what was left out, both were rounded.
        EXPECT_LE(std::sqrt(square),
                  part.filter.largest_gradient * largest_weight * 1.01 +
                      (element == DType::kF16 ? 0x1p-11 : 0x1p-8) * std::sqrt(size) +
                      (element == DType::kF16 ? 0x1p-20 : 1e-30))
            << where << ", row " << i;
      }
      for (size_t k = 0; k < part.d_weight.size(); ++k) {
        const double difference = part.d_weight[k] - exact.d_weight[k];
        weight_square += difference * difference;
      }
      EXPECT_LE(std::sqrt(weight_square), part.filter.total_gradient * largest_hidden * 1.01 + 1e-5)
          << where;
    }
  }
}

TEST_P(CudaLinearHead, NoRowsGiveZeroGradients) {
  HeadInputs in;
  in.shape = {0, 64, 100};
  in.weight.assign(6400, 1);
  HeadConfig config;
  config.terms = {{.name = "z", .kind = LossKind::kZLoss}};
  const RunResult result = run(config, in, {});
  ASSERT_TRUE(result.ran.ok()) << result.planned.to_string() << result.ran.to_string();
  EXPECT_EQ(result.total[0], 0);
  for (const float g : result.d_weight) ASSERT_EQ(g, 0);
}

}  // namespace
}  // namespace ullage::test
