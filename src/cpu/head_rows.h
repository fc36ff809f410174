// Sweeps over one row of the head: everything that touches all columns of a row of logits. T is the
// accumulate type; a row in another storage type is converted first (`prepare`).
//
// Notation of docs/losses.md: u_j = softcap(z_j + bias_j), a_j = scale * u_j, q = softmax(a).
//
// Grade: bitwise. A row is cut into blocks of kRowBlock columns; sums run in T within a block
// (sum_row of row_math-inl.h) and in float64 over the blocks, ascending. The order follows
// from the row's length alone.
#pragma once

#include <cstdint>
#include <limits>

#include "ullage/dtype.h"
#include "ullage/lossk/terms.h"

namespace ullage::cpu {

// Columns in one block of a row: 8 KiB of float32, so that the three sweeps of `exponentials` over
// a block (maximum, exponential, sum) find it in the first cache level.
inline constexpr int64_t kRowBlock = 2048;

constexpr int64_t row_blocks(int64_t n) { return (n + kRowBlock - 1) / kRowBlock; }

// The maximum of u and sum_j exp(scale * (u_j - max)).
struct RowSum {
  double max = -std::numeric_limits<double>::infinity();
  double sum = 0;
};

// One softmax of a row, as the sweeps want it. ln q_j = scale * (u_j - max) - log_sum.
template <class T>
struct RowSoftmax {
  T scale;
  T max;
  T log_sum;
  T inverse_sum;
};

// A row in any storage type, [n] adjacent elements.
struct RowSource {
  const void* data = nullptr;
  DType dtype = DType::kF32;
};

// A divergence and, for Jensen-Shannon, its part KL(q | m), which the gradient needs.
struct RowDivergence {
  double loss;
  double student_part;
};

// Both softmaxes of a divergence and its loss, which Jensen-Shannon learns only from them.
struct DivergenceSums {
  RowSum student, teacher;
  double loss;
};

// What a divergence leaves of its two rows: e the student's exponentials, as `exponentials` leaves
// them, and x by columns the teacher's, or, for reverse KL, ln(q / p), and for Jensen-Shannon in
// the end ln(q / m). Where not `whole`, e and x are one block long, and overwritten by the next.
template <class T>
struct KeptRow {
  T* e;
  T* e_max;  // [row_blocks(n)], a block's maximum
  T* x;
  T* x_max;
  bool whole;
};

// `argmax`, `exponentials` and `scale_exponentials` take the storage types that are computed in T:
// f64 for double; f32, bf16 and f16 for float. `prepare` and `store` take any.
template <class T>
struct RowKernels {
  // u_j = softcap * tanh((z_j + bias_j) / softcap); no bias where it is null, no softcap where 0.
  void (*prepare)(const void* z, DType dtype, const T* bias, T softcap, int64_t n, T* u);

  // The smallest index of the largest z_j + bias_j; -1 where there is none (NaN).
  int64_t (*argmax)(const void* z, DType dtype, const T* bias, int64_t n);

  // The sum over the row, or over the columns [0, n) that follow those `before` sums: a row may
  // come in strips of whole blocks, with the same bits. Where `e` is given, e_j = exp(scale * (u_j
  // - block_max[j / kRowBlock])), with block_max [row_blocks(n)]; `e` may be `u`.
  RowSum (*exponentials)(const void* u, DType dtype, T scale, int64_t n, RowSum before, T* e,
                         T* block_max);

  // out_j = gain * q_j from those exponentials, added to what `out` holds where `accumulate`; `out`
  // may be `e`.
  void (*scale_exponentials)(const T* e, const T* block_max, const RowSoftmax<T>& student, T gain,
                             int64_t n, DType dtype, void* out, bool accumulate);

  // sum_j w_j * (u_j - max), with w = 1 where it is null; a column of w_j = 0 counts nothing.
  double (*weighted_distance)(const T* u, const T* w, T max, int64_t n);

  // -sum_j q_j ln q_j.
  double (*entropy)(const T* u, const RowSoftmax<T>& student, int64_t n);

  // Of p = softmax of t from q. `kept.e` may be `u`. Not the loss of Jensen-Shannon:
  DivergenceSums (*divergence)(lossk::Divergence kind, const RowSource& u, T u_scale,
                               const RowSource& t, T t_scale, int64_t n, const KeptRow<T>& kept);

  // from the same rows and what `divergence` left of them, which is whole, and not in `u`.
  RowDivergence (*jensen_shannon)(const RowSource& u, const RowSoftmax<T>& student,
                                  const RowSource& t, const RowSoftmax<T>& teacher, T beta,
                                  int64_t n, const KeptRow<T>& kept);

  // g_j = p_gain * q_j - u_gain * w_j (w = 1 where null); added to g where `add`.
  void (*label_gradient)(const T* u, const RowSoftmax<T>& student, T p_gain, T u_gain, const T* w,
                         bool add, int64_t n, T* g);

  // g_j = p_gain * q_j + gain * d divergence / d a_j, added to g where `add`, from what was left
  // whole, and `at`, the divergence; g may be `kept.e`.
  void (*divergence_gradient)(lossk::Divergence kind, const KeptRow<T>& kept,
                              const RowSoftmax<T>& student, const RowSoftmax<T>& teacher, T beta,
                              const RowDivergence& at, T p_gain, T gain, bool add, int64_t n, T* g);

  // g_j *= d softcap / dz = 1 - (u_j / softcap)^2.
  void (*softcap_slope)(const T* u, T softcap, int64_t n, T* g);

  // g rounded once to `dtype`; added in T to what `out` holds where `accumulate`.
  void (*store)(const T* g, int64_t n, DType dtype, void* out, bool accumulate);

  // sum_j += x_j: one link of the chain over rows that makes d_bias.
  void (*add)(const T* x, int64_t n, T* sum);
};

// Those of the instruction set in use (instruction_set.h).
template <class T>
const RowKernels<T>& row_kernels();

}  // namespace ullage::cpu
