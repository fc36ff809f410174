// Borrowed views of a caller's memory. Nothing here owns, allocates or copies.
#pragma once

#include <cstdint>

#include "ullage/dtype.h"

namespace ullage {

// A [rows][cols] matrix. `row_stride` counts elements between rows (>= cols, or any value when
// rows <= 1); the columns of a row are adjacent.
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

}  // namespace ullage
