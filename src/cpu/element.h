// Element types of a product's operands: the storage types, and the GGUF block formats whose rows
// are read as they are stored.
#pragma once

#include <cstdint>

#include "ullage/dtype.h"

namespace ullage::cpu {

// The first four have DType's values, so a DType converts by value.
enum class ElementType : uint8_t { kF64, kF32, kBF16, kF16, kQ8_0, kQ4_0, kQ4_1 };

constexpr ElementType element_of(DType dtype) { return static_cast<ElementType>(dtype); }

// Elements in one block of a quantised row; such a row is a whole number of blocks.
inline constexpr int64_t kQuantBlock = 32;

// GGUF blocks (ggml's quants): element i of a block is `scale * q`, `scale * (q - 8)` and
// `scale * q + minimum`. Nibble i of a four-bit block is the low half of byte i for i < 16, and the
// high half of byte i - 16 above.
struct Q8_0Block {
  F16 scale;
  int8_t q[32];
};
struct Q4_0Block {
  F16 scale;
  uint8_t q[16];
};
struct Q4_1Block {
  F16 scale;
  F16 minimum;
  uint8_t q[16];
};
static_assert(sizeof(Q8_0Block) == 34 && sizeof(Q4_0Block) == 18 && sizeof(Q4_1Block) == 20);

constexpr bool is_quantised(ElementType type) { return type >= ElementType::kQ8_0; }

// Bytes of `count` adjacent elements; whole blocks where the type has blocks.
constexpr int64_t bytes_of(ElementType type, int64_t count) {
  switch (type) {
    case ElementType::kQ8_0:
      return count / kQuantBlock * static_cast<int64_t>(sizeof(Q8_0Block));
    case ElementType::kQ4_0:
      return count / kQuantBlock * static_cast<int64_t>(sizeof(Q4_0Block));
    case ElementType::kQ4_1:
      return count / kQuantBlock * static_cast<int64_t>(sizeof(Q4_1Block));
    default:
      return count * size_of(static_cast<DType>(type));
  }
}

}  // namespace ullage::cpu
