// C = A * B, or C += A * B: every dense product of the losses and of the transformer.
//
// Grade: bitwise. Each element of C is one sum over k of fused multiply-adds in ascending k, in an
// order that depends on k alone (see SumOrder). Its bits do not depend on m, n, strides, blocking,
// thread count, or which instruction set ran: a row of C computed alone equals the same row
// computed among others. Vectors run across columns of C, so no sum is ever split over lanes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/element.h"
#include "cpu/worker_pool.h"
#include "ullage/dtype.h"

namespace ullage::cpu {

// Element (row, col) lies at data[row * row_stride + col * col_stride]; strides count elements and
// are >= 0. One of the two is 1, so X * W^T, G * W and G^T * X are all this one product.
// A quantised operand can only be B, with row_stride 1 (blocks run along k) and a col_stride and a
// k that are whole blocks.
struct ProductOperand {
  const void* data = nullptr;
  ElementType type = ElementType::kF32;
  int64_t row_stride = 0;
  int64_t col_stride = 0;
};

// A [m][k], B [k][n], C [m][n].
struct ProductShape {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
};

// kBlocks cuts k at multiples of this.
inline constexpr int64_t kProductKBlock = 256;

enum class SumOrder : uint8_t {
  // Inside each block of k one chain of fused multiply-adds that starts at 0; block sums are added
  // to C in
  // ascending order (the first is stored, unless `accumulate`). The error grows as k/256 + 256.
  kBlocks,
  // One chain over all of k that starts at C's value (at 0 unless `accumulate`). A product over
  // k = [0, K) and the same product accumulated over any cut of [0, K) have the same bits: this is
  // what makes a weight gradient independent of the token chunk.
  kChain,
};

// Of one operand, at most this much lies packed in the workspace at a time. With less C is read and
// written more often: once for each piece.
inline constexpr int64_t kMostPackedBytes = int64_t{4} << 20;
inline constexpr int64_t kLeastPackedBytes = int64_t{1} << 19;

// What `product` wants in `workspace`; bounded (by `packed_bytes` and 384 KiB per thread) whatever
// the shape, and enough for every shape within this one. `accumulate` is the type of C.
// `packed_bytes` is kLeastPackedBytes at least.
int64_t product_workspace_bytes(const ProductShape& shape, DType accumulate, int n_threads,
                                int64_t packed_bytes = kMostPackedBytes);

// C [m][n] is f64 where A and B are f64, and f32 otherwise (then neither may be f64); its columns
// are adjacent and its rows `c_row_stride` elements apart. C overlaps neither operand. `workspace`
// holds at least product_workspace_bytes(shape, type of C, pool.n_threads(), some packed_bytes),
// aligned to 64 bytes; how much it holds changes no bit.
// k = 0 gives zeros (C unchanged if `accumulate`). Allocates nothing. Preconditions are asserted:
// shapes and memory are checked where they enter the library.
void product(const ProductShape& shape, const ProductOperand& a, const ProductOperand& b, void* c,
             int64_t c_row_stride, bool accumulate, SumOrder order, std::span<std::byte> workspace,
             WorkerPool& pool);

}  // namespace ullage::cpu
