// Storage types of tensors, and exact conversions of the 16-bit ones.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

namespace ullage {

enum class DType : uint8_t { kF64, kF32, kBF16, kF16 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return 8;
    case DType::kF32:
      return 4;
    case DType::kBF16:
    case DType::kF16:
      return 2;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kF64:
      return "f64";
    case DType::kF32:
      return "f32";
    case DType::kBF16:
      return "bf16";
    case DType::kF16:
      return "f16";
  }
  return "";
}

// bfloat16: the upper half of a float32. Conversion from float rounds to nearest, ties to even; NaN
// stays NaN (the quiet bit is set so that a NaN whose payload sits in the lower half survives).
struct BF16 {
  uint16_t bits;

  static constexpr BF16 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    if ((word & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((word >> 16) | 0x0040u)};
    return {static_cast<uint16_t>((word + 0x7fffu + ((word >> 16) & 1u)) >> 16)};
  }
  constexpr float to_float() const { return std::bit_cast<float>(uint32_t{bits} << 16); }
};

// IEEE 754 binary16, with subnormals. Conversion from float rounds to nearest, ties to even.
struct F16 {
  uint16_t bits;

  static constexpr F16 from_float(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (word >> 16) & 0x8000u;
    const uint32_t magnitude = word & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return {static_cast<uint16_t>(sign | 0x7e00u)};
    // 65520 = 65504 + half a unit in the last place: it and above round to infinity.
    if (magnitude >= 0x477ff000u) return {static_cast<uint16_t>(sign | 0x7c00u)};
    if (magnitude < 0x38800000u) {
      // Below 2^-14 the result is subnormal, a multiple of 2^-24. Adding 0.5f (ulp 2^-24) makes the
      // float adder do exactly that rounding.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      return {static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u))};
    }
    const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
    return {static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13))};
  }
  constexpr float to_float() const {
    const uint32_t sign = uint32_t{bits & 0x8000u} << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    if (magnitude >= 0x7c00u) {
      return std::bit_cast<float>(sign | 0x7f800000u | ((magnitude & 0x3ffu) << 13));
    }
    if (magnitude >= 0x0400u) return std::bit_cast<float>(sign | ((magnitude << 13) + 0x38000000u));
    const float subnormal = static_cast<float>(magnitude) * 0x1p-24f;
    return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(subnormal));
  }
};

}  // namespace ullage
