// How the losses from hidden states are cut into chunks of rows and products: pure host arithmetic.
#pragma once

#include <cstdint>

#include "cuda/cublas.h"
#include "ullage/dtype.h"

namespace ullage::lossk::cuda {

// The rows for which algorithms are chosen, whatever a run has: a row's bits then do not depend on
// how many rows are beside it.
inline constexpr int64_t kReferenceRows = 1024;

// Chunks are whole multiples of this, so that a chunk of a 16-bit matrix of any width starts at a
// multiple of 16 bytes.
inline constexpr int64_t kRowUnit = 8;

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

// The product over `rows` rows; strides of the caller's matrices are those of dense ones.
constexpr ullage::cuda::ProductShape product_shape(const ChunkedLayout& layout, Product product,
                                                   int64_t rows) {
  const int64_t d = layout.d_model, v = layout.vocab, r = layout.rank, e = layout.teacher_d_model;
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

// What the algorithm is chosen for: the products of rows at kReferenceRows; those over rows, whose
// sum a chunk is one link of, at the chunk.
constexpr ullage::cuda::ProductShape reference_shape(const ChunkedLayout& layout, Product product) {
  const bool over_rows = product == Product::kWeightGradient ||
                         product == Product::kAdapterAGradient ||
                         product == Product::kAdapterBGradient;
  return product_shape(layout, product, over_rows ? layout.chunk : kReferenceRows);
}

}  // namespace ullage::lossk::cuda
