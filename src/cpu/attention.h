// Causal attention of one query over a cache of keys and values, in float32.
//
// Grade: bitwise. A score is one sum over d_head in ascending order, an output element one sum over
// keys in ascending order, so the result depends on the query and its keys alone: not on how the
// tokens before it were split into calls, on its neighbours, on the thread count, or on which
// instruction set ran.
#pragma once

#include <cstdint>

namespace ullage::cpu {

// Keys that lie side by side, so that vectors run across keys and no sum is split over lanes.
inline constexpr int64_t kKeyBlock = 16;

// The cache of one kv head with room for `capacity` positions, readable throughout.
struct KeyValueCache {
  float* keys = nullptr;    // [ceil(capacity / kKeyBlock)][d_head][kKeyBlock]
  float* values = nullptr;  // [capacity][value_stride(d_head)]
};

constexpr int64_t round_up_to_key_block(int64_t count) {
  return (count + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
}
constexpr int64_t value_stride(int64_t d_head) { return round_up_to_key_block(d_head); }

// Floats of one kv head's keys, and of its values.
constexpr int64_t key_cache_elements(int64_t capacity, int64_t d_head) {
  return round_up_to_key_block(capacity) * d_head;
}
constexpr int64_t value_cache_elements(int64_t capacity, int64_t d_head) {
  return capacity * value_stride(d_head);
}

// Writes one position; key and value are [d_head].
void store_key_value(const KeyValueCache& cache, int64_t position, int64_t d_head, const float* key,
                     const float* value);

// out[d_head] = sum_j softmax_j(scale * query . key_j) * value_j over positions j in [0, n_keys).
// `scores` is scratch of round_up_to_key_block(n_keys) floats, aligned to 64 bytes, as the cache
// is. NaN in the query or in a key that is attended to gives NaN. n_keys >= 1.
void attend(const float* query, const KeyValueCache& cache, int64_t n_keys, int64_t d_head,
            float scale, float* scores, float* out);

}  // namespace ullage::cpu
