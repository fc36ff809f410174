// Widening a stored row to float32, element by element.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/element.h"

namespace ullage::cpu {

// Element k of a quantised row. Q8_0 and Q4_0 are written as the vector kernels compute them, scale
// * (256 + (q + 128)) - 384 * scale and scale * (16 + n) - 24 * scale in one fused step: exactly
// scale * q, and the same zeros and NaN.
inline float decode_element(const Q8_0Block* row, int64_t k) {
  const Q8_0Block& block = row[k / kQuantBlock];
  const float scale = block.scale.to_float();
  return std::fma(scale, static_cast<float>(384 + block.q[k % kQuantBlock]), -384.0f * scale);
}
template <class Block>
int nibble_at(const Block& block, int64_t i) {
  return i < 16 ? block.q[i] & 15 : block.q[i - 16] >> 4;
}
inline float decode_element(const Q4_0Block* row, int64_t k) {
  const Q4_0Block& block = row[k / kQuantBlock];
  const float scale = block.scale.to_float();
  const int nibble = nibble_at(block, k % kQuantBlock);
  return std::fma(scale, static_cast<float>(16 + nibble), -24.0f * scale);
}
inline float decode_element(const Q4_1Block* row, int64_t k) {
  const Q4_1Block& block = row[k / kQuantBlock];
  const int nibble = nibble_at(block, k % kQuantBlock);
  return std::fma(block.scale.to_float(), static_cast<float>(nibble), block.minimum.to_float());
}

// dst[i] = element k0 + i of the row at `row`, for i < count. bf16 and f16 widen exactly; Q8_0 and
// Q4_0 are exact products (an 11-bit scale times an 8-bit integer); Q4_1 is that product plus the
// minimum, rounded once. `type` is not kF64. k0 and count need not be whole blocks.
void decode_row(ElementType type, const void* row, int64_t k0, int64_t count, float* dst);

}  // namespace ullage::cpu
