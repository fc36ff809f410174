// head_rows_sm80_short where a row is gone through once for its sums: a warp holds some rows, and
// their teacher's, in registers while the next are on their way to shared memory. It sums them side
// by side, the last steps of several sums in one; then each row has a lane for its terms; then the
// warp writes the gradients.
#pragma once

#include "cuda/head_logits/streamed_strip.cuh"

namespace ullage::lossk::cuda {

template <class T, int kVectors>
inline constexpr int kRowsHeld = rows_held(sizeof(T), kVectors);
template <Family kFamily>
inline constexpr int kMostStripsHeld = most_strips_held(kFamily);

// n sums over the warp in fewer shuffles, each in the order of warp_sum: a step that halves the
// lanes of a value halves the values of a lane. The i-th is in lanes i * 32 / n on.
template <int n, int kStep = 16>
__device__ inline float spread_sum(const float (&x)[n], int lane) {
  static_assert(n <= 16 && (n & (n - 1)) == 0);
  if constexpr (n > 1) {
    const bool upper = lane & kStep;
    float half[n / 2];
#pragma unroll
    for (int i = 0; i < n / 2; ++i) {
      const float keep = upper ? x[i + n / 2] : x[i], give = upper ? x[i] : x[i + n / 2];
      half[i] = keep + __shfl_xor_sync(~0u, give, kStep);
    }
    return spread_sum<n / 2, kStep / 2>(half, lane);
  } else {
    float sum = x[0];
#pragma unroll
    for (int step = kStep; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
    return sum;
  }
}

// Gradients that are added to what is there, or not in whole words: of rows `first` on, of `lanes`
// each, from memory. Once for all kinds of batches: they would not be inlined beside it.
template <class Kind>
__device__ __noinline__ void add_gradients(const HeadParams& p, const RowWord* words, int64_t first,
                                           unsigned counting, int lanes, int lane) {
  using T = typename Kind::Element;
  const T* from = static_cast<const T*>(p.logits) + (first - p.first_row) * p.logits_stride;
  const T* teacher = static_cast<const T*>(p.teacher) + (first - p.first_row) * p.teacher_stride;
  T* to = gradient_at<T>(p, first, 0);
  const int columns = static_cast<int>(p.vocab);
  for (int b = 0; b * lanes < 32 && first + b < end_row(p); ++b) {
    if (counting >> (b * lanes) & 1) {
      write_gradient<Kind>(p, StreamedStrip<T, true>{from}, StreamedStrip<T, true>{teacher},
                           columns, to, 0, words[b], lane);
    } else {
      clear_gradient(p, to, columns, lane);
    }
    from += p.logits_stride;
    if constexpr (Kind::kHasTeacher) teacher += p.teacher_stride;
    to += p.gradient_stride;
  }
}

// kStrips of up to kRounds each. A row has 32 / kRows lanes, the first of which evaluates it.
template <class Kind, int kRows, int kStrips, int kRounds>
class HeldRows {
  using T = typename Kind::Element;
  static constexpr int kMatrices = Kind::kMatrices;
  static_assert(kOwnExtras<Kind::kFamily> == 0 && (!Kind::kHasTeacher || kStrips == 1));
  static_assert(kMatrices * kRows * kStrips * kRounds <= vectors_held(sizeof(T)));
  static constexpr int kLanes = 32 / kRows, kLanesOfStrip = kLanes / kStrips;
  static constexpr unsigned kAllRows = ~0u / ((1ull << kLanes) - 1);  // a bit every kLanes
  // Rounds that every strip has, and in full. Of several strips the shortest has two, and the last,
  // which alone ends in a short one, three or more; a single one may have three where four fit.
  static constexpr int kFullRounds = kStrips > 1 || kRounds == 4 ? 2 : kRounds - 1;

 public:
  // This warp's, shared: kRows words, and a place for each vector of its lanes.
  __device__ HeldRows(const HeadParams& p, RowWord* words, uint4* next, int lane)
      : p_(p),
        words_(words),
        next_(next + lane),
        lane_(lane),
        mine_(lane / kLanes),
        columns_(static_cast<int>(p.vocab)),
        plain_(p.gradient != nullptr && !p.accumulate && is_aligned(p.gradient) &&
               p.gradient_stride % kPerWord<T> == 0) {
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
      const int first = s * p.cut.n_rounds / kStrips, end = (s + 1) * p.cut.n_rounds / kStrips;
      column_[s] = first * kWarpColumns + lane * kLaneColumns;
      left_[s] = min(end * kWarpColumns, columns_) - column_[s];
    }
  }

  // Rows `first` on, then every `step`-th batch of them.
  __device__ void run(uint32_t first, uint32_t step) {
    int64_t label = as_index(p_.labels, label_bits(first));
    uint64_t bits = label_bits(first + step);
    unsigned counting = counting_of(first, label);
    ask_for(first, counting);
    for (; first < end_row(p_); first += step) {
      const int64_t label_next = as_index(p_.labels, bits);
      bits = label_bits(first + 2 * step);
      const unsigned counting_next = counting_of(first + step, label_next);
      take_over();
      ask_for(first + step, counting_next);
      reduce(first, label, counting);
      label = label_next;
      counting = counting_next;
    }
  }

 private:
  __device__ bool evaluates(uint32_t first) const {
    return lane_ % kLanes == 0 && first + mine_ < end_row(p_);
  }
  // This lane's row's label, as it lies in memory; -1 where there is none.
  __device__ uint64_t label_bits(uint32_t first) const {
    const bool has_label = p_.labels.data != nullptr && evaluates(first);
    return has_label ? index_bits_at(p_.labels, first + mine_) : ~uint64_t{0};
  }
  static __device__ bool is_in(unsigned rows, int b) { return rows >> (b * kLanes) & 1; }

  // Whether a strip has that round, and the row this lane's columns of it.
  __device__ bool has(int strip, int round) const {
    return round < kFullRounds || round * kWarpColumns < left_[strip];
  }

  // A bit for the first lane of each row that counts.
  __device__ unsigned counting_of(uint32_t first, int64_t label) const {
    return __ballot_sync(~0u, evaluates(first) && row_counts(p_, first + mine_, label));
  }

  __device__ void reduce(uint32_t first, int64_t label, unsigned counting) {
    const int64_t row = first + mine_;
    const bool evaluates_one = evaluates(first);
    if (counting == 0) return clear(first, row, evaluates_one);
    RowInputs in;
    T label_logit{}, of_teacher{};
    if (counting >> lane_ & 1) {
      in = load_row_vectors(p_, row, label);
      label_logit = ullage::lossk::cuda::label_logit<T>(p_, row, in.label);
      if constexpr (Kind::kHasTeacher) of_teacher = teacher_logit(row, in.label);
    }
    const RowSums sums = row_sums();
    ullage::cuda::ptx::wait_for_previous_kernel();
    T of_label{};
    if (counting >> lane_ & 1) {
      in.label_logit = to_float(label_logit);
      const RowWord word = finish_row_alone<Kind>(p_, row, in, sums);
      words_[mine_] = word;
      of_label = label_gradient(in, to_float(of_teacher), word);
    } else if (evaluates_one) {
      clear_outputs(row);
    }
    __syncwarp();
    keep_as_stored();
    if (plain_) {
      if (counting != kAllRows) clear_gradients(first, counting);
      write_gradients(first, counting);
      __syncwarp();  // another lane has written the label's column
      if (counting >> lane_ & 1 && in.label >= 0) *gradient_at<T>(p_, row, in.label) = of_label;
    } else if (p_.gradient != nullptr) {
      add_gradients<Kind>(p_, words_, first, counting, kLanes, lane_);
    }
    __syncwarp();  // every lane has read the words
  }

  __device__ void clear_outputs(int64_t row) const {
    for (int t = 0; t < p_.n_terms; ++t) p_.row_losses[t * p_.n_tok + row] = 0;
    write_outputs_alone(p_, row, {});
  }
  // Rows of which none counts.
  __device__ void clear(uint32_t first, int64_t row, bool evaluates_one) const {
    ullage::cuda::ptx::wait_for_previous_kernel();
    if (evaluates_one) clear_outputs(row);
    clear_gradients(first, 0);
  }
  // Of the rows that do not count.
  __device__ void clear_gradients(uint32_t first, unsigned counting) const {
    T* to = gradient_at<T>(p_, first, 0);
#pragma unroll 1
    for (int b = 0; b < kRows && first + b < end_row(p_); ++b, to += p_.gradient_stride) {
      if (!is_in(counting, b)) clear_gradient(p_, to, columns_, lane_);
    }
  }

  // The rows that count on their way to this lane's places.
  __device__ void ask_for(uint32_t first, unsigned counting) const {
    ask_for(0, p_.logits, p_.logits_stride, first, counting);
    if constexpr (Kind::kHasTeacher) ask_for(1, p_.teacher, p_.teacher_stride, first, counting);
  }
  __device__ void ask_for(int matrix, const void* rows, int64_t stride, uint32_t first,
                          unsigned counting) const {
    const T* from = static_cast<const T*>(rows) + (first - p_.first_row) * stride;
#pragma unroll
    for (int b = 0; b < kRows; ++b, from += stride) {
      if (!is_in(counting, b)) continue;
      for_each_vector([&](int s, int r, int i) {
        const T* const at = from + column_[s] + r * kWarpColumns;
#pragma unroll
        for (int w = 0; w < kWordsOf<T>; ++w) {
          if (!has(s, r)) continue;
          ullage::cuda::ptx::copy_async(place(matrix, b, i, w), at + w * kPerWord<T>);
        }
      });
    }
  }
  // What has come, in registers. What a row lacks is -inf; rows that do not count have anything.
  __device__ void take_over() {
    ullage::cuda::ptx::wait_for_copies();
#pragma unroll
    for (int of = 0; of < kMatrices * kRows; ++of) {
      const int m = of / kRows, b = of % kRows;
      for_each_vector([&](int s, int r, int i) {
        Vector<T>& v = held_[m][b][s][r];
        if (r >= kFullRounds) fill_with_minus_infinity(v);
#pragma unroll
        for (int w = 0; w < kWordsOf<T>; ++w) {
          if (has(s, r)) v.words[w] = *place(m, b, i, w);
        }
      });
    }
    keep_as_stored();  // before the next are asked for
  }
  __device__ uint4* place(int matrix, int b, int i, int w) const {
    const int vector = (matrix * kRows + b) * kStrips * kRounds + i;
    return next_ + (vector * kWordsOf<T> + w) * 32;
  }
  template <class Act>
  static __device__ void for_each_vector(const Act& act) {
#pragma unroll
    for (int s = 0; s < kStrips; ++s) {
#pragma unroll
      for (int r = 0; r < kRounds; ++r) act(s, r, s * kRounds + r);
    }
  }
  static __device__ void fill_with_minus_infinity(Vector<T>& v) {
    const uint32_t bits = bits_of(minus_infinity<T>());
    const uint32_t part = sizeof(T) == 2 ? bits << 16 | bits : bits;
#pragma unroll
    for (int w = 0; w < kWordsOf<T>; ++w) v.words[w] = make_uint4(part, part, part, part);
  }

  // So that the compiler has read all of it, and does not keep what it unpacked for the sums, twice
  // as many registers, for the gradient.
  __device__ void keep_as_stored() {
#pragma unroll
    for (int i = 0; i < kMatrices * kRows * kStrips * kRounds * kWordsOf<T>; ++i) {
      uint4& word = reinterpret_cast<Vector<T>*>(held_)[i / kWordsOf<T>].words[i % kWordsOf<T>];
      asm volatile("" : "+r"(word.x), "+r"(word.y), "+r"(word.z), "+r"(word.w));
    }
  }

  __device__ StripMaxima maxima(int b, int s) const {
    StripMaxima most{};
#pragma unroll
    for (int m = 0; m < kMatrices; ++m) {
      RunningMax<T> running;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) running.add(held_[m][b][s][r]);
      (m == 0 ? most.student : most.teacher) = warp_max(running.value());
    }
    return most;
  }

  // This lane's row's.
  __device__ RowSums row_sums() const {
    using ullage::cuda::ptx::max_nan;
    constexpr int kCount = kRows * kStrips;
    float sums[kCount], teacher_sums[kCount], log_sums[kCount], tempered_sums[kCount];
    StripSums<Kind> mine;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int b = i / kStrips, s = i % kStrips;
      const StripMaxima most = maxima(b, s);
      const References from = references_of<Kind>(p_, most);
      RelativeSums<Kind> lane_sums;
#pragma unroll
      for (int r = 0; r < kRounds; ++r) {
        const int valid = has(s, r) ? kLaneColumns : 0;
        add_columns<Kind>(p_, held_[0][b][s][r], held_[kMatrices - 1][b][s][r], valid, from,
                          lane_sums);
      }
      sums[i] = lane_sums.sum;
      teacher_sums[i] = lane_sums.teacher_sum;
      log_sums[i] = lane_sums.log_sum;
      tempered_sums[i] = lane_sums.tempered_sum;
      if (lane_ / kLanesOfStrip == i) mine.max = most.student, mine.teacher_max = most.teacher;
    }
    mine.sums.sum = spread_sum(sums, lane_);
    if constexpr (Kind::kHasTeacher) mine.sums.teacher_sum = spread_sum(teacher_sums, lane_);
    if constexpr (Kind::kHasLogSum) mine.sums.log_sum = spread_sum(log_sums, lane_);
    if constexpr (Kind::kTempered) mine.sums.tempered_sum = spread_sum(tempered_sums, lane_);
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

  __device__ T teacher_logit(int64_t row, int64_t column) const {
    if (column < 0) return T{};
    return static_cast<const T*>(p_.teacher)[(row - p_.first_row) * p_.teacher_stride + column];
  }
  // The gradient of this lane's row at its label, if it is a column of this head; t: its teacher's
  // logit there.
  __device__ T label_gradient(const RowInputs& in, float t, const RowWord& word) const {
    const float x = Kind::kSoftcap ? softcapped(p_, in.label_logit) : in.label_logit;
    float g = gradient_of_column<Kind::kFamily>(p_, word.sums, word.c, word.scales,
                                                LogRatio(word.sums), x, t, 0) -
              word.c.label;
    if constexpr (Kind::kSoftcap) g *= softcap_slope(x);
    return from_float<T>(g);
  }
  __device__ float softcap_slope(float x) const {
    const float tanh_value = x * p_.inverse_softcap;
    return fmaf(-tanh_value, tanh_value, 1.0f);
  }

  // Without the labels', in whole words.
  __device__ void write_gradients(uint32_t first, unsigned counting) const {
    T* to = gradient_at<T>(p_, first, 0);
#pragma unroll
    for (int b = 0; b < kRows; ++b, to += p_.gradient_stride) {
      if (!is_in(counting, b)) continue;
      const RowWord word = words_[b];
#pragma unroll
      for (int s = 0; s < kStrips; ++s) {
#pragma unroll
        for (int r = 0; r < kRounds; ++r) {
          float x[8], t[8], g[8];
          unpack_logits<Kind>(p_, held_[0][b][s][r], has(s, r) ? kLaneColumns : 0, x);
          if constexpr (Kind::kHasTeacher) unpack(held_[1][b][s][r], t);
          gradient_of_columns<Kind::kFamily>(p_, word.sums, word.c, word.scales, x, t, g);
          if constexpr (Kind::kSoftcap) {
#pragma unroll
            for (int i = 0; i < 8; ++i) g[i] *= softcap_slope(x[i]);
          }
          const int left = r < kFullRounds ? kWarpColumns : left_[s] - r * kWarpColumns;
          store_whole<true>(to + column_[s] + r * kWarpColumns, g, left, lane_);
        }
      }
    }
  }

  const HeadParams& p_;
  RowWord* words_;
  uint4* next_;  // this lane's first place
  int lane_;
  int mine_;  // of the batch's rows, this lane's
  int columns_;
  int column_[kStrips];  // a strip's first of this lane
  int left_[kStrips];    // from there to the strip's or the row's end
  bool plain_;           // the gradient is written in whole words, and nothing is added to it
  Vector<T> held_[kMatrices][kRows][kStrips][kRounds];
};

// `shared`: this warp's. Inlined, or the largest would be called and its state kept in memory.
template <class Kind, int kStrips, int kRounds>
__device__ __forceinline__ void run_held_rows(const HeadParams& p, std::byte* shared, int warp,
                                              int lane) {
  using T = typename Kind::Element;
  static_assert(sizeof(RowWord) <= kRowWordBytes);
  constexpr int kRows = kRowsHeld<T, kStrips * kRounds * Kind::kMatrices>;
  if constexpr (kRows > 0 && kStrips <= kMostStripsHeld<Kind::kFamily>) {
    uint4* const next = reinterpret_cast<uint4*>(shared);
    RowWord* const words = reinterpret_cast<RowWord*>(shared + kShortBytes);
    const unsigned at = (blockIdx.x * kHeldWarps + warp) * kRows;
    HeldRows<Kind, kRows, kStrips, kRounds>(p, words, next, lane)
        .run(static_cast<uint32_t>(p.first_row) + at, gridDim.x * kHeldWarps * kRows);
  }
}

template <class Kind>
__global__ void __launch_bounds__(kHeldWarps * 32, kHeldBlocks)
    held_rows(const __grid_constant__ HeadParams p) {
  extern __shared__ __align__(16) std::byte held_shared[];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;  // (of warp_of_block: spills)
  std::byte* const mine = held_shared + warp * kHeldBytes;
  static_assert(kRoundsOfStrip == 4);
  switch (p.cut.n_strips == 1 ? p.cut.n_rounds : p.cut.n_strips * kRoundsOfStrip) {
    case 1:
      run_held_rows<Kind, 1, 1>(p, mine, warp, lane);
      break;
    case 2:
      run_held_rows<Kind, 1, 2>(p, mine, warp, lane);
      break;
    case 3:
    case 4:
      run_held_rows<Kind, 1, 4>(p, mine, warp, lane);
      break;
    case 8:
      run_held_rows<Kind, 2, 4>(p, mine, warp, lane);
      break;
    default:
      run_held_rows<Kind, 4, 4>(p, mine, warp, lane);
  }
  ullage::cuda::ptx::let_next_kernel_start();
}

struct HeldRowsKernel {
  template <class Kind>
  static const void* of() {
    if constexpr (kOwnExtras<Kind::kFamily> > 0) {
      return nullptr;
    } else {
      return reinterpret_cast<const void*>(&held_rows<Kind>);
    }
  }
};

}  // namespace ullage::lossk::cuda
