#include "cpu/attention.h"

#include <algorithm>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/attention.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/row_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// No wider than a block of keys.
using Lanes = hn::CappedTag<float, kKeyBlock>;

// scores[0 .. round_up(n_keys)); what lies past n_keys is of no consequence.
void score_keys(const float* query, const float* keys, int64_t n_keys, int64_t d_head, float scale,
                float* scores) {
  const Lanes d;
  constexpr int64_t kLanes = kLanesOf<Lanes>;
  for (int64_t block = 0; block < n_keys; block += kKeyBlock) {
    const float* block_keys = keys + block * d_head;  // [d_head][kKeyBlock]
    for (int64_t lane = 0; lane < kKeyBlock; lane += kLanes) {
      auto sum = hn::Zero(d);
      for (int64_t i = 0; i < d_head; ++i) {
        sum = fma(d, hn::Set(d, query[i]), hn::Load(d, block_keys + i * kKeyBlock + lane), sum);
      }
      hn::Store(hn::Mul(sum, hn::Set(d, scale)), d, scores + block + lane);
    }
  }
}

// scores[j] = exp(scores[j] - max), 0 past n_keys; returns their sum. Lane l of the sum holds keys
// j = l mod kKeyBlock, whatever the vector width, and lanes are added in ascending order.
float exponentials(int64_t n_keys, float* scores) {
  const Lanes d;
  constexpr int64_t kLanes = kLanesOf<Lanes>;
  const auto max = hn::Set(d, max_row(scores, n_keys));
  HWY_ALIGN float lane_sums[kKeyBlock] = {};
  for (int64_t block = 0; block < n_keys; block += kKeyBlock) {
    for (int64_t lane = 0; lane < kKeyBlock; lane += kLanes) {
      auto e = exp(d, hn::Sub(hn::Load(d, scores + block + lane), max));
      const int64_t n_live = std::clamp<int64_t>(n_keys - block - lane, 0, kLanes);
      e = hn::IfThenElseZero(hn::FirstN(d, static_cast<size_t>(n_live)), e);
      hn::Store(e, d, scores + block + lane);
      hn::Store(hn::Add(hn::Load(d, lane_sums + lane), e), d, lane_sums + lane);
    }
  }
  float sum = 0;
  for (float lane_sum : lane_sums) sum += lane_sum;
  return sum;
}

// Four vectors of the output at a time stay in registers while the keys go by.
void weigh_values(const float* weights, const float* values, int64_t n_keys, int64_t d_head,
                  float inverse_sum, float* out) {
  const Lanes d;
  constexpr int64_t kLanes = kLanesOf<Lanes>;
  const int64_t stride = value_stride(d_head);
  constexpr int64_t kTile = 4 * kLanes;
  const auto normalise = hn::Set(d, inverse_sum);
  for (int64_t first = 0; first < d_head; first += kTile) {
    // Where fewer than four vectors are left, the surplus ones read the first again and are
    // dropped.
    int64_t offset[4];
    for (int64_t t = 0; t < 4; ++t) {
      offset[t] = first + t * kLanes < d_head ? first + t * kLanes : first;
    }
    auto sum0 = hn::Zero(d), sum1 = hn::Zero(d), sum2 = hn::Zero(d), sum3 = hn::Zero(d);
    for (int64_t j = 0; j < n_keys; ++j) {
      const auto weight = hn::Set(d, weights[j]);
      const float* row = values + j * stride;
      sum0 = fma(d, weight, hn::Load(d, row + offset[0]), sum0);
      sum1 = fma(d, weight, hn::Load(d, row + offset[1]), sum1);
      sum2 = fma(d, weight, hn::Load(d, row + offset[2]), sum2);
      sum3 = fma(d, weight, hn::Load(d, row + offset[3]), sum3);
    }
    HWY_ALIGN float sums[4 * kKeyBlock];
    hn::Store(hn::Mul(sum0, normalise), d, sums);
    hn::Store(hn::Mul(sum1, normalise), d, sums + kLanes);
    hn::Store(hn::Mul(sum2, normalise), d, sums + 2 * kLanes);
    hn::Store(hn::Mul(sum3, normalise), d, sums + 3 * kLanes);
    std::memcpy(out + first, sums,
                static_cast<size_t>(std::min(kTile, d_head - first)) * sizeof(float));
  }
}

void attend(const float* query, const KeyValueCache& cache, int64_t n_keys, int64_t d_head,
            float scale, float* scores, float* out) {
  score_keys(query, cache.keys, n_keys, d_head, scale, scores);
  const float sum = exponentials(n_keys, scores);
  weigh_values(scores, cache.values, n_keys, d_head, 1.0f / sum, out);
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ullage::cpu {

HWY_EXPORT(attend);

void store_key_value(const KeyValueCache& cache, int64_t position, int64_t d_head, const float* key,
                     const float* value) {
  float* column = cache.keys + position / kKeyBlock * kKeyBlock * d_head + position % kKeyBlock;
  for (int64_t i = 0; i < d_head; ++i) column[i * kKeyBlock] = key[i];
  std::memcpy(cache.values + position * value_stride(d_head), value,
              static_cast<size_t>(d_head) * sizeof(float));
}

void attend(const float* query, const KeyValueCache& cache, int64_t n_keys, int64_t d_head,
            float scale, float* scores, float* out) {
  HWY_DYNAMIC_DISPATCH(attend)(query, cache, n_keys, d_head, scale, scores, out);
}

}  // namespace ullage::cpu
#endif  // HWY_ONCE
