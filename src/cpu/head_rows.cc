#include "cpu/head_rows.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/head_rows.cc"
#include "hwy/foreach_target.h"  // IWYU pragma: keep
//
#include "cpu/head_divergence-inl.h"
#include "cpu/head_gradient-inl.h"
#include "cpu/head_statistics-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

template <class T>
int64_t argmax(const void* z, DType dtype, const T* bias, int64_t n) {
  const RowTag<T> d;
  return visit_direct<T>(z, dtype, [&](const auto* from) ULLAGE_INLINE_LAMBDA {
    const auto value = [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      const auto x = load_some(d, from + j, count, -std::numeric_limits<T>::infinity());
      return bias ? hn::Add(x, load_some(d, bias + j, count, T(0))) : x;
    };
    auto largest = hn::Set(d, -std::numeric_limits<T>::infinity());
    for_each_vector(d, n, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      largest = hn::Max(largest, value(j, count));
    });
    largest = hn::MaxOfLanes(d, largest);
    for (int64_t j = 0; j < n; j += kLanesOf<RowTag<T>>) {
      const auto found = hn::Eq(value(j, std::min(kLanesOf<RowTag<T>>, n - j)), largest);
      if (hn::AllFalse(d, found)) continue;
      return j + static_cast<int64_t>(hn::FindFirstTrue(d, found));
    }
    return int64_t{-1};
  });
}

template <class T>
RowSum exponentials(const void* u, DType dtype, T scale, int64_t n, RowSum before, T* e,
                    T* block_max) {
  return visit_direct<T>(u, dtype, [&](const auto* from) ULLAGE_INLINE_LAMBDA {
    return e ? row_exponentials<true>(from, scale, n, before, e, block_max)
             : row_exponentials<false>(from, scale, n, before, e, block_max);
  });
}

template <class T>
void scale_exponentials(const T* e, const T* block_max, const RowSoftmax<T>& student, T gain,
                        int64_t n, DType dtype, void* out, bool accumulate) {
  const RowTag<T> d;
  visit_direct<T>(out, dtype, [&](auto* to) ULLAGE_INLINE_LAMBDA {
    for (int64_t begin = 0; begin < n; begin += kRowBlock) {
      // q_j = e_j * exp(scale * (block_max - max)) / sum; the exponent is <= 0.
      const T shift = student.scale * (block_max[begin / kRowBlock] - student.max);
      const T gained = gain * (std::exp(shift) * student.inverse_sum);
      const auto factor = hn::Set(d, gained);
      const auto value = [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
        return hn::Mul(factor, load_some(d, e + begin + j, count, T(0)));
      };
      const int64_t columns = std::min(kRowBlock, n - begin);
      // A NaN among the exponentials is in their sum too.
      if (std::isfinite(gained)) {
        store_row<T, true>(columns, to + begin, accumulate, value);
      } else {
        store_row<T>(columns, to + begin, accumulate, value);
      }
    }
  });
}

template <class T>
void store(const T* g, int64_t n, DType dtype, void* out, bool accumulate) {
  const RowTag<T> d;
  visit_storage(out, dtype, [&](auto* to) ULLAGE_INLINE_LAMBDA {
    store_row<T>(n, to, accumulate, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
      return load_some(d, g + j, count, T(0));
    });
  });
}

template <class T>
void add(const T* x, int64_t n, T* sum) {
  const RowTag<T> d;
  row_update(n, true, sum, [&](int64_t j, int64_t count) ULLAGE_INLINE_LAMBDA {
    return load_some(d, x + j, count, T(0));
  });
}

template <class T>
constexpr RowKernels<T> kRowKernels = {prepare<T>,
                                       argmax<T>,
                                       exponentials<T>,
                                       scale_exponentials<T>,
                                       weighted_distance<T>,
                                       entropy<T>,
                                       divergence<T>,
                                       jensen_shannon<T>,
                                       label_gradient<T>,
                                       divergence_gradient<T>,
                                       softcap_slope<T>,
                                       store<T>,
                                       add<T>};

const RowKernels<float>* row_kernels_f32() { return &kRowKernels<float>; }
const RowKernels<double>* row_kernels_f64() { return &kRowKernels<double>; }

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace ullage::cpu {

HWY_EXPORT(row_kernels_f32);
HWY_EXPORT(row_kernels_f64);

template <>
const RowKernels<float>& row_kernels<float>() {
  return *HWY_DYNAMIC_DISPATCH(row_kernels_f32)();
}
template <>
const RowKernels<double>& row_kernels<double>() {
  return *HWY_DYNAMIC_DISPATCH(row_kernels_f64)();
}

}  // namespace ullage::cpu
#endif  // HWY_ONCE
