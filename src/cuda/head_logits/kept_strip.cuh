// A strip of a row that a cluster's block keeps in shared memory (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/row_process.cuh"

namespace ullage::lossk::cuda {

// How a launch's rows lie in 16-byte words. A row's first column may lie some way into one, its
// shift, which differs from row to row where the stride is not in whole words.
enum class Placement {
  kInWords,    // no row has a shift (HeadParams::in_whole_words)
  kSameShift,  // a row's logits, teacher and gradient have the same
  kAny,
};

// Columns in shared memory, where the first lies `shift` columns into a word.
template <class T, Placement kPlacement>
struct KeptStrip {
  static constexpr bool kAligned = kPlacement == Placement::kInWords;
  static constexpr bool kNear = true, kApart = true;
  static constexpr bool kShifted = kPlacement == Placement::kSameShift;
  static constexpr bool kPadded = kPlacement != Placement::kAny;
  static constexpr bool kLoadsAhead = kAligned;
  const T* data;  // the word's first column
  int shift;      // 0 where kAligned

  // Eight from the `i`-th of the first word on, a multiple of eight.
  __device__ Vector<T> words_at(int i) const {
    Vector<T> v;
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w) {
      v.words[w] = reinterpret_cast<const uint4*>(data + i)[w];
    }
    return v;
  }
  __device__ T at(int column) const { return data[column + shift]; }
  __device__ Vector<T> load(int column) const {
    if constexpr (kAligned) return words_at(column);
    return load_shifted(data + column, shift);
  }
  __device__ Vector<T> load_tail(int column, int columns) const {
    Vector<T> v = load(column);
    if (column + kLaneColumns > columns) blank_from(v, columns - column);
    return v;
  }
  // From the `ahead`-th column on, which begins a word.
  __device__ KeptStrip<T, Placement::kInWords> words_from(int ahead) const {
    return {data + shift + ahead, 0};
  }
};

// The same columns, where kParts 32-bit parts of the shift are known when the loop over them is
// compiled: five instructions for eight columns, not sixteen.
template <class T, int kParts>
struct ShiftedStrip {
  static constexpr bool kNear = true, kApart = true, kPadded = true, kLoadsAhead = true;
  const T* data;
  unsigned order;  // order_of_halves

  __device__ Vector<T> load(int column) const { return load_shifted<kParts>(data + column, order); }
  __device__ Vector<T> load_tail(int column, int) const { return load(column); }
};

// Calls act(student, teacher) with strips to go through column by column.
template <class T, Placement kPlacement, class Act>
__device__ inline void with_loads(const KeptStrip<T, kPlacement>& student,
                                  const KeptStrip<T, kPlacement>& teacher, const Act& act) {
  if constexpr (kPlacement != Placement::kSameShift) {
    act(student, teacher);
  } else {
    const unsigned order = order_of_halves<T>(student.shift);
    with_constant(student.shift * static_cast<int>(sizeof(T)) / 4, [&]<int kParts>() {
      act(ShiftedStrip<T, kParts>{student.data, order},
          ShiftedStrip<T, kParts>{teacher.data, order});
    });
  }
}

}  // namespace ullage::lossk::cuda
