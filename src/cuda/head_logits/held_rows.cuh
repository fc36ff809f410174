// head_rows_sm80_short where a row's softmax is all that is summed: a warp reads its rows into
// registers, once, all of them under way together. It sums them side by side, the last steps of
// several sums in one; then each row has a lane for its terms; then the warp writes the gradients.
#pragma once

#include "cuda/head_logits/streamed_strip.cuh"

namespace ullage::lossk::cuda {

template <class T, int kVectors>
inline constexpr int kRowsHeld = rows_held(sizeof(T), kVectors);

// n sums over the warp in fewer shuffles, each in the order of warp_sum: a step that halves the
// lanes of a value halves the values of a lane. The i-th is in lanes i * 32 / n on.
template <int n>
__device__ inline float spread_sum(float (&x)[n], int lane) {
  static_assert(n <= 16 && (n & (n - 1)) == 0);
#pragma unroll
  for (int left = n / 2, step = 16; step > 0; left /= 2, step /= 2) {
    if (left == 0) {
      x[0] += __shfl_xor_sync(~0u, x[0], step);
      continue;
    }
    const bool upper = lane & step;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float keep = upper ? x[i + left] : x[i], give = upper ? x[i] : x[i + left];
      x[i] = keep + __shfl_xor_sync(~0u, give, step);
    }
  }
  return x[0];
}

// Gradients that are added to what is there, or not in whole words: of rows `first` on, of `lanes`
// each, from memory. Once for all kinds of batches: they would not be inlined beside it.
template <class Kind>
__device__ __noinline__ void add_gradients(const HeadParams& p, const RowWord* words, int64_t first,
                                           unsigned counting, int lanes, int lane) {
  using T = typename Kind::Element;
  const T* from = static_cast<const T*>(p.logits) + (first - p.first_row) * p.logits_stride;
  T* to = gradient_at<T>(p, first, 0);
  const int columns = static_cast<int>(p.vocab);
  for (int b = 0; b * lanes < 32 && first + b < end_row(p); ++b) {
    if (counting >> (b * lanes) & 1) {
      const StreamedStrip<T, true> row{from};
      write_gradient<Kind>(p, row, row, columns, to, 0, words[b], lane);
    } else {
      clear_gradient(p, to, columns, lane);
    }
    from += p.logits_stride;
    to += p.gradient_stride;
  }
}

// kStrips of up to kRounds each. A row has 32 / kRows lanes, the first of which evaluates it.
template <class Kind, int kRows, int kStrips, int kRounds>
class HeldRows {
  using T = typename Kind::Element;
  static_assert(!Kind::kHasTeacher);
  static_assert(kRows * kStrips * kRounds <= vectors_held(sizeof(T)));
  static constexpr int kLanes = 32 / kRows, kLanesOfStrip = kLanes / kStrips;

 public:
  // `words`: this warp's, kRows of them, shared.
  __device__ HeldRows(const HeadParams& p, RowWord* words, int lane)
      : p_(p),
        words_(words),
        lane_(lane),
        mine_(lane / kLanes),
        columns_(static_cast<int>(p.vocab)),
        plain_(p.gradient != nullptr && !p.accumulate && is_aligned(p.gradient) &&
               p.gradient_stride % kPerWord<T> == 0) {}

  // Rows `first` on, then every `step`-th batch of them.
  __device__ void run(int64_t first, int64_t step) {
    int64_t label = label_of(first);
    for (; first < end_row(p_); first += step) {
      const int64_t next = label_of(first + step);
      take(first, label);
      label = next;
    }
  }

 private:
  __device__ bool evaluates(int64_t first) const {
    return lane_ % kLanes == 0 && first + mine_ < end_row(p_);
  }
  // Of this lane's row, as stored.
  __device__ int64_t label_of(int64_t first) const {
    return evaluates(first) ? stored_label(p_, first + mine_) : -1;
  }
  static __device__ bool is_in(unsigned rows, int b) { return rows >> (b * kLanes) & 1; }

  __device__ int column_of(int strip, int round) const {
    return (strip * p_.cut.n_rounds / kStrips + round) * kWarpColumns + lane_ * kLaneColumns;
  }
  // Whether the strip has that round, and the row this lane's columns of it.
  __device__ bool is_in_strip(int strip, int round) const {
    return kStrips == 1 ||
           strip * p_.cut.n_rounds / kStrips + round < (strip + 1) * p_.cut.n_rounds / kStrips;
  }
  __device__ bool has(int strip, int round) const {
    return is_in_strip(strip, round) && column_of(strip, round) < columns_;
  }

  __device__ void take(int64_t first, int64_t label) {
    const int64_t row = first + mine_;
    const bool evaluates_one = evaluates(first);
    const unsigned counting = __ballot_sync(~0u, evaluates_one && row_counts(p_, row, label));
    load(first, counting);
    RowInputs in;
    T label_logit{};
    if (counting >> lane_ & 1) {
      in = load_row_vectors(p_, row, label);
      label_logit = ullage::lossk::cuda::label_logit<T>(p_, row, in.label);
    }
    const RowSums sums = row_sums();
    ullage::cuda::ptx::wait_for_previous_kernel();
    T of_label{};
    if (counting >> lane_ & 1) {
      in.label_logit = to_float(label_logit);
      const RowWord word = finish_row_alone<Kind>(p_, row, in, sums);
      words_[mine_] = word;
      of_label = label_gradient(in, word);
    } else if (evaluates_one) {
      for (int t = 0; t < p_.n_terms; ++t) p_.row_losses[t * p_.n_tok + row] = 0;
      write_outputs_alone(p_, row, {});
    }
    __syncwarp();
    keep_as_stored();
    if (plain_) {
      write_gradients(first, counting);
      __syncwarp();  // another lane has written the label's column
      if (counting >> lane_ & 1 && in.label >= 0) *gradient_at<T>(p_, row, in.label) = of_label;
    } else if (p_.gradient != nullptr) {
      add_gradients<Kind>(p_, words_, first, counting, kLanes, lane_);
    }
    __syncwarp();  // every lane has read the words
  }

  // What a row lacks is -inf, and a row that does not count lacks all.
  __device__ void load(int64_t first, unsigned counting) {
    const T* from = static_cast<const T*>(p_.logits) + (first - p_.first_row) * p_.logits_stride;
#pragma unroll
    for (int b = 0; b < kRows; ++b) {
#pragma unroll
      for (int s = 0; s < kStrips; ++s) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          Vector<T>& v = held_[b][s][r];
          fill_with_minus_infinity(v);
          if (is_in(counting, b) && has(s, r)) v = load_vector(from + column_of(s, r), 8, true);
        }
      }
      from += p_.logits_stride;
    }
  }
  static __device__ void fill_with_minus_infinity(Vector<T>& v) {
    const uint32_t bits = bits_of(minus_infinity<T>());
    const uint32_t part = sizeof(T) == 2 ? bits << 16 | bits : bits;
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w) v.words[w] = make_uint4(part, part, part, part);
  }

  // So that the compiler does not keep what it unpacked for the sums, twice as many registers, for
  // the gradient.
  __device__ void keep_as_stored() {
#pragma unroll
    for (int i = 0; i < kRows * kStrips * kRounds * kWordsOf<T>; ++i) {
      uint4& word = reinterpret_cast<Vector<T>*>(held_)[i / kWordsOf<T>].words[i % kWordsOf<T>];
      asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    }
  }

  // This lane's row's.
  __device__ RowSums row_sums() const {
    using ullage::cuda::ptx::max_nan;
    constexpr int kCount = kRows * kStrips;
    float sums[kCount], log_sums[kCount];
    StripSums<Kind> mine;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const auto& strip = held_[i / kStrips][i % kStrips];
      RunningMax<T> running;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) running.add(strip[r]);
      const float most = warp_max(running.value());
      const float reference = student_reference<Kind>(p_, most);
      RelativeSums<Kind> lane_sums;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const int valid = has(i % kStrips, r) ? kLaneColumns : 0;
        add_columns<Kind>(p_, strip[r], {}, valid, reference, 0, lane_sums);
      }
      sums[i] = lane_sums.sum;
      log_sums[i] = lane_sums.log_sum;
      if (lane_ / kLanesOfStrip == i) mine.max = most;
    }
    mine.sums.sum = spread_sum(sums, lane_);
    if constexpr (Kind::kHasLogSum) mine.sums.log_sum = spread_sum(log_sums, lane_);
    // As a section's one strip; then the sections in the order of warp_sum.
    bring_to(p_, mine, mine.max, mine.teacher_max);
    float max = mine.max;
#pragma unroll
    for (int step = kLanesOfStrip; step < kLanes; step *= 2) {
      max = max_nan(max, __shfl_xor_sync(~0u, max, step));
    }
    bring_to(p_, mine, max, mine.teacher_max);
#pragma unroll
    for (int step = kLanes / 2; step >= kLanesOfStrip; step /= 2) {
      mine.sums.sum += __shfl_xor_sync(~0u, mine.sums.sum, step);
      if constexpr (Kind::kHasLogSum) {
        mine.sums.log_sum += __shfl_xor_sync(~0u, mine.sums.log_sum, step);
      }
    }
    return ullage::lossk::cuda::row_sums<Kind>(p_, max, mine.teacher_max, mine.sums);
  }

  // The gradient of this lane's row at its label, if it is a column of this head.
  __device__ T label_gradient(const RowInputs& in, const RowWord& word) const {
    const float x = Kind::kSoftcap ? softcapped(p_, in.label_logit) : in.label_logit;
    float g = gradient_of(word.scales.student, word.sums.reference, x) - word.c.label;
    if constexpr (Kind::kSoftcap) g *= softcap_slope(x);
    return from_float<T>(g);
  }
  __device__ float gradient_of(float scale, float reference, float x) const {
    return scale * ullage::cuda::ptx::exp2_approx(fmaf(x, p_.log2_scale, -reference));
  }
  __device__ float softcap_slope(float x) const {
    const float tanh_value = x * p_.inverse_softcap;
    return fmaf(-tanh_value, tanh_value, 1.0f);
  }

  // Without the labels', in whole words.
  __device__ void write_gradients(int64_t first, unsigned counting) const {
    T* to = gradient_at<T>(p_, first, 0);
#pragma unroll
    for (int b = 0; b < kRows; ++b, to += p_.gradient_stride) {
      if (!is_in(counting, b)) {
        if (first + b < end_row(p_)) clear_gradient(p_, to, columns_, lane_);
        continue;
      }
      const float scale = words_[b].scales.student, reference = words_[b].sums.reference;
#pragma unroll
      for (int s = 0; s < kStrips; ++s) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          if (!is_in_strip(s, r)) continue;
          const int column = column_of(s, r);
          float x[8], g[8];
          unpack_logits<Kind>(p_, held_[b][s][r], column < columns_ ? kLaneColumns : 0, x);
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            g[i] = gradient_of(scale, reference, x[i]);
            if constexpr (Kind::kSoftcap) g[i] *= softcap_slope(x[i]);
          }
          store_whole(to + column, g, columns_ - column, lane_);
        }
      }
    }
  }
  const HeadParams& p_;
  RowWord* words_;
  int lane_;
  int mine_;  // of the batch's rows, this lane's
  int columns_;
  bool plain_;  // the gradient is written in whole words, and nothing is added to it
  Vector<T> held_[kRows][kStrips][kRounds];
};

template <class Kind>
__global__ void __launch_bounds__(kShortWarps * 32, kHeldBlocks)
    held_rows(const __grid_constant__ HeadParams p) {
  using T = typename Kind::Element;
  // Of every warp's rows; no constructor runs.
  __shared__ alignas(RowWord) std::byte word_bytes[kShortWarps * kRowsOfWarp * sizeof(RowWord)];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  RowWord* const words = reinterpret_cast<RowWord*>(word_bytes) + warp * kRowsOfWarp;
  const auto run = [&]<int kStrips, int kRounds>() {
    constexpr int kRows = kRowsHeld<T, kStrips * kRounds>;
    if constexpr (kRows > 0) {
      const int64_t at = (int64_t{blockIdx.x} * kShortWarps + warp) * kRows;
      HeldRows<Kind, kRows, kStrips, kRounds>(p, words, lane)
          .run(p.first_row + at, int64_t{gridDim.x} * kShortWarps * kRows);
    }
  };
  static_assert(kRoundsOfStrip == 4);
  switch (p.cut.n_strips == 1 ? p.cut.n_rounds : p.cut.n_strips * kRoundsOfStrip) {
    case 1:
      run.template operator()<1, 1>();
      break;
    case 2:
      run.template operator()<1, 2>();
      break;
    case 3:
    case 4:
      run.template operator()<1, 4>();
      break;
    case 8:
      run.template operator()<2, 4>();
      break;
    default:
      run.template operator()<4, 4>();
  }
  ullage::cuda::ptx::let_next_kernel_start();
}

struct HeldRowsKernel {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&held_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
