// A view of one stored matrix of a memory-mapped model, in whatever element type the file has.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "ullage/status.h"

namespace ullage::model {

// Element types of safetensors and GGUF tensors that are read. Quantised types come in blocks along
// a row.
enum class ElementType : uint8_t {
  kF64,
  kF32,
  kF16,
  kBF16,
  kQ4_0,
  kQ4_1,
  kQ5_0,
  kQ5_1,
  kQ8_0,
  kQ2_K,
  kQ3_K,
  kQ4_K,
  kQ5_K,
  kQ6_K,
  kQ8_K,
};

std::string_view name_of(ElementType type);
int64_t block_elements(ElementType type);  // 1 for plain types
int64_t block_bytes(ElementType type);

struct Weight {
  const std::byte* data = nullptr;  // [rows][row_bytes], inside the mapping; any alignment
  ElementType type = ElementType::kF32;
  int64_t rows = 0;
  int64_t cols = 0;  // elements of a row, the contiguous dimension; a multiple of block_elements
  int64_t row_bytes = 0;  // bytes from one row to the next

  explicit operator bool() const { return data != nullptr; }
  int64_t bytes() const { return rows * row_bytes; }
};

// dst[0 .. count) = elements [first, first + count) of row `row`, widened to float32 exactly as the
// format defines. first and count are multiples of block_elements(weight.type).
void dequantize(const Weight& weight, int64_t row, int64_t first, int64_t count, float* dst);

}  // namespace ullage::model
