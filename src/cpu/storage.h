// Single elements of the storage types in the accumulate types.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "ullage/tensor.h"

namespace ullage::cpu {

// The float next to `value` towards zero, with its last bit set where `value` lies between two: a
// later rounding to a shorter type then gives what one rounding of `value` would.
inline float round_to_odd(double value) {
  const auto nearest = static_cast<float>(value);
  if (!(static_cast<double>(nearest) != value) || std::isnan(value)) return nearest;
  auto bits = std::bit_cast<uint32_t>(nearest);
  if (std::fabs(static_cast<double>(nearest)) > std::fabs(value)) --bits;
  return std::bit_cast<float>(bits | 1u);
}

inline double load_double(const void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64:
      return static_cast<const double*>(data)[i];
    case DType::kF32:
      return static_cast<double>(static_cast<const float*>(data)[i]);
    case DType::kBF16:
      return static_cast<double>(static_cast<const BF16*>(data)[i].to_float());
    case DType::kF16:
      break;
  }
  return static_cast<double>(static_cast<const F16*>(data)[i].to_float());
}

inline void store_double(double value, void* data, DType dtype, int64_t i) {
  switch (dtype) {
    case DType::kF64:
      static_cast<double*>(data)[i] = value;
      return;
    case DType::kF32:
      static_cast<float*>(data)[i] = static_cast<float>(value);
      return;
    case DType::kBF16:
      static_cast<BF16*>(data)[i] = BF16::from_float(round_to_odd(value));
      return;
    case DType::kF16:
      static_cast<F16*>(data)[i] = F16::from_float(round_to_odd(value));
      return;
  }
}

inline double value_at(const VectorView& view, int64_t i) {
  return load_double(view.data, view.dtype, i * view.stride);
}

}  // namespace ullage::cpu
