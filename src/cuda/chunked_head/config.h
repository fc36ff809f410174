// How the losses from hidden states are cut into chunks of rows and products: pure host arithmetic.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/cublas.h"
#include "ullage/dtype.h"

namespace ullage::lossk::cuda {

// Chunks are whole multiples of this, so that a chunk of a 16-bit matrix of any width starts at a
// multiple of 16 bytes.
inline constexpr int64_t kRowUnit = 8;

// The fast algorithms read whole 16-byte vectors along a contiguous dimension: what is over of an
// odd vocabulary makes small products of its own. Nothing is padded, so nothing is read beyond the
// caller's weight.
inline constexpr int64_t kColumnUnit = 8;

struct Columns {
  int64_t first = 0, count = 0;
};
inline constexpr int kVocabParts = 2;
// What is over first, so that where parts are added the large one rounds the sum.
constexpr Columns vocab_part(int64_t vocab, int part) {
  const int64_t over = vocab % kColumnUnit;
  return part == 0 ? Columns{vocab - over, over} : Columns{0, vocab - over};
}

// Every product of a chunk. X [c][d] hidden, G [c][V] the logit gradient, W [V][d] the weight,
// A [r][d] and B [V][r] the adapter.
enum class Product : int {
  kAdapterRows,            // X A^T: [c][r]
  kAdapterLogits,          // ... B^T: [c][V]
  kLogits,                 // X W^T: [c][V]
  kTeacherLogits,          // of the teacher's hidden and weight: [c][V]
  kHiddenGradient,         // G W: [c][d]
  kAdapterRowGradient,     // G B: [c][r]
  kAdapterHiddenGradient,  // ... A: [c][d]
  kWeightGradient,         // G^T X: [V][d]
  kAdapterAGradient,       // (G B)^T X: [r][d]
  kAdapterBGradient,       // G^T (X A^T): [V][r]
};
inline constexpr int kProducts = 10;

struct ChunkedLayout {
  int64_t n_tok = 0, d_model = 0, vocab = 0;
  int64_t rank = 0;             // of the adapter, 0: none
  int64_t teacher_d_model = 0;  // of a teacher given by its hidden states, 0: none
  int64_t chunk = 0, n_chunks = 0;
  int64_t logits_stride = 0;            // of the chunk's logits; whole 128-byte lines
  int64_t rank_stride = 0;              // of the chunk's X A^T and G B
  DType dtype = DType::kBF16;           // of hidden, weight, adapter, logits
  DType teacher_dtype = DType::kBF16;   // of the teacher's hidden states
  DType d_hidden_dtype = DType::kBF16;  // that its products write: f32 where there are two of them
  DType sum_dtype = DType::kF32;  // that the products write which sum over rows: f32 but where one
                                  // chunk is all
  bool bias = false;
  bool d_hidden = false, d_weight = false, d_bias = false, d_adapter = false;

  bool gradients() const { return d_hidden || d_weight || d_bias || d_adapter; }
  // Products over rows read hidden states, of which ignored rows must not be heard: copied, with
  // zeros in their place.
  bool copies_hidden() const { return d_weight || d_adapter; }
};

constexpr bool has_product(const ChunkedLayout& layout, Product product) {
  switch (product) {
    case Product::kLogits:
      return true;
    case Product::kTeacherLogits:
      return layout.teacher_d_model > 0;
    case Product::kAdapterRows:
    case Product::kAdapterLogits:
      return layout.rank > 0;
    case Product::kHiddenGradient:
      return layout.d_hidden;
    case Product::kAdapterRowGradient:
      return layout.rank > 0 && (layout.d_hidden || layout.d_adapter);
    case Product::kAdapterHiddenGradient:
      return layout.rank > 0 && layout.d_hidden;
    case Product::kWeightGradient:
      return layout.d_weight;
    case Product::kAdapterAGradient:
    case Product::kAdapterBGradient:
      return layout.d_adapter;
  }
  return false;
}

// Where the vocabulary is in a product C [m][n] = A [m][k] B [k][n].
enum class VocabRole { kNone, kM, kN, kK };

constexpr VocabRole vocab_role(Product product) {
  switch (product) {
    case Product::kAdapterLogits:
    case Product::kLogits:
    case Product::kTeacherLogits:
      return VocabRole::kN;
    case Product::kHiddenGradient:
    case Product::kAdapterRowGradient:
      return VocabRole::kK;
    case Product::kWeightGradient:
    case Product::kAdapterBGradient:
      return VocabRole::kM;
    default:
      return VocabRole::kNone;
  }
}

// Kernels that the product takes.
constexpr int n_parts(const ChunkedLayout& layout, Product product) {
  if (!has_product(layout, product)) return 0;
  const bool split = layout.vocab > kColumnUnit && layout.vocab % kColumnUnit != 0;
  return split && vocab_role(product) != VocabRole::kNone ? 2 : 1;
}

// The product over `rows` rows and `v` columns of the vocabulary; strides of the caller's matrices
// are those of dense ones.
constexpr ullage::cuda::ProductShape product_shape(const ChunkedLayout& layout, Product product,
                                                   int64_t rows, int64_t v) {
  const int64_t d = layout.d_model, r = layout.rank, e = layout.teacher_d_model;
  const int64_t ls = layout.logits_stride, rs = layout.rank_stride;
  const DType t = layout.dtype, sum = layout.sum_dtype;
  switch (product) {
    case Product::kAdapterRows:
      return {rows, r, d, t, t, false, true, d, d, rs};
    case Product::kAdapterLogits:
      return {rows, v, r, t, t, false, true, rs, r, ls};
    case Product::kLogits:
      return {rows, v, d, t, t, false, true, d, d, ls};
    case Product::kTeacherLogits:
      return {rows, v, e, layout.teacher_dtype, t, false, true, e, e, ls};
    case Product::kHiddenGradient:
      return {rows, d, v, t, layout.d_hidden_dtype, false, false, ls, d, d};
    case Product::kAdapterRowGradient:
      return {rows, r, v, t, t, false, false, ls, r, rs};
    case Product::kAdapterHiddenGradient:
      return {rows, d, r, t, layout.d_hidden_dtype, false, false, rs, d, d};
    case Product::kWeightGradient:
      return {v, d, rows, t, sum, true, false, ls, d, d};
    case Product::kAdapterAGradient:
      return {r, d, rows, t, sum, true, false, rs, d, d};
    case Product::kAdapterBGradient:
      return {v, r, rows, t, sum, true, false, ls, rs, r};
  }
  return {};
}

// The rows for which a product's algorithm is chosen, and further numbers of rows that it must
// take. Products of rows: whatever the run has, so that the choice does not depend on it, and odd,
// for what takes odd numbers takes even ones. Products over rows, whose sum a chunk is one link of:
// the run's chunks.
constexpr std::array<int64_t, 4> reference_rows(const ChunkedLayout& layout, Product product) {
  if (product == Product::kAdapterAGradient || vocab_role(product) == VocabRole::kM) {
    const int64_t last = layout.n_tok - (layout.n_chunks - 1) * layout.chunk;
    return {layout.chunk, last, last, last};
  }
  return {1023, 1024, 7, 1};
}

}  // namespace ullage::lossk::cuda
