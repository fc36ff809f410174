// What one run of the fused head hands its kernels. Plain data; every pointer is device memory.
#pragma once

#include <cstdint>

#include "cuda/head_logits/params.h"
#include "cuda/linear_head/config.h"
#include "cuda/product/blocked_matrix.h"

namespace ullage::lossk::cuda {

struct Pair {
  float shift, sum;
};
struct SkippedMass {
  float share, gradient;
};

// What the gradients may leave out: tiles of kChunkRows rows by LogitsTile::kN columns in which no
// row has a share of its softmax above `threshold`. G row groups of the longest group of rows, T
// column tiles, M d_weight tiles of the vocabulary.
struct FilterParams {
  float threshold = 0;             // 0: nothing is left out
  uint8_t* kept = nullptr;         // [G][T]
  float* inverse_sum = nullptr;    // [n_tok] 1 / sum of a row's exponentials
  SkippedMass* skipped = nullptr;  // [n_tok] share of the softmax left out; |P| times that
  int* tile_counts = nullptr;      // [G of a part]
  int* tile_entries = nullptr;     // [G of a part][T]
  int* group_counts = nullptr;     // [M]
  int* group_entries = nullptr;    // [M][G]
};

struct LinearParams {
  LinearLayout layout;
  int64_t n_tok = 0, d_model = 0, vocab = 0;
  DType dtype = DType::kBF16;    // T below: bf16 or f16
  float unit = 1;                // a power of two that f16 products of d_weight run at (run.cc)
  const void* hidden = nullptr;  // T [n_tok][d_model]
  const void* weight = nullptr;  // T [vocab][d_model]
  int64_t hidden_stride = 0, weight_stride = 0;
  void* d_hidden = nullptr;  // T [n_tok][d_model], or null
  // f32 [vocab][d_model]; strips of a rounded d_weight: of a range; null: no d_weight.
  float* d_weight_sum = nullptr;
  void* d_weight_rounded = nullptr;  // T [vocab][d_model] where that is what the caller wants
  int64_t d_hidden_stride = 0, d_weight_sum_stride = 0, d_weight_rounded_stride = 0;
  bool accumulate = false;

  bool wants_d_weight() const { return d_weight_sum != nullptr || d_weight_rounded != nullptr; }

  // Workspace. c: rows of the longest part (config.h).
  // Where d_weight is T and its memory holds exponentials of all rows at once: its product rounds,
  // and the rows of labels wait in float32 for what their labels add.
  int* label_slots = nullptr;      // [vocab] the first row with that label, or -1
  float* label_sums = nullptr;     // [n_tok][d_model], by slot
  int* columns = nullptr;          // [n_tok] label columns, kNoLabel, kIgnoredRow
  int* next_row = nullptr;         // [n_tok] the next row with the same label, or -1
  uint8_t* leads = nullptr;        // [n_tok] no earlier row has the label
  float* softmax_scale = nullptr;  // [n_tok] a row's gradient = softmax_scale * E ...
  float* label_gain = nullptr;     // [n_tok] ... + label_gain in the label's column
  void* exponentials = nullptr;    // T: a chunk's
  void* lodged_end = nullptr;      // T: the last range of those in d_weight's memory
  int* tiles_read = nullptr;       // [n_ranges] of lodged exponentials: see RangeOrder of products
  void* made_again = nullptr;      // T, strips: a range of a slab's
  Pair* partial = nullptr;         // [c][n_tiles]; strips: also [slab][tiles of a range]
  float* label_logit = nullptr;    // [c]; strips: also [slab]
  void* scaled_hidden = nullptr;   // T [rows of the longest group][d_model]; strips: [slab]...
  float* slices = nullptr;         // [vocab_slices][c][d_model]
  FilterParams filter;
  float* row_shift =
      nullptr;  // strips and filter: [n_tok] what a row's exponentials are relative to
};

}  // namespace ullage::lossk::cuda
