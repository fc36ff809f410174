// What one run of the fused head hands its kernels. Plain data; every pointer is device memory.
#pragma once

#include <cstdint>

#include "cuda/head_logits/params.h"
#include "cuda/linear_head/config.h"

namespace ullage::lossk::cuda {

struct Pair {
  float shift, sum;
};

struct LinearParams {
  LinearLayout layout;
  int64_t n_tok = 0, d_model = 0, vocab = 0;
  const void* hidden = nullptr;  // bf16 [n_tok][d_model]
  const void* weight = nullptr;  // bf16 [vocab][d_model]
  int64_t hidden_stride = 0, weight_stride = 0;
  void* d_hidden = nullptr;  // bf16 [n_tok][d_model], or null
  float* d_weight_sum =
      nullptr;  // f32 [vocab][d_model]; strips: [strip][d_model]; null: no d_weight
  void* d_weight_rounded = nullptr;  // bf16 [vocab][d_model] where that is what the caller wants
  int64_t d_hidden_stride = 0, d_weight_sum_stride = 0, d_weight_rounded_stride = 0;
  bool accumulate = false;

  // Workspace. c = layout.chunk.
  int* columns = nullptr;          // [n_tok] label columns, kNoLabel, kIgnoredRow
  int* next_row = nullptr;         // [n_tok] the next row with the same label, or -1
  uint8_t* leads = nullptr;        // [n_tok] no earlier row has the label
  float* softmax_scale = nullptr;  // [n_tok] a row's gradient = softmax_scale * E ...
  float* label_gain = nullptr;     // [n_tok] ... + label_gain in the label's column
  void* exponentials = nullptr;    // bf16 [c][e_stride]; strips: [n_tok][strip]
  Pair* partial = nullptr;         // [c][n_tiles]; strips: also [n_tok][strip_tiles]
  float* label_logit = nullptr;    // [c]
  void* scaled_hidden = nullptr;   // bf16 [c][d_model]; strips: [n_tok][d_model]
  float* slices = nullptr;     // [vocab_slices][c][d_model]; strips: [n_tok][d_model], their sum
  float* row_shift = nullptr;  // strips: [n_tok] what a row's exponentials are relative to
};

}  // namespace ullage::lossk::cuda
