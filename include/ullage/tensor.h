// Borrowed views of a caller's memory. Nothing here owns, allocates or copies. Strides count
// elements.
#pragma once

#include <cstdint>

#include "ullage/dtype.h"

namespace ullage {

// A [rows][cols] matrix. `row_stride` is the distance between rows (>= cols, or any value when rows
// <= 1); the columns of a row are adjacent.
struct MatrixView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  explicit operator bool() const { return data != nullptr; }
};

struct MutableMatrixView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;
  int64_t row_stride = 0;

  explicit operator bool() const { return data != nullptr; }
  operator MatrixView() const { return {data, dtype, rows, cols, row_stride}; }
};

// A vector of floating-point values. A stride of 0 repeats one value (an expanded scalar).
struct VectorView {
  const void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t size = 0;
  int64_t stride = 1;

  explicit operator bool() const { return data != nullptr; }
};

struct MutableVectorView {
  void* data = nullptr;
  DType dtype = DType::kF32;
  int64_t size = 0;
  int64_t stride = 1;

  explicit operator bool() const { return data != nullptr; }
};

// A vector of integer ids, 4 or 8 bytes each, signed.
struct IndexView {
  const void* data = nullptr;
  int id_bytes = 8;
  int64_t size = 0;
  int64_t stride = 1;

  explicit operator bool() const { return data != nullptr; }
  int64_t operator[](int64_t i) const {
    return id_bytes == 8 ? static_cast<const int64_t*>(data)[i * stride]
                         : static_cast<const int32_t*>(data)[i * stride];
  }
};

}  // namespace ullage
