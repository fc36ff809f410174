#include "cpu/product.h"

#include <algorithm>
#include <cassert>
#include <cstring>

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/product.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/product-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

template <class T>
void run_product(const ProductShape& shape, const ProductOperand& a, const ProductOperand& b,
                 void* c, int64_t c_row_stride, bool accumulate, SumOrder order,
                 std::span<std::byte> workspace, WorkerPool& pool) {
  const int64_t left = static_cast<int64_t>(workspace.size()) - pool.n_threads() * kStreamBytes;
  const ProductPlan plan(shape, sizeof(T), std::min(left, kMostPackedBytes));
  Product<T> product{.shape = shape,
                     .a = {a.data, a.type, a.row_stride, a.col_stride},
                     .b = {b.data, b.type, b.col_stride, b.row_stride},
                     .c = static_cast<T*>(c),
                     .c_stride = c_row_stride,
                     .accumulate = accumulate,
                     .order = order,
                     .plan = plan,
                     .stationary = reinterpret_cast<T*>(workspace.data()),
                     .streams = workspace.data() + plan.stationary_bytes};
  product.run(pool);
}

void product_f32(const ProductShape& shape, const ProductOperand& a, const ProductOperand& b,
                 void* c, int64_t c_row_stride, bool accumulate, SumOrder order,
                 std::span<std::byte> workspace, WorkerPool& pool) {
  run_product<float>(shape, a, b, c, c_row_stride, accumulate, order, workspace, pool);
}

void product_f64(const ProductShape& shape, const ProductOperand& a, const ProductOperand& b,
                 void* c, int64_t c_row_stride, bool accumulate, SumOrder order,
                 std::span<std::byte> workspace, WorkerPool& pool) {
#if HWY_HAVE_FLOAT64
  run_product<double>(shape, a, b, c, c_row_stride, accumulate, order, workspace, pool);
#endif
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ullage::cpu {

HWY_EXPORT(product_f32);
HWY_EXPORT(product_f64);

int64_t product_workspace_bytes(const ProductShape& shape, DType accumulate, int n_threads,
                                int64_t packed_bytes) {
  const ProductPlan plan(shape, accumulate == DType::kF64 ? 8 : 4, packed_bytes);
  return plan.promised_bytes + n_threads * kStreamBytes;
}

void product(const ProductShape& shape, const ProductOperand& a, const ProductOperand& b, void* c,
             int64_t c_row_stride, bool accumulate, SumOrder order, std::span<std::byte> workspace,
             WorkerPool& pool) {
  const bool is_f64 = a.type == ElementType::kF64;
  assert(is_f64 == (b.type == ElementType::kF64) && !is_quantised(a.type));
  assert(!is_quantised(b.type) ||
         (b.row_stride == 1 && b.col_stride % kQuantBlock == 0 && shape.k % kQuantBlock == 0));
  assert(a.row_stride == 1 || a.col_stride == 1 || shape.m <= 1 || shape.k <= 1);
  assert(b.row_stride == 1 || b.col_stride == 1 || shape.n <= 1 || shape.k <= 1);
  assert(static_cast<int64_t>(workspace.size()) >=
         product_workspace_bytes(shape, is_f64 ? DType::kF64 : DType::kF32, pool.n_threads(),
                                 kLeastPackedBytes));
  assert(reinterpret_cast<uintptr_t>(workspace.data()) % 64 == 0);
  if (shape.m == 0 || shape.n == 0) return;
  if (shape.k == 0) {
    if (accumulate) return;
    const int64_t element_bytes = is_f64 ? 8 : 4;
    for (int64_t row = 0; row < shape.m; ++row) {
      std::memset(static_cast<std::byte*>(c) + row * c_row_stride * element_bytes, 0,
                  static_cast<size_t>(shape.n * element_bytes));
    }
    return;
  }
  const auto run = is_f64 ? HWY_DYNAMIC_DISPATCH(product_f64) : HWY_DYNAMIC_DISPATCH(product_f32);
  run(shape, a, b, c, c_row_stride, accumulate, order, workspace, pool);
}

}  // namespace ullage::cpu
#endif  // HWY_ONCE
