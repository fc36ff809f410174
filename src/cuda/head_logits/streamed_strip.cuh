// Columns of a row where the caller put them.
#pragma once

#include "cuda/head_logits/row_process.cuh"

namespace ullage::lossk::cuda {

// Adjacent ones; kAligned: on a 16-byte boundary.
template <class T, bool kAligned_>
struct StreamedStrip {
  static constexpr bool kAligned = kAligned_, kNear = false, kApart = false;
  static constexpr bool kShifted = false, kPadded = false;
  static constexpr bool kLoadsAhead = kAligned;
  const T* data;

  __device__ Vector<T> load(int column) const {
    return load_vector(data + column, kLaneColumns, kAligned);
  }
  __device__ Vector<T> load_tail(int column, int columns) const {
    return load_vector(data + column, columns - column, kAligned);
  }
};

// Calls act(student, teacher) with row `row` of n_tok from `column` on.
template <class Kind, class Act>
__device__ inline void with_columns(const HeadParams& p, int64_t row, int64_t column,
                                    const Act& act) {
  using T = typename Kind::Element;
  const auto at = [&](const void* data, int64_t stride) {
    return static_cast<const T*>(data) + (row - p.first_row) * stride + column;
  };
  const T* const student = at(p.logits, p.logits_stride);
  const T* const teacher = Kind::kHasTeacher ? at(p.teacher, p.teacher_stride) : nullptr;
  if (is_aligned(student) && is_aligned(teacher)) {
    act(StreamedStrip<T, true>{student}, StreamedStrip<T, true>{teacher});
  } else {
    act(StreamedStrip<T, false>{student}, StreamedStrip<T, false>{teacher});
  }
}

}  // namespace ullage::lossk::cuda
