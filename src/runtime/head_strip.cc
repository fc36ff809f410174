#include "runtime/head_strip.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

namespace ullage::lossk {
namespace {

template <class T>
constexpr DType kTypeOf = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;

}  // namespace

template <class T>
void HeadStrip<T>::make_effective() {
  if (!c_.layout.changes_logits) return;
  c_.kernels.prepare(z_, kTypeOf<T>, c_.bias ? c_.bias + columns_.begin : nullptr,
                     static_cast<T>(c_.layout.config.options.softcap), columns_.count, z_);
}

template <class T>
void HeadStrip<T>::statistics(RowBest* best) {
  const bool first = columns_.begin == 0;
  if (best) {
    if (first) *best = {-std::numeric_limits<double>::infinity(), -1};
    const T* const bias = c_.bias ? c_.bias + columns_.begin : nullptr;
    const int64_t column = c_.kernels.argmax(z_, kTypeOf<T>, bias, columns_.count);
    const double value =
        column < 0 ? 0 : static_cast<double>(z_[column] + (bias ? bias[column] : T(0)));
    if (column >= 0 && (best->column < 0 || value > best->value)) {
      *best = {value, columns_.begin + column};
    }
  }
  make_effective();
  for (int group = 0; group < static_cast<int>(c_.layout.groups.size()); ++group) {
    if (!c_.needs(group)) continue;
    const double scale = c_.layout.groups[static_cast<size_t>(group)].scale;
    SoftmaxStatistics& s = c_.scalars.softmax(group, row_);
    const cpu::RowSum before = first ? cpu::RowSum{} : cpu::RowSum{s.max, s.sum};
    const cpu::RowSum sum = c_.kernels.exponentials(z_, kTypeOf<T>, static_cast<T>(scale),
                                                    columns_.count, before, nullptr, nullptr);
    s.max = sum.max;
    s.sum = sum.sum;
    if (label_ >= 0) s.label = static_cast<double>(z_[label_]);
    if (columns_.end() < c_.layout.shape.vocab) continue;
    s.log_sum = std::log(s.sum);
    if (c_.scalars.label(row_) >= 0) s.label = scale * (s.label - s.max);
  }
}

template <class T>
void HeadStrip<T>::gradient() {
  const HeadLayout& layout = c_.layout;
  const int64_t n = columns_.count;
  make_effective();
  if (const int group = layout.one_label_group; group >= 0) {
    const double scale = layout.groups[static_cast<size_t>(group)].scale;
    const RowCoefficients sum = c_.scalars.coefficients(group, row_);
    if (sum.p == 0 && sum.l == 0) {
      std::fill(z_, z_ + n, T(0));
      return;
    }
    T* const block_max = c_.gradient_scratch(worker_);
    c_.kernels.exponentials(z_, kTypeOf<T>, static_cast<T>(scale), n, {}, z_, block_max);
    c_.kernels.scale_exponentials(z_, block_max, c_.student(group, row_),
                                  static_cast<T>(scale * sum.p), n, kTypeOf<T>, z_, false);
    if (label_ >= 0) {
      z_[label_] = static_cast<T>(scale * c_.scalars.label_gradient(group, row_, sum));
    }
    return;
  }
  T* const g = c_.gradient_scratch(worker_);
  bool add = false;
  for (int group = 0; group < static_cast<int>(layout.groups.size()); ++group) {
    if (!layout.has_gradient(group)) continue;
    const double scale = layout.groups[static_cast<size_t>(group)].scale;
    const RowCoefficients sum = c_.scalars.coefficients(group, row_);
    if (sum.p != 0) {
      c_.kernels.label_gradient(z_, c_.student(group, row_), static_cast<T>(scale * sum.p), T(0),
                                nullptr, add, n, g);
    } else if (!add) {
      std::fill(g, g + n, T(0));
    }
    if (label_ >= 0) g[label_] -= static_cast<T>(scale * sum.l);
    add = true;
  }
  if (!add) std::fill(g, g + n, T(0));
  if (layout.config.options.softcap > 0) {
    c_.kernels.softcap_slope(z_, static_cast<T>(layout.config.options.softcap), n, g);
  }
  std::memcpy(z_, g, static_cast<size_t>(n) * sizeof(T));
}

template class HeadStrip<float>;
template class HeadStrip<double>;

}  // namespace ullage::lossk
