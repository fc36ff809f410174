// Reads a matrix whose rows lie along k, as vectors whose lanes are rows: for each k in ascending
// order, one vector with element k of Lanes(d) rows. That is a transpose in registers; it lets a
// weight [out][in] be multiplied with the outputs in the lanes, so that no sum is split over lanes.
#if defined(ULLAGE_CPU_COLUMNS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_COLUMNS_INL_H_
#undef ULLAGE_CPU_COLUMNS_INL_H_
#else
#define ULLAGE_CPU_COLUMNS_INL_H_
#endif

#include <cstddef>
#include <cstring>
#include <utility>

#include "cpu/dequant.h"
#include "cpu/element.h"
#include "cpu/lanes-inl.h"
#include "cpu/product.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// Element k of a row.
template <class T>
HWY_INLINE Compute<T> element_at(const T* row, int64_t k) {
  return widen(row[k]);
}
HWY_INLINE float element_at(const Q8_0Block* row, int64_t k) { return decode_element(row, k); }
HWY_INLINE float element_at(const Q4_0Block* row, int64_t k) { return decode_element(row, k); }
HWY_INLINE float element_at(const Q4_1Block* row, int64_t k) { return decode_element(row, k); }

template <class T>
inline constexpr bool kIsBlock = std::is_class_v<T> && sizeof(T) > 2;

// Row `row` of a matrix with `stride` elements between rows.
template <class T>
HWY_INLINE const T* row_at(const T* base, int64_t row, int64_t stride) {
  constexpr int64_t kElements = kIsBlock<T> ? kQuantBlock : 1;
  return base + row * (stride / kElements);
}

#if HWY_TARGET != HWY_SCALAR

// Transposes 4x4 words (2x2 double words) inside each 128-bit block of v[0..3] (v[0..1]): block b
// of v[j] becomes word P * b + j of each of the P rows.
template <class D, size_t kWord = sizeof(hn::TFromD<D>)>
HWY_INLINE void transpose_in_blocks(D d, hn::Vec<D>* v) {
  if constexpr (kWord == 8) {
    const auto t0 = hn::InterleaveLower(d, v[0], v[1]);
    v[1] = hn::InterleaveUpper(d, v[0], v[1]);
    v[0] = t0;
  } else {
    const hn::RepartitionToWide<D> wide;
    const auto t0 = hn::BitCast(wide, hn::InterleaveLower(d, v[0], v[1]));
    const auto t1 = hn::BitCast(wide, hn::InterleaveUpper(d, v[0], v[1]));
    const auto t2 = hn::BitCast(wide, hn::InterleaveLower(d, v[2], v[3]));
    const auto t3 = hn::BitCast(wide, hn::InterleaveUpper(d, v[2], v[3]));
    v[0] = hn::BitCast(d, hn::InterleaveLower(wide, t0, t2));
    v[1] = hn::BitCast(d, hn::InterleaveUpper(wide, t0, t2));
    v[2] = hn::BitCast(d, hn::InterleaveLower(wide, t1, t3));
    v[3] = hn::BitCast(d, hn::InterleaveUpper(wide, t1, t3));
  }
}

// v[i] holds words [0, N) of row i; on return v[j] holds word j of rows [0, N), N = Lanes(d).
template <class D>
HWY_INLINE void transpose_square(D d, hn::Vec<D>* v) {
  using V = hn::Vec<D>;
  constexpr int64_t kLanes = kLanesOf<D>;
  constexpr int64_t kPerBlock = 16 / static_cast<int64_t>(sizeof(hn::TFromD<D>));
  constexpr int64_t kBlocks = kLanes / kPerBlock;
  HWY_UNROLL(4)
  for (int64_t g = 0; g < kBlocks; ++g) transpose_in_blocks(d, v + g * kPerBlock);
  // Now block b of v[P * g + j] is word P * b + j of rows [P * g, P * g + P): transpose the blocks
  // of v[P * g + j] over g, for each j.
  if constexpr (kBlocks == 2) {
    HWY_UNROLL(4)
    for (int64_t j = 0; j < kPerBlock; ++j) {
      const V low = v[j], high = v[kPerBlock + j];
      v[j] = hn::ConcatLowerLower(d, high, low);
      v[kPerBlock + j] = hn::ConcatUpperUpper(d, high, low);
    }
  } else if constexpr (kBlocks == 4) {
    HWY_UNROLL(4)
    for (int64_t j = 0; j < kPerBlock; ++j) {
      V* const w = v + j;
      const V a = w[0], b = w[kPerBlock], c = w[2 * kPerBlock], e = w[3 * kPerBlock];
      const V a01c01 = hn::ConcatLowerLower(d, c, a), a23c23 = hn::ConcatUpperUpper(d, c, a);
      const V b01e01 = hn::ConcatLowerLower(d, e, b), b23e23 = hn::ConcatUpperUpper(d, e, b);
      w[0] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b01e01), a01c01);
      w[kPerBlock] = hn::OddEvenBlocks(b01e01, hn::SwapAdjacentBlocks(a01c01));
      w[2 * kPerBlock] = hn::OddEvenBlocks(hn::SwapAdjacentBlocks(b23e23), a23c23);
      w[3 * kPerBlock] = hn::OddEvenBlocks(b23e23, hn::SwapAdjacentBlocks(a23c23));
    }
  }
}

// Block b is the 16 bytes at rows[b * step] + offset.
template <class D, class T>
HWY_INLINE hn::Vec<D> load_blocks(D d, const T* const* rows, int64_t step, int64_t offset) {
  if constexpr (kLanesOf<D> * sizeof(hn::TFromD<D>) == 16) {
    return hn::LoadU(d, reinterpret_cast<const hn::TFromD<D>*>(
                            reinterpret_cast<const uint8_t*>(rows[0]) + offset));
  } else {
    const hn::Half<D> half;
    const int64_t upper = kLanesOf<decltype(half)> / 4 * step;
    return hn::Combine(d, load_blocks(half, rows + upper, step, offset),
                       load_blocks(half, rows, step, offset));
  }
}

// A tile is kStep consecutive k of kGroups vectors of rows. read() calls sink(group, k + i, vector)
// for i in [0, kStep), ascending for each group; and, because a matrix is walked row group by row
// group, prefetches the same k of the rows `ahead` bytes further on.
template <class D, class T, int64_t kGroups>
struct SquareTile {
  static constexpr int64_t kLanes = kLanesOf<D>;
  using Word = std::conditional_t<sizeof(T) == 8, uint64_t, uint32_t>;
  static constexpr int64_t kPerWord = sizeof(Word) / sizeof(T);
  static constexpr int64_t kStep = kLanes * kPerWord;  // one cache line of each row with AVX-512

  HWY_INLINE SquareTile(const T* const* /*rows*/, int64_t /*k0*/, int64_t /*count*/) {}

  template <class Sink>
  HWY_INLINE void read(D d, const T* const* rows, int64_t k, int64_t ahead, Sink& sink) const {
    const hn::Rebind<Word, D> dw;
    HWY_UNROLL(2)
    for (int64_t g = 0; g < kGroups; ++g) {
      hn::Vec<decltype(dw)> w[kLanes];
      HWY_UNROLL(16)
      for (int64_t i = 0; i < kLanes; ++i) {
        const T* const from = rows[g * kLanes + i] + k;
        w[i] = hn::LoadU(dw, reinterpret_cast<const Word*>(from));
        prefetch_to_l2(reinterpret_cast<const char*>(from) + ahead);
      }
      transpose_square(dw, w);
      HWY_UNROLL(16)
      for (int64_t i = 0; i < kLanes; ++i) {
        if constexpr (std::is_same_v<T, BF16>) {
          sink(g, k + 2 * i, hn::BitCast(d, hn::ShiftLeft<16>(w[i])));
          sink(g, k + 2 * i + 1, hn::BitCast(d, hn::And(w[i], hn::Set(dw, 0xffff0000u))));
        } else if constexpr (std::is_same_v<T, F16>) {
          sink(g, k + 2 * i, widen_f16(d, w[i]));
          sink(g, k + 2 * i + 1, widen_f16(d, hn::ShiftRight<16>(w[i])));
        } else {
          sink(g, k + i, hn::BitCast(d, w[i]));
        }
      }
    }
  }

  // The float16 in the low half of each word.
  template <class W>
  static HWY_INLINE hn::Vec<D> widen_f16(D d, W words) {
#if ULLAGE_CPU_EMULATES_F16
    HWY_ALIGN uint32_t bits[kLanes];
    HWY_ALIGN float lanes[kLanes];
    hn::Store(words, hn::Rebind<uint32_t, D>(), bits);
    for (int64_t i = 0; i < kLanes; ++i) lanes[i] = F16{static_cast<uint16_t>(bits[i])}.to_float();
    return hn::Load(d, lanes);
#else
    const hn::Rebind<hwy::float16_t, D> d16;
    const hn::Rebind<uint16_t, D> du16;
    return hn::PromoteTo(d, hn::BitCast(d16, hn::TruncateTo(du16, words)));
#endif
  }
};

// Sixteen adjacent bytes of each row, transposed: w[j] holds word j of rows [0, N).
template <class D, class T>
HWY_INLINE void load_words(D d, const T* const* rows, int64_t offset, hn::Vec<D>* w) {
  HWY_UNROLL(4)
  for (int64_t r = 0; r < 4; ++r) w[r] = load_blocks(d, rows + r, 4, offset);
  transpose_in_blocks(d, w);
}

// A quantised tile is one block of each row. A sum waits 4 cycles for its last multiply-add, so the
// groups take turns at every k. The scales of a whole block of k are collected first: a vector load
// right behind the narrow stores that filled it would wait for them to leave the store queue.
template <class D, class Block, int64_t kGroups>
struct BlockTile {
  static constexpr int64_t kLanes = kLanesOf<D>;
  static constexpr bool kHasMinimum = std::is_same_v<Block, Q4_1Block>;
  static constexpr int64_t kMaxBlocks = kProductKBlock / kQuantBlock;
  static constexpr int64_t kStep = kQuantBlock;
  static constexpr bool kIsByte = std::is_same_v<Block, Q8_0Block>;
  using V = hn::Vec<D>;
  using DI = hn::Rebind<int32_t, D>;

  // Byte kByte of each word, or its low or (kHigh) high half, widened as decode_element does: the
  // bits go to the top of a float's mantissa under a constant exponent, which is one shift and one
  // AndOr.
  template <int kByte, bool kHigh>
  static HWY_INLINE V widen_part(D d, hn::Vec<DI> words, V scale, V offset) {
    const DI di;
    constexpr int kBits = kIsByte ? 8 : 4;
    constexpr int kFrom = 8 * kByte + (kHigh && !kIsByte ? 4 : 0), kTo = 23 - kBits;
    const auto shifted = [&] {
      if constexpr (kFrom < kTo)
        return hn::ShiftLeft<kTo - kFrom>(words);
      else
        return hn::ShiftRight<kFrom - kTo>(words);
    }();
    constexpr int32_t kMask = ((1 << kBits) - 1) << kTo;
    const auto exponent = hn::Set(di, (127 + kBits) << 23);  // 2^kBits
    const V raised = hn::BitCast(d, hn::OrAnd(exponent, shifted, hn::Set(di, kMask)));
    if constexpr (std::is_same_v<Block, Q4_1Block>) {
      return fma(d, scale, hn::Sub(raised, hn::Set(d, 16.0f)), offset);
    } else {
      return fma(d, scale, raised, offset);
    }
  }

  // Four words of each group: sixteen elements from k on.
  template <bool kHigh, class Sink>
  static HWY_INLINE void emit(D d, const hn::Vec<DI> (&w)[kGroups][4], const V* scale,
                              const V* offset, int64_t k, Sink& sink) {
    HWY_UNROLL(4)
    for (int64_t j = 0; j < 4; ++j) {
      [&]<int... kByte>(std::integer_sequence<int, kByte...>) HWY_ATTR {
        (emit_byte<kByte, kHigh>(d, w, j, scale, offset, k + 4 * j, sink), ...);
      }(std::make_integer_sequence<int, 4>());
    }
  }
  template <int kByte, bool kHigh, class Sink>
  static HWY_INLINE void emit_byte(D d, const hn::Vec<DI> (&w)[kGroups][4], int64_t j,
                                   const V* scale, const V* offset, int64_t k, Sink& sink) {
    HWY_UNROLL(2)
    for (int64_t g = 0; g < kGroups; ++g) {
      sink(g, k + kByte, widen_part<kByte, kHigh>(d, w[g][j], scale[g], offset[g]));
    }
  }

  HWY_INLINE BlockTile(const Block* const* rows, int64_t k0, int64_t count)
      : first_(k0 / kQuantBlock) {
    for (int64_t i = 0; i < kGroups * kLanes; ++i) {
      for (int64_t block = 0; block < count / kQuantBlock; ++block) {
        const Block& from = rows[i][first_ + block];
        scales_[block][i] = from.scale;
        if constexpr (kHasMinimum) minimums_[block][i] = from.minimum;
      }
    }
  }

  template <class Sink>
  HWY_INLINE void read(D d, const Block* const* rows, int64_t k, int64_t ahead, Sink& sink) const {
    const DI di;
    const int64_t index = k / kQuantBlock - first_;
    const int64_t block = k / kQuantBlock * static_cast<int64_t>(sizeof(Block));
    for (int64_t i = 0; i < kGroups * kLanes; ++i) {
      prefetch_to_l2(reinterpret_cast<const char*>(rows[i]) + block + ahead);
    }
    V scale[kGroups], offset[kGroups];
    hn::Vec<DI> w[kGroups][4];
    // Signed bytes become unsigned ones, 128 larger.
    const auto load = [&](int64_t at) HWY_ATTR {
      HWY_UNROLL(2)
      for (int64_t g = 0; g < kGroups; ++g) {
        load_words(di, rows + g * kLanes, block + at, w[g]);
        if constexpr (kIsByte) {
          HWY_UNROLL(4)
          for (int64_t j = 0; j < 4; ++j) {
            w[g][j] = hn::Xor(w[g][j], hn::Set(di, static_cast<int32_t>(0x80808080u)));
          }
        }
      }
    };
    HWY_UNROLL(2)
    for (int64_t g = 0; g < kGroups; ++g) {
      scale[g] = load_lanes(d, scales_[index] + g * kLanes);
      if constexpr (kHasMinimum) {
        offset[g] = load_lanes(d, minimums_[index] + g * kLanes);
      } else {
        offset[g] = hn::Mul(scale[g], hn::Set(d, kIsByte ? -384.0f : -24.0f));
      }
    }
    load(offsetof(Block, q));
    emit<false>(d, w, scale, offset, k, sink);
    if constexpr (kIsByte) load(offsetof(Block, q) + 16);
    emit<true>(d, w, scale, offset, k + 16, sink);
  }

 private:
  int64_t first_;  // block of the row
  F16 scales_[kMaxBlocks][kGroups * kLanes];
  F16 minimums_[kHasMinimum ? kMaxBlocks : 1][kGroups * kLanes];
};
template <class D, class T, int64_t kGroups>
using ColumnTile =
    std::conditional_t<kIsBlock<T>, BlockTile<D, T, kGroups>, SquareTile<D, T, kGroups>>;

#endif  // HWY_TARGET != HWY_SCALAR

// sink(g, k, vector) for each k in [k0, k0 + count), at most kProductKBlock of them, ascending:
// lane l is element k of row g * Lanes(d) + l of the matrix at `base`. Rows from `valid` on repeat
// the last valid one; the caller drops them.
template <int64_t kGroups, class D, class T, class Sink>
HWY_INLINE void read_columns(D d, const T* base, int64_t stride, int64_t valid, int64_t k0,
                             int64_t count, Sink& sink) {
  constexpr int64_t kLanes = kLanesOf<D>, kRows = kGroups * kLanes;
  const T* rows[kRows];
  for (int64_t i = 0; i < kRows; ++i) rows[i] = row_at(base, std::min(i, valid - 1), stride);
  int64_t k = k0;
#if HWY_TARGET != HWY_SCALAR
  using Tile = ColumnTile<D, T, kGroups>;
  const Tile tile(rows, k0, count);
  const int64_t ahead = reinterpret_cast<const char*>(row_at(base, kRows, stride)) -
                        reinterpret_cast<const char*>(base);
  for (; k + Tile::kStep <= k0 + count; k += Tile::kStep) {
    tile.read(d, rows, k, ahead, sink);
  }
#endif
  for (; k < k0 + count; ++k) {
    for (int64_t g = 0; g < kGroups; ++g) {
      HWY_ALIGN hn::TFromD<D> lanes[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) lanes[i] = element_at(rows[g * kLanes + i], k);
      sink(g, k, hn::Load(d, lanes));
    }
  }
}

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
