// What a row's strips are reduced to, and how: one warp a strip, a butterfly in the warp, then the
// strips in order. The order is fixed by the vocabulary (params.h, kMaxStrips).
//
// Exponentials are taken in base 2 of differences from a maximum that is known before the first of
// them: with c = scale * log2 e and the reference R = c * max x, rounded, u = x * c - R in one
// fused multiply-add; v likewise for the teacher. R stands for the maximum everywhere, so its own
// rounding cancels. A strip's sums are taken from the strip's own maximum and brought to the row's
// when the strips are added up, so one exchange between warps does. A large common offset costs
// nothing, and equal rows give equal bits.
#pragma once

#include "cuda/head_logits/element.cuh"

namespace ullage::lossk::cuda {

inline constexpr float kLn2 = 0.693147180559945309f, kLog2E = 1.442695040888963407f;

__device__ inline float float_at(const RowFloats& v, int64_t i, float otherwise) {
  return v.data == nullptr ? otherwise : v.data[i * v.stride];
}

// What a strip brings to the first exchange, kMaxStrips floats each.
enum SumPartial : int {
  kMax = 0,         // max x
  kSum = 1,         // sum 2^u
  kTeacherMax = 2,  // with a teacher
  kTeacherSum = 3,  // sum 2^v
  kCross = 4,       // kForward: sum 2^v u
  kForwardKl = 5,   // kForward: sum 2^v (u - v)
  kReverseKl = 4,   // kReverse: sum 2^u (u - v)
};
template <Family kFamily>
inline constexpr int kSums = n_sums(kFamily);

// And to the second, which only kMixed and what few ask for need: a further pass over the row.
enum ExtraPartial : int {
  kEntropy = 0,  // sum 2^u u
  kSmooth = 1,   // sum w_j u_j
  kArgmax = 2,   // the smallest column whose logit is the maximum, as an int
  // kMixed: over normalised p and q, in base-2 logarithms
  kMixedCross = 3,      // sum p log q
  kMixedForward = 4,    // sum p log (p / q)
  kMixedReverse = 5,    // sum q log (q / p)
  kTeacherFromMix = 6,  // sum p log (p / m)
  kStudentFromMix = 7,  // sum q log (q / m)
};
template <Family kFamily>
inline constexpr int kMixedExtras = n_mixed_extras(kFamily);

// The row's totals; the same in every thread of every block that works on the row.
struct RowSums {
  float stored_max = 0;  // before the softcap
  float max = 0, reference = 0, sum = 1, log2_sum = 0;
  float teacher_max = 0, teacher_reference = 0, teacher_sum = 1, teacher_log2_sum = 0;
  float cross = 0, forward_kl = 0, reverse_kl = 0;  // base 2, as the partials have them
  float teacher_from_mix = 0, student_from_mix = 0;
  float entropy = 0, smooth = 0;
  int argmax = -1;
};

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}
// Floats as ints of the same order; a canonical NaN is the largest.
__device__ inline int ordered(float x) {
  const int bits = __float_as_int(x);
  return bits ^ (bits >> 31 & 0x7fffffff);
}
__device__ inline float warp_max(float x) {
  const int most = __reduce_max_sync(~0u, ordered(x));
  return __int_as_float(most ^ (most >> 31 & 0x7fffffff));
}

__device__ inline float softcapped(const HeadParams& p, float z) {
  return p.softcap * tanhf(z * p.inverse_softcap);
}

// The reference of a maximum; that of nothing but -inf is 0, so that its columns stay -inf.
__device__ inline float reference_of(float max, float log2_scale) {
  return max == minus_infinity<float>() ? 0.0f : max * log2_scale;
}

// A lane's share of the strips: lane, lane + 32, ...
inline constexpr int kLaneStrips = kMaxStrips / 32;

// The maximum of the strips, and what each of this lane's strips' sums is multiplied by (2^shift)
// to stand for the row's maximum.
struct StripShifts {
  float stored_max, max, reference;
  float shift[kLaneStrips], weight[kLaneStrips];
};
template <class Cap>
__device__ inline StripShifts shifts_of(const float* maxima, int n_strips, float log2_scale,
                                        int lane, const Cap& cap) {
  StripShifts s;
  float mine[kLaneStrips];
  float largest = minus_infinity<float>();
#pragma unroll
  for (int i = 0; i < kLaneStrips; ++i) {
    const int strip = i * 32 + lane;
    mine[i] = strip < n_strips ? maxima[strip] : minus_infinity<float>();
    largest = ullage::cuda::ptx::max_nan(largest, mine[i]);
  }
  s.stored_max = warp_max(largest);
  s.max = cap(s.stored_max);
  s.reference = s.max * log2_scale;
#pragma unroll
  for (int i = 0; i < kLaneStrips; ++i) {
    const bool empty = i * 32 + lane >= n_strips || cap(mine[i]) == minus_infinity<float>();
    s.shift[i] = empty ? 0.0f : cap(mine[i]) * log2_scale - s.reference;
    s.weight[i] = empty ? 0.0f : ullage::cuda::ptx::exp2_approx(s.shift[i]);
  }
  return s;
}
template <class Kind>
__device__ inline StripShifts shifts_of(const HeadParams& p, const float* maxima, int lane) {
  return shifts_of(maxima, p.n_strips, p.log2_scale, lane,
                   [&](float x) { return Kind::kSoftcap ? softcapped(p, x) : x; });
}
__device__ inline StripShifts teacher_shifts_of(const HeadParams& p, const float* maxima,
                                                int lane) {
  return shifts_of(maxima, p.n_strips, p.teacher_log2_scale, lane, [](float x) { return x; });
}

// sum over strips of weight * value(strip, i), in strip order by every warp for itself.
template <class Value>
__device__ inline float fold(const float (&weight)[kLaneStrips], int n_strips, int lane,
                             const Value& value) {
  float x = 0;
#pragma unroll
  for (int i = 0; i < kLaneStrips; ++i) {
    const int strip = i * 32 + lane;
    if (strip < n_strips) x = fmaf(weight[i], value(strip, i), x);
  }
  return warp_sum(x);
}
__device__ inline float fold_sum(const float* partial, int n_strips, int lane) {
  float x = 0;
#pragma unroll
  for (int i = 0; i < kLaneStrips; ++i) {
    if (i * 32 + lane < n_strips) x += partial[i * 32 + lane];
  }
  return warp_sum(x);
}
__device__ inline int fold_min_index(const float* partial, int n_strips, int lane) {
  int x = 0x7fffffff;
#pragma unroll
  for (int i = 0; i < kLaneStrips; ++i) {
    if (i * 32 + lane < n_strips) x = min(x, __float_as_int(partial[i * 32 + lane]));
  }
  return __reduce_min_sync(~0u, x);
}

// A strip kept in shared memory: it starts at a multiple of 16 bytes and is filled up with -inf to
// a multiple of kWarpColumns, so that it is read without a question asked.
template <class T>
struct KeptStrip {
  const T* columns;
  int n;

  __device__ bool holds(int) const { return true; }
  __device__ int capacity(int) const { return kLaneColumns; }  // from a column on
  __device__ Vector<T> load(int column) const {
    Vector<T> v;
#pragma unroll
    for (int i = 0; i < kWordsOf<T>; ++i) {
      v.words[i] = reinterpret_cast<const uint4*>(columns + column)[i];
    }
    return v;
  }
};

// A strip where the caller put it.
template <class T>
struct StreamedStrip {
  const T* columns;
  int n;
  bool aligned;

  __device__ bool holds(int column) const { return column < n; }
  __device__ int capacity(int column) const { return n - column; }
  __device__ Vector<T> load(int column) const {
    return load_vector(columns + column, n - column, aligned);
  }
};

// Calls step(column) for each of this lane's vectors of a strip, in ascending order. kUnroll: how
// many a warp has under way; with few warps on a multiprocessor one hides little of a step's
// latency.
template <int kUnroll, class Strip, class Step>
__device__ inline void for_each_vector(const Strip& strip, int lane, const Step& step) {
#pragma unroll kUnroll
  for (int start = 0; start < strip.n; start += kWarpColumns) {
    const int column = start + lane * kLaneColumns;
    if (strip.holds(column)) step(column);
  }
}

template <class Kind, class Strip>
__device__ inline void load_logits(const HeadParams& p, const Strip& strip, int column,
                                   float (&x)[8]) {
  unpack(strip.load(column), x);
  if constexpr (Kind::kSoftcap) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // The columns past the row stay -inf.
      x[i] = column + i < strip.n ? softcapped(p, x[i]) : minus_infinity<float>();
    }
  }
}

// The maximum of a strip's stored columns; in every lane.
template <class T, class Strip>
__device__ inline float strip_max(const Strip& strip, int lane) {
  RunningMax<T> running;
  for_each_vector<4>(strip, lane, [&](int column) { running.add(strip.load(column)); });
  return warp_max(running.value());
}

// Pairs first: three roundings for eight columns.
__device__ inline float tree_sum(const float (&e)[8]) {
  return ((e[0] + e[1]) + (e[2] + e[3])) + ((e[4] + e[5]) + (e[6] + e[7]));
}

// What one strip brings to the first exchange.
struct StripSums {
  float max = 0, sum = 0, teacher_max = 0, teacher_sum = 0, cross = 0, kl = 0;
};

template <class Kind, class Strip>
__device__ inline StripSums strip_sums(const HeadParams& p, const Strip& student,
                                       const Strip& teacher, int lane) {
  constexpr Family kFamily = Kind::kFamily;
  using T = typename Kind::Element;
  StripSums s;
  s.max = strip_max<T>(student, lane);
  const float reference = reference_of(Kind::kSoftcap ? softcapped(p, s.max) : s.max, p.log2_scale);
  float teacher_reference = 0;
  if constexpr (Kind::kHasTeacher) {
    s.teacher_max = strip_max<T>(teacher, lane);
    teacher_reference = reference_of(s.teacher_max, p.teacher_log2_scale);
  }
  for_each_vector<Kind::kUnroll>(student, lane, [&](int column) {
    float x[8], e[8];
    load_logits<Kind>(p, student, column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      x[i] = fmaf(x[i], p.log2_scale, -reference);
      e[i] = ullage::cuda::ptx::exp2_approx(x[i]);
    }
    s.sum += tree_sum(e);
    if constexpr (Kind::kHasTeacher) {
      float t[8], et[8];
      unpack(teacher.load(column), t);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        t[i] = fmaf(t[i], p.teacher_log2_scale, -teacher_reference);
        et[i] = ullage::cuda::ptx::exp2_approx(t[i]);
      }
      s.teacher_sum += tree_sum(et);
      // Columns without probability are left out: 0 * log 0 is 0.
      if constexpr (kFamily == Family::kForward) {
        if (p.wants_cross) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (et[i] > 0) s.cross = fmaf(et[i], x[i], s.cross);
          }
        }
        if (p.wants_forward_kl) {
#pragma unroll
          for (int i = 0; i < 8; ++i) {
            if (et[i] > 0) s.kl = fmaf(et[i], x[i] - t[i], s.kl);
          }
        }
      } else if constexpr (kFamily == Family::kReverse) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          if (e[i] > 0) s.kl = fmaf(e[i], x[i] - t[i], s.kl);
        }
      }
    }
  });
  s.sum = warp_sum(s.sum);
  if constexpr (Kind::kHasTeacher) {
    s.teacher_sum = warp_sum(s.teacher_sum);
    if constexpr (kFamily == Family::kForward) s.cross = warp_sum(s.cross);
    if constexpr (kFamily != Family::kMixed) s.kl = warp_sum(s.kl);
  }
  return s;
}

// log2 (m / q) for the mixture m = beta p + (1 - beta) q, from log2 (p / q): 0 exactly where they
// are equal. Ratios beyond 2^126 stand for infinity; q is then nothing beside p.
__device__ inline float log2_mix_over_student(float log2_ratio, float beta) {
  const float ratio = ullage::cuda::ptx::exp2_approx(fminf(log2_ratio, 126.0f));
  return ullage::cuda::ptx::log2_approx(fmaf(beta, ratio - 1.0f, 1.0f));
}

// The divergences of one strip of normalised rows.
struct MixedSums {
  float cross = 0, forward = 0, reverse = 0, teacher_from_mix = 0, student_from_mix = 0;
};

template <class Kind, class Strip>
__device__ inline MixedSums strip_mixed_sums(const HeadParams& p, const Strip& student,
                                             const Strip& teacher, const RowSums& row, int lane) {
  MixedSums s;
  for_each_vector<1>(student, lane, [&](int column) {
    float x[8], t[8];
    load_logits<Kind>(p, student, column, x);
    unpack(teacher.load(column), t);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float log_q = fmaf(x[i], p.log2_scale, -row.reference) - row.log2_sum;
      const float log_p =
          fmaf(t[i], p.teacher_log2_scale, -row.teacher_reference) - row.teacher_log2_sum;
      const float q = ullage::cuda::ptx::exp2_approx(log_q);
      const float pr = ullage::cuda::ptx::exp2_approx(log_p);
      const float ratio = fminf(log_p - log_q, 126.0f);
      const float mix = log2_mix_over_student(ratio, p.mix_beta);
      if (pr > 0) {
        s.cross = fmaf(pr, log_q, s.cross);
        s.forward = fmaf(pr, log_p - log_q, s.forward);
        s.teacher_from_mix = fmaf(pr, ratio - mix, s.teacher_from_mix);
      }
      if (q > 0) {
        s.reverse = fmaf(q, log_q - log_p, s.reverse);
        s.student_from_mix = fmaf(q, -mix, s.student_from_mix);
      }
    }
  });
  s.cross = warp_sum(s.cross);
  s.forward = warp_sum(s.forward);
  s.reverse = warp_sum(s.reverse);
  s.teacher_from_mix = warp_sum(s.teacher_from_mix);
  s.student_from_mix = warp_sum(s.student_from_mix);
  return s;
}

// Entropy, arg max and label smoothing: asked for by few, so they take a pass of their own.
struct ExtraSums {
  float entropy = 0, smooth = 0;
  int argmax = 0x7fffffff;
};

template <class Kind, class Strip>
__device__ inline ExtraSums strip_extra_sums(const HeadParams& p, const Strip& student,
                                             int64_t first_column, const RowSums& row, int lane) {
  ExtraSums s;
  for_each_vector<1>(student, lane, [&](int column) {
    float x[8];
    load_logits<Kind>(p, student, column, x);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (x[i] == row.max) s.argmax = min(s.argmax, static_cast<int>(first_column) + column + i);
      x[i] = fmaf(x[i], p.log2_scale, -row.reference);
      const float e = ullage::cuda::ptx::exp2_approx(x[i]);
      if (e > 0) s.entropy = fmaf(e, x[i], s.entropy);
    }
    if (p.wants_smoothing) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        if (column + i >= student.n) continue;
        const float w = float_at(p.class_weights, first_column + column + i, 1);
        if (w != 0) s.smooth = fmaf(w, x[i], s.smooth);
      }
    }
  });
  s.entropy = warp_sum(s.entropy);
  s.smooth = warp_sum(s.smooth);
  s.argmax = __reduce_min_sync(~0u, s.argmax);
  return s;
}

}  // namespace ullage::lossk::cuda
