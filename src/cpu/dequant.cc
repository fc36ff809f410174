#include "cpu/dequant.h"

#include <cassert>

namespace ullage::cpu {
namespace {

template <class T>
float element(const void* row, int64_t k) {
  if constexpr (std::is_same_v<T, float>) {
    return static_cast<const T*>(row)[k];
  } else if constexpr (std::is_same_v<T, BF16> || std::is_same_v<T, F16>) {
    return static_cast<const T*>(row)[k].to_float();
  } else {
    return decode_element(static_cast<const T*>(row), k);
  }
}

template <class T>
void decode(const void* row, int64_t k0, int64_t count, float* dst) {
  for (int64_t i = 0; i < count; ++i) dst[i] = element<T>(row, k0 + i);
}

}  // namespace

void decode_row(ElementType type, const void* row, int64_t k0, int64_t count, float* dst) {
  switch (type) {
    case ElementType::kF64:
      assert(!"f64 does not widen to f32");
      return;
    case ElementType::kF32:
      return decode<float>(row, k0, count, dst);
    case ElementType::kBF16:
      return decode<BF16>(row, k0, count, dst);
    case ElementType::kF16:
      return decode<F16>(row, k0, count, dst);
    case ElementType::kQ8_0:
      return decode<Q8_0Block>(row, k0, count, dst);
    case ElementType::kQ4_0:
      return decode<Q4_0Block>(row, k0, count, dst);
    case ElementType::kQ4_1:
      return decode<Q4_1Block>(row, k0, count, dst);
  }
}

}  // namespace ullage::cpu
