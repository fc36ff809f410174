// Counts and distances past 16 and 32 bits, and columns that belong to another shard. The numbers
// R.. are those of the collected complaints about other implementations.
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "support/head_plan_case.h"
#include "support/head_random.h"
#include "support/run_in_memory.h"

namespace ullage::test {
namespace {

using lossk::HeadConfig;
using lossk::Inputs;
using lossk::LossKind;
using lossk::Outputs;
using lossk::Shape;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
const HeadConfig kSum = {.terms = {{.name = "ce", .divisor = 1}}};

// Zeros of which only the pages that are written exist; null where this host maps so much not.
class SparseFloats {
 public:
  explicit SparseFloats(int64_t count) : bytes_(static_cast<size_t>(count) * sizeof(float)) {
    void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory != MAP_FAILED) data_ = static_cast<float*>(memory);
  }
  SparseFloats(const SparseFloats&) = delete;
  SparseFloats& operator=(const SparseFloats&) = delete;
  ~SparseFloats() {
    if (data_) munmap(data_, bytes_);
  }
  float* data() const { return data_; }

 private:
  size_t bytes_;
  float* data_ = nullptr;
};

// R6b: a weight and its gradient of more than 2^31 elements, in a sparse mapping: the bits of the
// same rows close together, in whole rows and in strips.
TEST(HeadIndex, WeightsBeyond32Bits) {
  constexpr int64_t n = 3, d = 5, v = 4200, stride = (int64_t{1} << 20) + 3;
  static_assert((v - 1) * stride > int64_t{1} << 31);
  const SparseFloats weight((v - 1) * stride + d), d_weight((v - 1) * stride + d);
  if (!weight.data() || !d_weight.data()) GTEST_SKIP() << "this host maps too little";
  Rng rng(test_seed());
  std::vector<float> close, hidden;
  for (const double x : normals(rng, v * d, 1)) close.push_back(static_cast<float>(x));
  for (const double x : normals(rng, n * d, 1)) hidden.push_back(static_cast<float>(x));
  for (int64_t j = 0; j < v; ++j) {
    std::memcpy(weight.data() + j * stride, close.data() + j * d, d * sizeof(float));
  }
  const std::vector<int64_t> labels = {0, v - 1, 7};
  for (const int64_t budget_bytes : {int64_t{0}, int64_t{1} << 20}) {
    std::vector<float> d_close(close.size(), NAN), dx(hidden.size(), NAN), far_dx = dx;
    Inputs in;
    in.hidden = {hidden.data(), DType::kF32, n, d, d};
    in.labels = {labels.data(), 8, n};
    const auto run_with = [&](const float* w, float* dw, int64_t row_stride, float* d_hidden) {
      in.weight = {w, DType::kF32, v, d, row_stride};
      Outputs out;
      out.d_hidden = {d_hidden, DType::kF32, n, d, d};
      out.d_weight = {dw, DType::kF32, v, d, row_stride};
      run({n, d, v}, kSum, {.d_hidden = true, .d_weight = true},
          {.budget_bytes = budget_bytes, .n_threads = 1}, in, out);
    };
    run_with(close.data(), d_close.data(), d, dx.data());
    run_with(weight.data(), d_weight.data(), stride, far_dx.data());
    EXPECT_EQ(dx, far_dx);
    EXPECT_NE(d_close.back(), 0);
    for (int64_t j = 0; j < v; ++j) {
      ASSERT_EQ(
          std::memcmp(d_weight.data() + j * stride, d_close.data() + j * d, d * sizeof(float)), 0)
          << "row " << j;
    }
  }
}

// R6c: more rows than 16 bits count.
TEST(HeadIndex, ManyRows) {
  constexpr int64_t n = 65537, v = 3;
  const std::vector<float> logits(n * v, 1);
  const std::vector<int32_t> labels(n, 2);
  std::vector<float> d_logits(n * v, NAN);
  double total = kNan;
  Inputs in;
  in.logits = {logits.data(), DType::kF32, n, v, v};
  in.labels = {labels.data(), 4, n};
  Outputs out;
  out.total = &total;
  out.d_logits = {d_logits.data(), DType::kF32, n, v, v};
  run({n, 0, v}, {.terms = {{.name = "ce"}}}, {.d_logits = true}, {}, in, out);
  EXPECT_NEAR(total, std::log(3), 1e-7);
  for (int64_t i = 0; i < n; ++i) ASSERT_EQ(d_logits[3 * i], d_logits[0]);
}

// R6d: rows further apart than 32 bits count, in a sparse mapping.
TEST(HeadIndex, RowStridesBeyond32Bits) {
  constexpr int64_t n = 3, v = 5, stride = (int64_t{1} << 31) + 7;
  const SparseFloats sparse(2 * stride + v);
  float* const rows = sparse.data();
  if (!rows) GTEST_SKIP() << "this host maps too little";
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t j = 0; j < v; ++j)
      rows[i * stride + j] = static_cast<float>(i == 2 && j == 4 ? 10 : 0);
  }
  const std::vector<int64_t> labels = {0, 1, 4};
  std::vector<double> loss(n, kNan);
  Inputs in;
  in.logits = {rows, DType::kF32, n, v, stride};
  in.labels = {labels.data(), 8, n};
  Outputs out;
  out.token_loss = {loss.data(), DType::kF64, n};
  out.d_logits = {rows, DType::kF32, n, v, stride};  // in place
  run({n, 0, v}, kSum, {.d_logits = true}, {}, in, out);
  EXPECT_NEAR(loss[0], std::log(5), 1e-7);
  EXPECT_NEAR(loss[2], std::log(1 + 4 * std::exp(-10.0)), 1e-7);
  EXPECT_NEAR(rows[stride + 1], -.8, 1e-7);
  EXPECT_NEAR(rows[2 * stride + 4], -4 * std::exp(-10.0) / (1 + 4 * std::exp(-10.0)), 1e-10);
}

// R11: two shards of 100 columns, even, uneven, and with one of fewer columns than any vector has
// lanes. A label of the other shard is refused, never looked for among the columns that pad this
// one; and what both report adds up to ln 100.
TEST(HeadIndex, ShardsOfTheVocabularyAddUp) {
  constexpr int64_t kVocab = 100, kLabel = 10;
  for (const int64_t first : {50, 51, 49, 97, 11}) {
    const std::vector<float> zeros(kVocab, 0);
    const std::vector<int64_t> label = {kLabel};
    double lse[2] = {kNan, kNan}, log_prob = kNan;
    std::vector<float> d_logits(kVocab, NAN);
    for (const int shard : {0, 1}) {
      const int64_t columns = shard == 0 ? first : kVocab - first;
      HeadConfig config = kSum;
      config.options.vocab_offset = shard * first;
      Inputs in;
      in.logits = {zeros.data(), DType::kF32, 1, columns, columns};
      in.labels = {label.data(), 8, 1};
      Outputs out;
      out.lse = {&lse[shard], DType::kF64, 1};
      if (shard == 0) {
        out.label_log_prob = {&log_prob, DType::kF64, 1};
        run({1, 0, columns}, config, {}, {}, in, out);
        continue;
      }
      out.d_logits = {d_logits.data(), DType::kF32, 1, columns, columns};
      const auto plan = lossk::plan({1, 0, columns}, config, {.d_logits = true}, {});
      ASSERT_TRUE(plan);
      std::vector<std::byte> room(static_cast<size_t>(plan->workspace_bytes()) + 64);
      void* at = room.data();
      size_t left = room.size();
      std::align(64, static_cast<size_t>(plan->workspace_bytes()), at, left);
      const Status refused = plan->run(
          in, out, {static_cast<std::byte*>(at), static_cast<size_t>(plan->workspace_bytes())});
      EXPECT_EQ(refused.code(), kLossTargetOutOfRange);
      EXPECT_TRUE(std::isnan(lse[1]) && std::isnan(d_logits[0]));
      // Such a row has no label here; its softmax is asked for all the same.
      config.terms = {{.name = "z", .kind = LossKind::kZLoss, .weight = 0}};
      in.labels = {};
      out.d_logits = {};
      run({1, 0, columns}, config, {}, {}, in, out);
    }
    const double all = std::log(std::exp(lse[0]) + std::exp(lse[1]));
    EXPECT_NEAR(all, std::log(100), 1e-7);
    EXPECT_NEAR(all - (log_prob + lse[0]), std::log(100), 1e-7);  // its logit is lse + log_prob
  }
}

}  // namespace
}  // namespace ullage::test
