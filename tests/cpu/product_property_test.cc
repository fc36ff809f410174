// For any shape, strides, order and thread count: a strided view multiplies to the bits of its
// compact copy, and rows computed in any cut to the bits of the whole.
#include <gtest/gtest.h>
#include <rapidcheck.h>
#include <rapidcheck/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <vector>

#include "cpu/product.h"

namespace ullage::cpu {
namespace {

std::vector<float> multiply(const ProductShape& shape, const ProductOperand& a,
                            const ProductOperand& b, SumOrder order, WorkerPool& pool) {
  const size_t bytes =
      static_cast<size_t>(product_workspace_bytes(shape, DType::kF32, pool.n_threads()));
  const std::unique_ptr<std::byte, void (*)(void*)> workspace(
      static_cast<std::byte*>(std::aligned_alloc(64, bytes)), std::free);
  std::vector<float> c(static_cast<size_t>(shape.m * shape.n), NAN);
  product(shape, a, b, c.data(), shape.n, false, order, {workspace.get(), bytes}, pool);
  return c;
}

// A view of the [rows][cols] values in which index `rows_adjacent ? row : col` has stride 1,
// starting anywhere in memory that otherwise holds NaN.
struct View {
  std::vector<float> memory;
  ProductOperand operand;

  View(const std::vector<float>& values, int64_t rows, int64_t cols) {
    const bool rows_adjacent = *rc::gen::arbitrary<bool>();
    const int64_t stride = (rows_adjacent ? rows : cols) + *rc::gen::inRange<int64_t>(0, 40);
    const int64_t start = *rc::gen::inRange<int64_t>(0, 20);
    operand = {nullptr, ElementType::kF32, rows_adjacent ? 1 : stride, rows_adjacent ? stride : 1};
    memory.assign(static_cast<size_t>(start + stride * (rows_adjacent ? cols : rows)), NAN);
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t col = 0; col < cols; ++col) {
        memory[static_cast<size_t>(start + row * operand.row_stride + col * operand.col_stride)] =
            values[static_cast<size_t>(row * cols + col)];
      }
    }
    operand.data = memory.data() + start;
  }
};

bool same_bits(const std::vector<float>& x, const std::vector<float>& y) {
  return x.size() == y.size() && std::memcmp(x.data(), y.data(), x.size() * sizeof(float)) == 0;
}

RC_GTEST_PROP(Product, StridesThreadsAndCutsDoNotChangeABit, ()) {
  const ProductShape shape{*rc::gen::inRange<int64_t>(1, 40), *rc::gen::inRange<int64_t>(1, 110),
                           *rc::gen::inRange<int64_t>(1, 400)};
  uint32_t state = *rc::gen::arbitrary<uint32_t>();
  const auto draw = [&state](int64_t size) {
    std::vector<float> values(static_cast<size_t>(size));
    for (float& value : values) {
      state = state * 1664525u + 1013904223u;
      value = static_cast<float>(static_cast<int32_t>(state)) * 0x1p-31f;
    }
    return values;
  };
  const std::vector<float> a = draw(shape.m * shape.k), b = draw(shape.k * shape.n);
  const SumOrder order = *rc::gen::element(SumOrder::kBlocks, SumOrder::kChain);
  WorkerPool one(1), some(*rc::gen::inRange(1, 5));
  const std::vector<float> expected =
      multiply(shape, {a.data(), ElementType::kF32, shape.k, 1},
               {b.data(), ElementType::kF32, shape.n, 1}, order, one);

  const View a_view(a, shape.m, shape.k), b_view(b, shape.k, shape.n);
  RC_ASSERT(same_bits(multiply(shape, a_view.operand, b_view.operand, order, some), expected));

  const int64_t cut = *rc::gen::inRange<int64_t>(0, shape.m + 1);
  std::vector<float> upper =
      multiply({cut, shape.n, shape.k}, a_view.operand, b_view.operand, order, some);
  ProductOperand rest = a_view.operand;
  rest.data = static_cast<const float*>(rest.data) + cut * rest.row_stride;
  const std::vector<float> lower =
      multiply({shape.m - cut, shape.n, shape.k}, rest, b_view.operand, order, some);
  upper.insert(upper.end(), lower.begin(), lower.end());
  RC_ASSERT(same_bits(upper, expected));
}

}  // namespace
}  // namespace ullage::cpu
