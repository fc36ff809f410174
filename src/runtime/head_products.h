// The products of a run: a chunk's logits, then its gradients. T is the accumulate
// type; rows of a chunk are those that are not ignored, without gaps. Products over strips of
// columns have the bits of products over all of them where strips are multiples of
// cpu::kProductKBlock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "cpu/head_rows.h"
#include "cpu/product.h"
#include "cpu/worker_pool.h"
#include "plan/head_plan.h"
#include "runtime/head_strip.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk {

template <class T>
class HeadProducts {
 public:
  HeadProducts(const HeadLayout& layout, const Inputs& inputs, const Outputs& outputs,
               std::span<std::byte> workspace, cpu::WorkerPool& pool);

  // Gathers the hidden states of `rows` and makes their logits of the columns: the student's unless
  // they are given, and those of the teachers that give hidden states.
  void make_logits(std::span<const int64_t> rows, ColumnRange columns);

  T* logits() const { return logits_; }  // [rows][columns]; becomes the gradient in place
  const void* teacher_logits(size_t teacher) const;

  // From the gradient in logits(), for the rows and columns of the last make_logits. Columns of the
  // same rows come in ascending order.
  void add_gradients(std::span<const int64_t> rows, ColumnRange columns);

  // Rounds the accumulators to where the caller wants them.
  void finish();

 private:
  // Where a gradient summed over tokens grows: the caller's own buffer where it has type T, else a
  // slot of the workspace.
  struct Accumulator {
    MutableMatrixView out;
    T* data = nullptr;
    int64_t stride = 0;
    bool rounds = false;
  };

  template <class Element>
  Element* at(const Slot& slot) const {
    return reinterpret_cast<Element*>(workspace_.data() + slot.offset);
  }
  MatrixView gather(std::span<const int64_t> rows, const MatrixView& all, const Slot& slot) const;
  void make_student_logits(std::span<const int64_t> rows, ColumnRange columns);
  void product(const cpu::ProductShape& shape, const cpu::ProductOperand& a,
               const cpu::ProductOperand& b, void* c, int64_t c_stride, bool accumulate,
               cpu::SumOrder order) const;
  Accumulator begin(const MutableMatrixView& out, const Slot& slot) const;
  void add_product(const Accumulator& to, ColumnRange rows, const cpu::ProductOperand& a,
                   const cpu::ProductOperand& b, int64_t n_tokens) const;
  void finish(const Accumulator& accumulator) const;
  void scale_rows(T* rows, int64_t count) const;
  void add_d_hidden(std::span<const int64_t> rows, ColumnRange columns) const;
  void store_d_hidden(std::span<const int64_t> rows) const;
  void add_adapter(std::span<const int64_t> rows, ColumnRange columns) const;
  void add_d_bias(int64_t n_rows, ColumnRange columns) const;

  const HeadLayout& layout_;
  const Inputs& inputs_;
  const Outputs& outputs_;
  std::span<std::byte> workspace_;
  cpu::WorkerPool& pool_;
  const cpu::RowKernels<T>& kernels_;
  T* logits_;
  T* d_bias_;
  Accumulator d_weight_, d_adapter_a_, d_adapter_b_;
  MatrixView hidden_;  // of the last make_logits
  bool empty_ = true;  // nothing was added yet
};

extern template class HeadProducts<float>;
extern template class HeadProducts<double>;

}  // namespace ullage::lossk
