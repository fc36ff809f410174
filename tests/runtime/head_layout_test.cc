// Layouts, requests and sizes that users of other libraries report trouble with, on caller's memory
// of every shape: the numbers in brackets are those of tests/reference/head_*answers_test.cc.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <new>

#include "support/compare.h"
#include "support/head_plan_case.h"
#include "support/head_random.h"
#include "support/run_in_memory.h"

namespace ullage::test {
namespace {

using lossk::HeadPlan;
using lossk::Inputs;
using lossk::Outputs;
using lossk::Request;
using lossk::Shape;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

std::vector<float> floats(Rng& rng, int64_t n, double scale) {
  std::vector<float> values;
  for (const double value : normals(rng, n, scale)) values.push_back(static_cast<float>(value));
  return values;
}

const HeadConfig kSum = {.terms = {{.name = "ce", .divisor = 1}}};

// R16: every other column block, strided and 32-bit labels, an expanded upstream, strided outputs:
// the bits of contiguous memory.
TEST(HeadLayout, StridesAndIdTypes) {
  Rng rng(test_seed());
  constexpr int64_t n = 6, d = 8, v = 33;
  const std::vector<float> hidden = floats(rng, n * d, 1), weight = floats(rng, v * d, 1);
  const std::vector<int64_t> labels = {3, 32, -1, 0, 7, 7};
  const Request request = {.d_hidden = true, .d_weight = true};
  std::vector<float> dx(n * d, NAN), dw(v * d, NAN);
  std::vector<double> loss(n, kNan);
  const double three = 3;
  Inputs in;
  in.hidden = {hidden.data(), DType::kF32, n, d, d};
  in.weight = {weight.data(), DType::kF32, v, d, d};
  in.labels = {labels.data(), 8, n};
  const std::vector<double> threes(n, three);
  in.upstream_rows = {threes.data(), DType::kF64, n};
  Outputs out;
  out.token_loss = {loss.data(), DType::kF64, n};
  out.d_hidden = {dx.data(), DType::kF32, n, d, d};
  out.d_weight = {dw.data(), DType::kF32, v, d, d};
  run({n, d, v}, kSum, request, {}, in, out);

  const auto spread = [](const std::vector<float>& values, int64_t cols, int64_t stride) {
    std::vector<float> wide(values.size() / cols * stride, NAN);
    for (size_t i = 0; i < values.size(); ++i) wide[i / cols * stride + i % cols] = values[i];
    return wide;
  };
  const auto gather = [](const std::vector<float>& wide, int64_t cols, int64_t stride) {
    std::vector<float> values(wide.size() / stride * cols);
    for (size_t i = 0; i < values.size(); ++i) values[i] = wide[i / cols * stride + i % cols];
    return values;
  };
  const std::vector<float> wide_hidden = spread(hidden, d, 2 * d + 1);
  const std::vector<float> wide_weight = spread(weight, d, d + 3);
  std::vector<int32_t> wide_labels(3 * n, 1 << 20);
  for (int64_t i = 0; i < n; ++i) wide_labels[3 * i] = static_cast<int32_t>(labels[i]);
  std::vector<float> wide_dx(n * (d + 5), NAN), wide_dw(v * (d + 1), NAN), wide_loss(2 * n, NAN);
  Inputs strided = in;
  strided.hidden = {wide_hidden.data(), DType::kF32, n, d, 2 * d + 1};
  strided.weight = {wide_weight.data(), DType::kF32, v, d, d + 3};
  strided.labels = {wide_labels.data(), 4, n, 3};
  strided.upstream_rows = {&three, DType::kF64, n, 0};
  Outputs strided_out;
  strided_out.token_loss = {wide_loss.data(), DType::kF32, n, 2};
  strided_out.d_hidden = {wide_dx.data(), DType::kF32, n, d, d + 5};
  strided_out.d_weight = {wide_dw.data(), DType::kF32, v, d, d + 1};
  run({n, d, v}, kSum, request, {}, strided, strided_out);
  EXPECT_EQ(gather(wide_dx, d, d + 5), dx);
  EXPECT_EQ(gather(wide_dw, d, d + 1), dw);
  for (int64_t i = 0; i < n; ++i) {
    EXPECT_EQ(wide_loss[2 * i], static_cast<float>(loss[i]));
    EXPECT_TRUE(std::isnan(wide_loss[2 * i + 1])) << "written between the strides";
  }
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t k = d; k < d + 5; ++k) EXPECT_TRUE(std::isnan(wide_dx[i * (d + 5) + k]));
  }
}

// The gradient in the logits' own memory has the bits of one beside it.
TEST(HeadLayout, InPlace) {
  Rng rng(test_seed() + 1);
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t v : {1, 2, 31, 129, 1000, 8003}) {
      for (const LossTerm& term : term_variants()) {
        if (v > 200 && term.name != "ce_smoothed" && term.name != "kd_rkl") continue;
        constexpr int64_t n = 4;
        RandomHead head = random_head(rng, n, 0, v);
        head.config.terms = {term, {.name = "second", .weight = 0.5}};
        for (lossk::Teacher& teacher : head.config.teachers) {
          teacher.dtype = teacher.weight_dtype = DType::kF64;
        }
        const HeadInputs& given = head.inputs;
        const auto f64 = [](const std::vector<double>& values) {
          return VectorView{values.data(), DType::kF64, static_cast<int64_t>(values.size())};
        };
        Stored logits(given.logits, dtype), beside(given.logits, dtype);
        Inputs in;
        in.logits = logits.matrix(v);
        in.labels = ids_of(given.labels);
        in.mask = given.mask;
        in.advantages = f64(given.advantages);
        in.old_log_probs = f64(given.old_log_probs);
        in.reference_log_probs = f64(given.reference_log_probs);
        in.segments = ids_of(given.segments);
        in.n_segments = given.n_segments;
        in.pairs = ids_of(given.pairs);
        Stored t0(given.teachers[0].logits, DType::kF64), t1(given.teachers[1].hidden, DType::kF64),
            w1(given.teachers[1].weight, DType::kF64);
        in.teachers.resize(3);
        in.teachers[0].logits = t0.matrix(v);
        in.teachers[1].hidden = t1.matrix(3);
        in.teachers[1].weight = w1.matrix(3);
        in.teachers[2].ids = ids_of(given.teachers[2].ids);
        in.teachers[2].log_probs = f64(given.teachers[2].log_probs);
        const Request request = {.input_dtype = dtype, .grad_dtype = dtype, .d_logits = true};
        double total_beside = kNan, total = kNan;
        Outputs out;
        out.total = &total_beside;
        out.d_logits = {beside.data(), dtype, n, v, v};
        run({n, 0, v}, head.config, request, {}, in, out);
        out.total = &total;
        out.d_logits.data = logits.data();
        run({n, 0, v}, head.config, request, {}, in, out);
        EXPECT_EQ(logits.bytes, beside.bytes) << term.name << " " << name_of(dtype) << " " << v;
        EXPECT_EQ(total, total_beside) << term.name;
      }
    }
  }
}

// R7: what is frozen is skipped, and changes nothing else.
TEST(HeadLayout, EveryCombinationOfGradients) {
  Rng rng(test_seed() + 2);
  constexpr int64_t n = 7, d = 5, v = 40;
  const std::vector<float> hidden = floats(rng, n * d, 1), weight = floats(rng, v * d, 1),
                           bias = floats(rng, v, 1);
  const std::vector<int64_t> labels = {3, 32, -1, 0, 7, 7, 39};
  HeadConfig config = kSum;
  config.options.bias = true;
  Inputs in;
  in.hidden = {hidden.data(), DType::kF32, n, d, d};
  in.weight = {weight.data(), DType::kF32, v, d, d};
  in.bias = {bias.data(), DType::kF32, v};
  in.labels = {labels.data(), 8, n};
  std::vector<float> all_dx, all_dw, all_db;
  double value = kNan;
  for (int mask = 7; mask >= 0; --mask) {
    const Request request = {
        .d_hidden = (mask & 1) != 0, .d_weight = (mask & 2) != 0, .d_bias = (mask & 4) != 0};
    std::vector<float> dx(n * d, NAN), dw(v * d, NAN), db(v, NAN);
    double total = kNan;
    Outputs out;
    out.total = &total;
    if (request.d_hidden) out.d_hidden = {dx.data(), DType::kF32, n, d, d};
    if (request.d_weight) out.d_weight = {dw.data(), DType::kF32, v, d, d};
    if (request.d_bias) out.d_bias = {db.data(), DType::kF32, v};
    run({n, d, v}, config, request, {.chunk = 3}, in, out);
    if (mask == 7) {
      all_dx = dx;
      all_dw = dw;
      all_db = db;
      value = total;
    }
    EXPECT_EQ(total, value);
    if (request.d_hidden) {
      EXPECT_EQ(dx, all_dx);
    }
    if (request.d_weight) {
      EXPECT_EQ(dw, all_dw);
    }
    if (request.d_bias) {
      EXPECT_EQ(db, all_db);
    }
    const Result<HeadPlan> plan = lossk::plan({n, d, v}, config, request, {.chunk = 3});
    ASSERT_TRUE(plan);
    for (const Booking& booking : plan->bookings()) {
      if (!request.d_hidden) {
        EXPECT_EQ(booking.purpose.find("d_hidden"), std::string::npos);
      }
      if (!request.d_weight) {
        EXPECT_EQ(booking.purpose.find("d_weight"), std::string::npos);
      }
    }
  }
}

// R3: 4096 equal rows of bf16, whose partial sums are exact: a d_weight that accumulates in 16 bits
// stalls at half of the right answer.
TEST(HeadLayout, WeightGradientDoesNotStall) {
  constexpr int64_t n = 4096, d = 2, v = 32768;
  const std::vector<double> ones(n * d, 1.0);
  Stored hidden(ones, DType::kBF16), weight(std::vector<double>(v * d, 0.0), DType::kBF16);
  const std::vector<int64_t> labels(n, 0);
  for (const int64_t chunk : {8, 1024}) {
    Stored dw(std::vector<double>(v * d, kNan), DType::kBF16);
    Inputs in;
    in.hidden = hidden.matrix(d);
    in.weight = weight.matrix(d);
    in.labels = ids_of(labels);
    Outputs out;
    out.d_weight = {dw.data(), DType::kBF16, v, d, d};
    run({n, d, v}, kSum,
        {.input_dtype = DType::kBF16,
         .weight_dtype = DType::kBF16,
         .d_weight_dtype = DType::kBF16,
         .d_weight = true},
        {.chunk = chunk}, in, out);
    std::vector<double> right(v * d, 0.125);
    right[0] = right[1] = -4096;  // -4095.875 rounded
    EXPECT_EQ(dw.values(), right);
  }
}

// R4: the label's gradient in bf16 is the float32 value rounded once.
TEST(HeadLayout, LabelGradientIsRoundedOnce) {
  const std::vector<double> z = {13.8125, 16.125}, right = {-.000999451, -9.91821e-5};
  for (size_t i = 0; i < z.size(); ++i) {
    std::vector<double> row(1000, 0);
    row[7] = z[i];
    Stored logits(row, DType::kBF16), d_logits(row, DType::kBF16);
    const std::vector<int64_t> labels = {7};
    Inputs in;
    in.logits = logits.matrix(1000);
    in.labels = ids_of(labels);
    Outputs out;
    out.d_logits = {d_logits.data(), DType::kBF16, 1, 1000, 1000};
    run({1, 0, 1000}, kSum,
        {.input_dtype = DType::kBF16, .grad_dtype = DType::kBF16, .d_logits = true}, {}, in, out);
    EXPECT_NEAR(d_logits.values()[7], right[i], 1e-6 * std::abs(right[i]));
  }
}

// The same in float32, where the others are a millionth of the label: their sum keeps its digits.
TEST(HeadLayout, ConfidentRowsKeepTheirDigits) {
  constexpr int64_t v = 2000;
  for (const double z : {8.0, 12.0, 16.0, 20.0}) {
    PlanCase c;
    c.config = kSum;
    c.inputs.shape = {1, 0, v};
    c.inputs.logits.assign(v, 0);
    c.inputs.logits[1234] = z;
    c.inputs.labels = {1234};
    c.request.input_dtype = c.request.grad_dtype = DType::kF32;
    const HeadResult result = run_plan(c).result;
    const double rest = (v - 1) * std::exp(-z);
    EXPECT_NEAR(result.total, std::log1p(rest), 1e-6 * std::log1p(rest)) << z;
    EXPECT_NEAR(result.d_logits[1234], -rest / (1 + rest), 1e-6 * rest) << z;
  }
}

// R17: a row has the same bits alone as among others, whatever the chunk.
TEST(HeadLayout, RowsDoNotDependOnTheirNeighbours) {
  Rng rng(test_seed() + 3);
  constexpr int64_t n = 131, d = 40, v = 203;
  for (const DType dtype : {DType::kF64, DType::kF32, DType::kBF16}) {
    RandomHead head = random_head(rng, n, d, v);
    PlanCase c;
    c.config = kSum;
    c.config.terms.push_back({.name = "z", .kind = LossKind::kZLoss, .weight = 0.1, .divisor = 1});
    c.request.input_dtype = c.request.weight_dtype = c.request.grad_dtype =
        c.request.d_weight_dtype = dtype;
    const auto part = [&](int64_t first, int64_t count, int64_t chunk) {
      c.inputs = {};
      c.inputs.shape = {count, d, v};
      c.inputs.hidden.assign(head.inputs.hidden.begin() + first * d,
                             head.inputs.hidden.begin() + (first + count) * d);
      c.inputs.weight = head.inputs.weight;
      c.inputs.labels.assign(head.inputs.labels.begin() + first,
                             head.inputs.labels.begin() + first + count);
      c.limits.chunk = chunk;
      return run_plan(c).result;
    };
    const HeadResult whole = part(0, n, n);
    for (const auto& [first, count, chunk] : {std::tuple<int64_t, int64_t, int64_t>{0, 1, 1},
                                              {5, 1, 1},
                                              {130, 1, 1},
                                              {3, 7, 7},
                                              {1, 128, 128},
                                              {1, 128, 64},
                                              {0, n, 7}}) {
      const HeadResult some = part(first, count, chunk);
      for (int64_t i = 0; i < count; ++i) {
        ASSERT_EQ(some.token_loss[i], whole.token_loss[first + i]);
        ASSERT_EQ(some.lse[i], whole.lse[first + i]);
        ASSERT_EQ(some.label_log_prob[i], whole.label_log_prob[first + i]);
        for (int64_t k = 0; k < d; ++k) {
          ASSERT_EQ(some.d_hidden[i * d + k], whole.d_hidden[(first + i) * d + k])
              << name_of(dtype) << " row " << first + i << " of " << count << " by " << chunk;
        }
      }
    }
  }
}

// R19: large common offsets, where the differences are representable.
TEST(HeadLayout, CommonOffset) {
  const auto total = [](std::vector<double> row, DType dtype) {
    PlanCase c;
    c.config = kSum;
    c.inputs.shape = {1, 0, static_cast<int64_t>(row.size())};
    c.inputs.logits = std::move(row);
    c.inputs.labels = {0};
    c.request.input_dtype = c.request.grad_dtype = dtype;
    return run_plan(c).result.total;
  };
  for (const double offset : {1e4, 3e4, -1e4}) {
    EXPECT_NEAR(total({offset, offset + 1, offset + 2}, DType::kF32), 2.407605964, 1e-6);
  }
  EXPECT_NEAR(total({30000, 30016, 30032}, DType::kF16), 32 + std::log1p(std::exp(-16.0)), 1e-5);
  // Gaps beyond e^-104 are not infinite.
  EXPECT_EQ(total({0, 100}, DType::kF32), 100.0);
  EXPECT_EQ(total({-200, 0}, DType::kBF16), 200.0);
}

// The same of two rows with an offset between them, confident ones too.
TEST(HeadLayout, CommonOffsetOfADistillation) {
  constexpr int64_t v = 5003;
  Rng rng(test_seed() + 9);
  std::vector<double> student = normals(rng, v, 2), teacher = normals(rng, v, 2);
  for (auto* row : {&student, &teacher}) {
    for (double& x : *row) x = std::round(x * 256) / 256;  // exact beside 2^13 in float32
    (*row)[7] = 24;
  }
  for (const Divergence divergence : {Divergence::kCrossEntropy, Divergence::kForwardKl,
                                      Divergence::kReverseKl, Divergence::kJensenShannon}) {
    const auto outcome = [&](double offset) {
      PlanCase c;
      c.config.terms = {{.name = "kd", .kind = LossKind::kDistillation, .divergence = divergence}};
      c.config.teachers = {{.vocab = v, .dtype = DType::kF32}};
      c.inputs.shape = {1, 0, v};
      c.inputs.logits = student;
      for (double& x : c.inputs.logits) x += offset;
      c.inputs.teachers = {{.logits = teacher}};
      c.request.input_dtype = c.request.grad_dtype = DType::kF32;
      return run_plan(c);
    };
    const PlanOutcome plain = outcome(0);
    for (const double offset : {8192.0, -8192.0}) {
      const PlanOutcome far = outcome(offset);
      ASSERT_TRUE(far.status.ok()) << far.status.to_string();
      EXPECT_NEAR(far.result.total, plain.result.total, 1e-10 + 1e-7 * plain.result.total);
      for (size_t j = 0; j < v; ++j) {
        ASSERT_NEAR(far.result.d_logits[j], plain.result.d_logits[j], 1e-9) << j;
      }
    }
  }
}

// R21: the upstream factor is applied in the accumulate type, before the one rounding.
TEST(HeadLayout, UpstreamFactor) {
  Rng rng(test_seed() + 4);
  RandomHead head = random_head(rng, 4, 0, 50);
  PlanCase c;
  c.config = kSum;
  c.inputs = head.inputs;
  c.inputs.teachers.clear();
  c.request.input_dtype = c.request.grad_dtype = DType::kF32;
  const HeadResult one = run_plan(c).result;
  c.inputs.upstream = .5;
  const HeadResult half = run_plan(c).result;
  for (size_t i = 0; i < one.d_logits.size(); ++i) {
    EXPECT_EQ(half.d_logits[i], one.d_logits[i] / 2);
  }
  EXPECT_EQ(run_plan(c).result.d_logits, half.d_logits) << "the second time";
  // 2^16 q is representable in f16 where q alone is flushed; and no intermediate overflows.
  c.inputs = {};
  c.inputs.shape = {1, 0, 3};
  c.inputs.logits = {0, -20, -21};
  c.inputs.labels = {0};
  c.inputs.upstream = 65536;
  c.request.input_dtype = c.request.grad_dtype = DType::kF16;
  const HeadResult scaled = run_plan(c).result;
  EXPECT_NEAR(scaled.d_logits[1], 65536 * std::exp(-20.0), 1e-7);
}

// R2: gradient buffers that hold NaN before; ignored rows become exactly 0.
TEST(HeadLayout, IgnoredRowsAreWrittenAsZeros) {
  Rng rng(test_seed() + 5);
  RandomHead head = random_head(rng, 64, 32, 513);
  PlanCase c;
  c.config = {.terms = {{.name = "ce"}}};
  c.inputs = head.inputs;
  c.inputs.teachers.clear();
  c.initial = kNan;
  c.request.input_dtype = c.request.weight_dtype = c.request.grad_dtype = c.request.d_weight_dtype =
      DType::kF32;
  const PlanOutcome outcome = run_plan(c);
  ASSERT_TRUE(outcome.status.ok());
  for (const double g : outcome.result.d_weight) ASSERT_TRUE(std::isfinite(g));
  for (int64_t row = 0; row < 64; ++row) {
    for (int64_t k = 0; k < 32; ++k) {
      const double g = outcome.result.d_hidden[row * 32 + k];
      ASSERT_TRUE(std::isfinite(g));
      if (c.inputs.labels[row] < 0) {
        ASSERT_EQ(g, 0.0);
      }
    }
    if (c.inputs.labels[row] < 0) {
      EXPECT_EQ(outcome.result.token_loss[row], 0.0);
    }
  }
}

}  // namespace
}  // namespace ullage::test
