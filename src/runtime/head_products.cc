#include "runtime/head_products.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "cpu/storage.h"

namespace ullage::lossk {
namespace {

using cpu::ProductOperand;
using cpu::SumOrder;

template <class T>
constexpr DType kTypeOf = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;

// The matrix, and its transpose. The stride of a single row says nothing.
ProductOperand rows_of(const MatrixView& m) {
  return {m.data, cpu::element_of(m.dtype), m.rows <= 1 ? m.cols : m.row_stride, 1};
}
ProductOperand transposed(const MatrixView& m) {
  return {m.data, cpu::element_of(m.dtype), 1, m.rows <= 1 ? m.cols : m.row_stride};
}

const std::byte* row_of(const MatrixView& m, int64_t row) {
  const int64_t stride = m.rows <= 1 ? 0 : m.row_stride;
  return static_cast<const std::byte*>(m.data) + row * stride * size_of(m.dtype);
}

// Rows of a head's weight, which are columns of the logits.
MatrixView part_of(const MatrixView& m, ColumnRange rows) {
  return {row_of(m, rows.begin), m.dtype, rows.count, m.cols, m.rows <= 1 ? m.cols : m.row_stride};
}

template <class T>
MatrixView dense(const T* data, int64_t rows, int64_t cols) {
  return {data, kTypeOf<T>, rows, cols, cols};
}

std::byte* row_of(const MutableMatrixView& m, int64_t row) {
  const int64_t stride = m.rows <= 1 ? 0 : m.row_stride;
  return static_cast<std::byte*>(m.data) + row * stride * size_of(m.dtype);
}

}  // namespace

template <class T>
HeadProducts<T>::HeadProducts(const HeadLayout& layout, const Inputs& inputs,
                              const Outputs& outputs, std::span<std::byte> workspace,
                              cpu::WorkerPool& pool)
    : layout_(layout),
      inputs_(inputs),
      outputs_(outputs),
      workspace_(workspace),
      pool_(pool),
      kernels_(cpu::row_kernels<T>()),
      logits_(at<T>(layout.slots.logits)),
      d_bias_(outputs.d_bias ? at<T>(layout.slots.d_bias) : nullptr) {
  d_weight_ = begin(outputs.d_weight, layout.slots.d_weight);
  d_adapter_a_ = begin(outputs.d_adapter_a, layout.slots.d_adapter_a);
  d_adapter_b_ = begin(outputs.d_adapter_b, layout.slots.d_adapter_b);
  if (d_bias_) {
    const MutableVectorView& out = outputs.d_bias;
    for (int64_t j = 0; j < out.size; ++j) {
      d_bias_[j] = outputs.accumulate
                       ? static_cast<T>(cpu::load_double(out.data, out.dtype, j * out.stride))
                       : T(0);
    }
  }
}

template <class T>
const void* HeadProducts<T>::teacher_logits(size_t teacher) const {
  return at<std::byte>(layout_.slots.teacher_logits[teacher]);
}

template <class T>
void HeadProducts<T>::product(const cpu::ProductShape& shape, const ProductOperand& a,
                              const ProductOperand& b, void* c, int64_t c_stride, bool accumulate,
                              SumOrder order) const {
  const Slot& slot = layout_.slots.product;
  cpu::product(
      shape, a, b, c, c_stride, accumulate, order,
      workspace_.subspan(static_cast<size_t>(slot.offset), static_cast<size_t>(slot.bytes)), pool_);
}

// The hidden states of `rows`, where they lie if they are adjacent, else copied together.
template <class T>
MatrixView HeadProducts<T>::gather(std::span<const int64_t> rows, const MatrixView& all,
                                   const Slot& slot) const {
  const auto count = static_cast<int64_t>(rows.size());
  if (rows.back() - rows.front() + 1 == count) {
    return {row_of(all, rows.front()), all.dtype, count, all.cols,
            all.rows <= 1 ? all.cols : all.row_stride};
  }
  const int64_t row_bytes = all.cols * size_of(all.dtype);
  auto* const to = at<std::byte>(slot);
  for (int64_t i = 0; i < count; ++i) {
    std::memcpy(to + i * row_bytes, row_of(all, rows[static_cast<size_t>(i)]),
                static_cast<size_t>(row_bytes));
  }
  return {to, all.dtype, count, all.cols, all.cols};
}

template <class T>
void HeadProducts<T>::scale_rows(T* rows, int64_t count) const {
  const auto scale = static_cast<T>(layout_.config.options.adapter_scale);
  const int64_t size = count * layout_.config.options.adapter_rank;
  for (int64_t i = 0; i < size; ++i) rows[i] *= scale;
}

template <class T>
void HeadProducts<T>::make_logits(std::span<const int64_t> rows, ColumnRange columns) {
  if (layout_.from_hidden()) make_student_logits(rows, columns);
  const auto m = static_cast<int64_t>(rows.size());
  for (size_t i = 0; i < layout_.config.teachers.size(); ++i) {
    if (!layout_.makes_logits_of(i)) continue;
    const TeacherInputs& given = inputs_.teachers[i];
    const MatrixView hidden = gather(rows, given.hidden, layout_.slots.teacher_hidden[i]);
    // The first `vocab` rows of its head: what lies beyond is dropped.
    product({m, columns.count, hidden.cols}, rows_of(hidden),
            transposed(part_of(given.weight, columns)),
            at<std::byte>(layout_.slots.teacher_logits[i]), columns.count, false,
            SumOrder::kBlocks);
  }
}

template <class T>
void HeadProducts<T>::make_student_logits(std::span<const int64_t> rows, ColumnRange columns) {
  const auto m = static_cast<int64_t>(rows.size());
  const int64_t d_model = layout_.shape.d_model;
  const int64_t rank = layout_.config.options.adapter_rank;
  T* const xa = at<T>(layout_.slots.adapter_rows);
  if (columns.begin == 0) {
    hidden_ = gather(rows, inputs_.hidden, layout_.slots.hidden);
    if (rank > 0) {
      product({m, rank, d_model}, rows_of(hidden_), transposed(inputs_.adapter_a), xa, rank, false,
              SumOrder::kBlocks);
      scale_rows(xa, m);
    }
  }
  product({m, columns.count, d_model}, rows_of(hidden_),
          transposed(part_of(inputs_.weight, columns)), logits_, columns.count, false,
          SumOrder::kBlocks);
  if (rank > 0) {
    product({m, columns.count, rank}, rows_of(dense(xa, m, rank)),
            transposed(part_of(inputs_.adapter_b, columns)), logits_, columns.count, true,
            SumOrder::kBlocks);
  }
}

template <class T>
typename HeadProducts<T>::Accumulator HeadProducts<T>::begin(const MutableMatrixView& out,
                                                             const Slot& slot) const {
  if (!out) return {};
  if (out.dtype == kTypeOf<T>) {
    return {out, static_cast<T*>(out.data), out.rows <= 1 ? out.cols : out.row_stride, false};
  }
  const Accumulator made{out, at<T>(slot), out.cols, true};
  if (outputs_.accumulate) {
    pool_.run(out.rows, [&](int64_t row, int) {
      kernels_.prepare(row_of(out, row), out.dtype, nullptr, T(0), out.cols,
                       made.data + row * made.stride);
    });
  }
  return made;
}

// One link of the chain over tokens, for some rows of the gradient.
template <class T>
void HeadProducts<T>::add_product(const Accumulator& to, ColumnRange rows, const ProductOperand& a,
                                  const ProductOperand& b, int64_t n_tokens) const {
  product({rows.count, to.out.cols, n_tokens}, a, b, to.data + rows.begin * to.stride, to.stride,
          outputs_.accumulate || !empty_, SumOrder::kChain);
}

template <class T>
void HeadProducts<T>::add_d_hidden(std::span<const int64_t> rows, ColumnRange columns) const {
  const auto m = static_cast<int64_t>(rows.size());
  const int64_t d_model = layout_.shape.d_model;
  product({m, d_model, columns.count}, rows_of(dense(logits_, m, columns.count)),
          rows_of(part_of(inputs_.weight, columns)), at<T>(layout_.slots.d_hidden), d_model,
          columns.begin > 0, SumOrder::kBlocks);
}

// With the adapter's share, rounded to where the caller wants it.
template <class T>
void HeadProducts<T>::store_d_hidden(std::span<const int64_t> rows) const {
  const auto m = static_cast<int64_t>(rows.size());
  const int64_t d_model = layout_.shape.d_model;
  T* const made = at<T>(layout_.slots.d_hidden);
  if (const int64_t rank = layout_.config.options.adapter_rank; rank > 0) {
    product({m, d_model, rank}, rows_of(dense(at<T>(layout_.slots.d_adapter_rows), m, rank)),
            rows_of(inputs_.adapter_a), made, d_model, true, SumOrder::kBlocks);
  }
  const MutableMatrixView& out = outputs_.d_hidden;
  for (int64_t i = 0; i < m; ++i) {
    kernels_.store(made + i * d_model, d_model, out.dtype,
                   row_of(out, rows[static_cast<size_t>(i)]), outputs_.accumulate);
  }
}

// g B for d_hidden and d_adapter_a, and d_adapter_b.
template <class T>
void HeadProducts<T>::add_adapter(std::span<const int64_t> rows, ColumnRange columns) const {
  const auto m = static_cast<int64_t>(rows.size());
  const int64_t rank = layout_.config.options.adapter_rank;
  const MatrixView gradient = dense(logits_, m, columns.count);
  if (outputs_.d_hidden || d_adapter_a_.data) {
    T* const gb = at<T>(layout_.slots.d_adapter_rows);
    product({m, rank, columns.count}, rows_of(gradient),
            rows_of(part_of(inputs_.adapter_b, columns)), gb, rank, columns.begin > 0,
            SumOrder::kBlocks);
    if (columns.end() == layout_.shape.vocab) {
      scale_rows(gb, m);
      if (d_adapter_a_.data) {
        add_product(d_adapter_a_, {0, rank}, transposed(dense(gb, m, rank)), rows_of(hidden_), m);
      }
    }
  }
  if (d_adapter_b_.data) {
    const T* const xa = at<T>(layout_.slots.adapter_rows);
    add_product(d_adapter_b_, columns, transposed(gradient), rows_of(dense(xa, m, rank)), m);
  }
}

template <class T>
void HeadProducts<T>::add_d_bias(int64_t n_rows, ColumnRange columns) const {
  pool_.run(cpu::row_blocks(columns.count), [&](int64_t block, int) {
    const int64_t j = block * cpu::kRowBlock;
    const int64_t count = std::min(cpu::kRowBlock, columns.count - j);
    for (int64_t row = 0; row < n_rows; ++row) {
      kernels_.add(logits_ + row * columns.count + j, count, d_bias_ + columns.begin + j);
    }
  });
}

template <class T>
void HeadProducts<T>::add_gradients(std::span<const int64_t> rows, ColumnRange columns) {
  const auto m = static_cast<int64_t>(rows.size());
  const bool last = columns.end() == layout_.shape.vocab;
  if (layout_.config.options.adapter_rank > 0) add_adapter(rows, columns);
  if (outputs_.d_hidden) {
    add_d_hidden(rows, columns);
    if (last) store_d_hidden(rows);
  }
  if (d_weight_.data) {
    add_product(d_weight_, columns, transposed(dense(logits_, m, columns.count)), rows_of(hidden_),
                m);
  }
  if (d_bias_) add_d_bias(m, columns);
  if (last) empty_ = false;
}

template <class T>
void HeadProducts<T>::finish(const Accumulator& accumulator) const {
  const MutableMatrixView& out = accumulator.out;
  if (!out || (outputs_.accumulate && empty_)) return;
  if (!empty_ && !accumulator.rounds) return;
  pool_.run(out.rows, [&](int64_t row, int) {
    if (empty_) {
      std::memset(row_of(out, row), 0, static_cast<size_t>(out.cols * size_of(out.dtype)));
    } else {
      kernels_.store(accumulator.data + row * accumulator.stride, out.cols, out.dtype,
                     row_of(out, row), false);
    }
  });
}

template <class T>
void HeadProducts<T>::finish() {
  finish(d_weight_);
  finish(d_adapter_a_);
  finish(d_adapter_b_);
  if (!d_bias_) return;
  const MutableVectorView& out = outputs_.d_bias;
  for (int64_t j = 0; j < out.size; ++j) {
    cpu::store_double(static_cast<double>(d_bias_[j]), out.data, out.dtype, j * out.stride);
  }
}

template class HeadProducts<float>;
template class HeadProducts<double>;

}  // namespace ullage::lossk
