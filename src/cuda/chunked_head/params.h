// What one run hands its launches. Plain data; every pointer is device memory.
#pragma once

#include <cstdint>

#include "cuda/chunked_head/config.h"
#include "cuda/head_logits/params.h"

namespace ullage::lossk::cuda {

struct Operand {
  void* data = nullptr;
  int64_t stride = 0;  // elements
};

// A gradient summed over all rows.
struct SummedGradient {
  Operand out;  // [rows][cols], the caller's; null: not wanted
  DType dtype = DType::kF32;
  int64_t rows = 0, cols = 0;
  float* sum = nullptr;  // [rows][cols]; null: `out` is summed in itself
};

struct ChunkedParams {
  ChunkedLayout layout;
  Operand hidden, weight;                  // [n][d], [V][d]
  Operand adapter_a, adapter_b;            // [r][d], [V][r]
  Operand teacher_hidden, teacher_weight;  // [n][e], [V or more][e]
  RowFloats bias;                          // [V]
  float adapter_scale = 1;
  float gradient_scale = 1;  // a power of two that the logit gradient carries while it is stored
  bool accumulate = false;

  Operand d_hidden;  // [n][d]
  DType d_hidden_dtype = DType::kBF16;
  SummedGradient d_weight, d_bias, d_adapter_a, d_adapter_b;

  // Workspace. c = layout.chunk.
  void* logits = nullptr;                // [c][logits_stride]
  void* gradient = nullptr;              // [c][logits_stride]; null: takes the logits' place
  void* teacher_logits = nullptr;        // [c][logits_stride]
  void* hidden_rows = nullptr;           // [c][d], ignored rows zero
  void* adapter_rows = nullptr;          // [c][rank_stride]: adapter_scale * X A^T
  void* adapter_row_gradient = nullptr;  // [c][rank_stride]: adapter_scale * G B
  float* d_hidden_sum = nullptr;         // [c][d]; null: d_hidden is written directly
};

}  // namespace ullage::lossk::cuda
