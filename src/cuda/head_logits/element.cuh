// Eight adjacent columns of a row: as stored, and as float32.
//
// `aligned`: the address is a multiple of 16 bytes, and one or two 16-byte accesses do; otherwise
// the columns are accessed one at a time, slower and to the same bits. Columns at and past `valid`
// read as -inf and are never accessed.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/head_logits/params.h"
#include "cuda/ptx.cuh"

namespace ullage::lossk::cuda {

static_assert(kLaneColumns == 8, "Vector holds eight columns");

// float32: two 16-byte words; 16-bit types: one.
template <class T>
inline constexpr int kWordsOf = kLaneColumns * sizeof(T) / 16;

template <class T>
struct Vector {
  uint4 words[kWordsOf<T>];
};

// Calls act<n>(), n = 0 to 3.
template <class Act>
__device__ inline void with_constant(int n, const Act& act) {
  switch (n) {
    case 0:
      return act.template operator()<0>();
    case 1:
      return act.template operator()<1>();
    case 2:
      return act.template operator()<2>();
    default:
      return act.template operator()<3>();
  }
}

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline float to_float(__half value) { return __half2float(value); }

template <class T>
__device__ T from_float(float value);
template <>
__device__ inline float from_float<float>(float value) {
  return value;
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float value) {
  return __float2bfloat16_rn(value);
}
template <>
__device__ inline __half from_float<__half>(float value) {
  return __float2half_rn(value);
}

template <class T>
__device__ T minus_infinity();
template <>
__device__ inline float minus_infinity<float>() {
  return __int_as_float(0xff800000);
}
template <>
__device__ inline __nv_bfloat16 minus_infinity<__nv_bfloat16>() {
  return __ushort_as_bfloat16(0xff80);
}
template <>
__device__ inline __half minus_infinity<__half>() {
  return __ushort_as_half(0xfc00);
}

__device__ inline uint32_t bits_of(float value) { return __float_as_uint(value); }
__device__ inline uint32_t bits_of(__nv_bfloat16 value) { return __bfloat16_as_ushort(value); }
__device__ inline uint32_t bits_of(__half value) { return __half_as_ushort(value); }

template <class T>
__device__ inline bool is_aligned(const T* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}
template <class T>
inline constexpr int kPerWord = 16 / sizeof(T);
// How many columns into a 16-byte word a column lies, and how many a next word begins after it.
template <class T>
__device__ inline int shift_of(const T* column) {
  return static_cast<int>(reinterpret_cast<uintptr_t>(column) / sizeof(T) % kPerWord<T>);
}
template <class T>
__device__ inline int columns_to_word(const T* column) {
  return -shift_of(column) & (kPerWord<T> - 1);
}

template <class T>
__device__ inline Vector<T> load_vector(const T* from, int valid, bool aligned) {
  constexpr int kWords = kWordsOf<T>;
  constexpr int kPerPart = 4 / sizeof(T);  // columns in 32 bits
  Vector<T> v;
  if (aligned && valid >= kLaneColumns) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) v.words[i] = reinterpret_cast<const uint4*>(from)[i];
  } else {
    uint32_t parts[4 * kWords];
#pragma unroll
    for (int i = 0; i < 4 * kWords; ++i) {
      parts[i] = 0;
#pragma unroll
      for (int j = 0; j < kPerPart; ++j) {
        const int column = i * kPerPart + j;
        const T value = column < valid ? from[column] : minus_infinity<T>();
        parts[i] |= bits_of(value) << (j * 16);
      }
    }
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      v.words[i] = make_uint4(parts[4 * i], parts[4 * i + 1], parts[4 * i + 2], parts[4 * i + 3]);
    }
  }
  return v;
}

// Those of eight columns from `column` on whose 16-byte words begin before `end`; `from` begins
// one.
template <class T>
__device__ inline Vector<T> words_of(const T* from, int column, int end) {
  Vector<T> v = {};
#pragma unroll
  for (int w = 0; w < kWordsOf<T>; ++w) {
    if (column + w * kPerWord<T> < end) {
      v.words[w] = reinterpret_cast<const uint4*>(from + column)[w];
    }
  }
  return v;
}

// What __byte_perm takes of two adjacent 32-bit parts: the first, or, where `shift` columns end in
// the middle of one, the second half of the first and the first half of the second.
template <class T>
__device__ inline unsigned order_of_halves(int shift) {
  return sizeof(T) == 2 && shift & 1 ? 0x5432 : 0x3210;
}

// Eight columns from shared memory that start kParts 32-bit parts into a 16-byte word at `word`,
// and `order` (order_of_halves) into the next part.
template <int kParts, class T>
__device__ Vector<T> load_shifted(const T* word, unsigned order) {
  static_assert(kParts < 4);
  uint32_t parts[4 * (kWordsOf<T> + 1)];
#pragma unroll
  for (int i = 0; i <= kWordsOf<T>; ++i) {
    const uint4 four = reinterpret_cast<const uint4*>(word)[i];
    parts[4 * i] = four.x, parts[4 * i + 1] = four.y;
    parts[4 * i + 2] = four.z, parts[4 * i + 3] = four.w;
  }
  Vector<T> v;
  const auto part = [&](int i) {
    if constexpr (sizeof(T) == 4) return parts[kParts + i];
    return __byte_perm(parts[kParts + i], parts[kParts + i + 1], order);
  };
#pragma unroll
  for (int i = 0; i < kWordsOf<T>; ++i) {
    v.words[i] = make_uint4(part(4 * i), part(4 * i + 1), part(4 * i + 2), part(4 * i + 3));
  }
  return v;
}

// The same where neither is known when it is compiled: `shift` columns.
template <class T>
__device__ inline Vector<T> load_shifted(const T* word, int shift) {
  constexpr int kParts = 4 * kWordsOf<T>;  // 32-bit parts of a vector
  constexpr int kPerPart = 4 / sizeof(T);
  uint4 words[kWordsOf<T> + 1];
#pragma unroll
  for (int i = 0; i <= kWordsOf<T>; ++i) words[i] = reinterpret_cast<const uint4*>(word)[i];
  uint32_t parts[kParts + 4];
#pragma unroll
  for (int i = 0; i <= kWordsOf<T>; ++i) {
    parts[4 * i] = words[i].x, parts[4 * i + 1] = words[i].y;
    parts[4 * i + 2] = words[i].z, parts[4 * i + 3] = words[i].w;
  }
  // Shift by 2, by 1 and by half a part: what is moved is selected, so parts stay in registers.
  const int by = shift / kPerPart;
#pragma unroll
  for (int i = 0; i + 2 < kParts + 4; ++i) parts[i] = by & 2 ? parts[i + 2] : parts[i];
#pragma unroll
  for (int i = 0; i < kParts + 1; ++i) parts[i] = by & 1 ? parts[i + 1] : parts[i];
  if constexpr (kPerPart == 2) {
    const unsigned order = order_of_halves<T>(shift);
#pragma unroll
    for (int i = 0; i < kParts; ++i) parts[i] = __byte_perm(parts[i], parts[i + 1], order);
  }
  Vector<T> v;
#pragma unroll
  for (int i = 0; i < kWordsOf<T>; ++i) {
    v.words[i] = make_uint4(parts[4 * i], parts[4 * i + 1], parts[4 * i + 2], parts[4 * i + 3]);
  }
  return v;
}

// -inf from column `valid` on.
template <class T>
__device__ inline void blank_from(Vector<T>& v, int valid) {
  constexpr int kPerPart = 4 / sizeof(T);
  const uint32_t infinity = bits_of(minus_infinity<T>());
#pragma unroll
  for (int i = 0; i < kWordsOf<T>; ++i) {
    uint32_t parts[4] = {v.words[i].x, v.words[i].y, v.words[i].z, v.words[i].w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = (4 * i + j) * kPerPart;
      if (column >= valid) {
        parts[j] = kPerPart == 2 ? infinity * 0x10001u : infinity;
      } else if (kPerPart == 2 && column + 1 == valid) {
        parts[j] = (parts[j] & 0xffffu) | infinity << 16;
      }
    }
    v.words[i] = make_uint4(parts[0], parts[1], parts[2], parts[3]);
  }
}

__device__ inline void unpack(const Vector<float>& v, float (&x)[8]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[4 * i] = __uint_as_float(v.words[i].x), x[4 * i + 1] = __uint_as_float(v.words[i].y);
    x[4 * i + 2] = __uint_as_float(v.words[i].z), x[4 * i + 3] = __uint_as_float(v.words[i].w);
  }
}
// A bf16 is the upper half of a float32.
__device__ inline void unpack(const Vector<__nv_bfloat16>& v, float (&x)[8]) {
  const uint32_t pairs[4] = {v.words[0].x, v.words[0].y, v.words[0].z, v.words[0].w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __uint_as_float(pairs[i] << 16);
    x[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
  }
}
__device__ inline void unpack(const Vector<__half>& v, float (&x)[8]) {
  const uint32_t pairs[4] = {v.words[0].x, v.words[0].y, v.words[0].z, v.words[0].w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(pairs[i])));
    x[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(pairs[i] >> 16)));
  }
}

// The running maximum of each of a vector's words; NaN stays.
template <class T>
struct RunningMax;

template <>
struct RunningMax<float> {
  float m = minus_infinity<float>();
  __device__ void add(const Vector<float>& v) {
    using ullage::cuda::ptx::max_nan;
    float x[8];
    unpack(v, x);
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
#pragma unroll
      for (int i = 0; i < step; ++i) x[i] = max_nan(x[i], x[i + step]);
    }
    m = max_nan(m, x[0]);
  }
  __device__ void add(float x) { m = ullage::cuda::ptx::max_nan(m, x); }
  __device__ float value() const { return m; }
};
template <>
struct RunningMax<__nv_bfloat16> {
  __nv_bfloat162 m = __bfloat162bfloat162(minus_infinity<__nv_bfloat16>());
  __device__ void add(const Vector<__nv_bfloat16>& v) {
    __nv_bfloat162 pairs[4];
    memcpy(pairs, &v.words[0], 16);
    m = __hmax2_nan(m,
                    __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3])));
  }
  __device__ void add(__nv_bfloat16 x) { m = __hmax2_nan(m, __nv_bfloat162{x, x}); }
  __device__ float value() const {
    return ullage::cuda::ptx::max_nan(__low2float(m), __high2float(m));
  }
};
template <>
struct RunningMax<__half> {
  __half2 m = __half2half2(minus_infinity<__half>());
  __device__ void add(const Vector<__half>& v) {
    __half2 pairs[4];
    memcpy(pairs, &v.words[0], 16);
    m = __hmax2_nan(m,
                    __hmax2_nan(__hmax2_nan(pairs[0], pairs[1]), __hmax2_nan(pairs[2], pairs[3])));
  }
  __device__ void add(__half x) { m = __hmax2_nan(m, __half2{x, x}); }
  __device__ float value() const {
    return ullage::cuda::ptx::max_nan(__low2float(m), __high2float(m));
  }
};

// Rounds eight values once, to nearest, and stores those before `valid`.
__device__ inline void store_vector(float* to, const float (&g)[8], int valid, bool aligned) {
  if (aligned && valid >= 8) {
#pragma unroll
    for (int i = 0; i < 8; i += 4) {
      ullage::cuda::ptx::store_words(
          to + i, make_uint4(__float_as_uint(g[i]), __float_as_uint(g[i + 1]),
                             __float_as_uint(g[i + 2]), __float_as_uint(g[i + 3])));
    }
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < valid) to[i] = g[i];
    }
  }
}

__device__ inline uint32_t pack_pair(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}
__device__ inline uint32_t pack_pair(float low, float high, __half) {
  const __half2 pair = __floats2half2_rn(low, high);
  uint32_t bits;
  memcpy(&bits, &pair, 4);
  return bits;
}

template <class T>
__device__ inline uint4 pack_word(const float (&g)[8]) {
  static_assert(sizeof(T) == 2);
  return make_uint4(pack_pair(g[0], g[1], T{}), pack_pair(g[2], g[3], T{}),
                    pack_pair(g[4], g[5], T{}), pack_pair(g[6], g[7], T{}));
}

template <class T>
__device__ inline void store_vector(T* to, const float (&g)[8], int valid, bool aligned) {
  if (aligned && valid >= 8) {
    ullage::cuda::ptx::store_words(to, pack_word<T>(g));
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      if (i < valid) to[i] = from_float<T>(g[i]);
    }
  }
}

// Eight columns of each lane of a warp, whose lanes' addresses follow one another, each the first
// of a 16-byte word: in stores that fill 32-byte sectors, where the words do. `columns`: left from
// `to` on, in whole words. kBranches: where so many values are held that none may wait for its
// store beside the next ones.
template <bool kBranches = false, class T>
__device__ inline void store_whole(T* to, const float (&g)[8], int columns, int lane) {
  if constexpr (sizeof(T) == 2 && kBranches) {
    if (columns > 0) store_vector(to, g, kLaneColumns, true);
  } else if constexpr (sizeof(T) == 2) {
    ullage::cuda::ptx::store_words_if(columns > 0, to, pack_word<T>(g));
  } else {
    // A lane has a sector in two words: first a pair of lanes stores the even one's, then the odd
    // one's.
    const bool odd = lane % 2 != 0;
    uint32_t other[4], first[4], second[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      other[i] = __float_as_uint(__shfl_xor_sync(~0u, odd ? g[i] : g[4 + i], 1));
      first[i] = odd ? other[i] : __float_as_uint(g[i]);
      second[i] = odd ? __float_as_uint(g[4 + i]) : other[i];
    }
    const int at = odd ? -4 : 0, then = odd ? 4 : 8;
    ullage::cuda::ptx::store_words_if(at < columns, to + at,
                                      make_uint4(first[0], first[1], first[2], first[3]));
    ullage::cuda::ptx::store_words_if(then < columns, to + then,
                                      make_uint4(second[0], second[1], second[2], second[3]));
  }
}

}  // namespace ullage::lossk::cuda
