// The register tile of a product: the one loop where its multiply-adds are. Included once per
// Highway target.
#if defined(ULLAGE_CPU_TILE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef ULLAGE_CPU_TILE_INL_H_
#undef ULLAGE_CPU_TILE_INL_H_
#else
#define ULLAGE_CPU_TILE_INL_H_
#endif

#include <array>
#include <cstddef>
#include <utility>

#include "cpu/lanes-inl.h"

HWY_BEFORE_NAMESPACE();
namespace ullage::cpu::HWY_NAMESPACE {

// The register tile: kTileRows rows of C x kTileVecs vectors of its columns. A multiply-add takes 4
// cycles and one (512 bits) starts every cycle, so at least 4 sums must be in flight; loads per
// multiply-add fall with both sides. With 32 registers: 8 x 3 sums + 3 of B + 1 of A = 28. With 16:
// 4 x 3 + 3 + 1 = 16.
#if HWY_TARGET == HWY_AVX3 || HWY_TARGET == HWY_AVX3_DL || HWY_TARGET == HWY_NEON
inline constexpr int64_t kTileRows = 8;
#else
inline constexpr int64_t kTileRows = 4;
#endif
inline constexpr int64_t kTileVecs = 3;

// How a tile's sums meet C.
enum class Meet : uint8_t {
  kStore,     // the sum starts at 0 and is stored
  kAdd,       // the sum starts at 0 and is added to C
  kContinue,  // the sum starts at C and is stored
};

// Cache lines that will be wanted: one every `step` bytes from `at` on; a tile asks for one at each
// k.
struct Ahead {
  const char* at = nullptr;
  int64_t step = 0;
};

// C [kRows][kVecs vectors] meets sum over k < depth of A(row, k) * B(k, vector). A is packed
// [depth][a_step], B is [depth][b_step].
template <class D, int64_t kRows, int64_t kVecs, class T = hn::TFromD<D>>
void multiply_tile(const T* HWY_RESTRICT a, int64_t a_step, const T* HWY_RESTRICT b, int64_t b_step,
                   int64_t depth, T* HWY_RESTRICT c, int64_t c_stride, Meet meet, Ahead ahead) {
  const D d;
  using V = hn::Vec<D>;
  constexpr int64_t kLanes = kLanesOf<D>;
  constexpr int64_t kRowsAhead = 8;  // packed panels follow one another: this runs on into the next
  // A panel of A is met cold, from the last-level cache, by its first tile: some 800 cycles ahead.
  // Without it d_hidden of (256, 576, 49152) ran at 0.76 instead of 0.95 of OpenBLAS (Zen 4).
  constexpr int64_t kRowsAheadOfA = 32;
  V sum[kRows][kVecs];
  HWY_UNROLL(8)
  for (int64_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(3)
    for (int64_t v = 0; v < kVecs; ++v) {
      if (meet == Meet::kContinue) {
        sum[r][v] = hn::LoadU(d, c + r * c_stride + v * kLanes);
      } else {
        hwy::Prefetch(c + r * c_stride + v * kLanes);
        sum[r][v] = hn::Zero(d);
      }
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    hwy::Prefetch(a + kRowsAheadOfA * a_step);
    prefetch_to_l2(ahead.at);
    ahead.at += ahead.step;
    V columns[kVecs];
    HWY_UNROLL(3)
    for (int64_t v = 0; v < kVecs; ++v) {
      columns[v] = hn::LoadU(d, b + v * kLanes);
      hwy::Prefetch(b + kRowsAhead * b_step + v * kLanes);
    }
    HWY_UNROLL(8)
    for (int64_t r = 0; r < kRows; ++r) {
      const V row = hn::Set(d, a[r]);
      HWY_UNROLL(3)
      for (int64_t v = 0; v < kVecs; ++v) sum[r][v] = fma(d, row, columns[v], sum[r][v]);
    }
    a += a_step;
    b += b_step;
  }
  HWY_UNROLL(8)
  for (int64_t r = 0; r < kRows; ++r) {
    HWY_UNROLL(3)
    for (int64_t v = 0; v < kVecs; ++v) {
      T* const at = c + r * c_stride + v * kLanes;
      hn::StoreU(meet == Meet::kAdd ? hn::Add(hn::LoadU(d, at), sum[r][v]) : sum[r][v], d, at);
    }
  }
}

template <class T>
using TileFunction = void (*)(const T*, int64_t, const T*, int64_t, int64_t, T*, int64_t, Meet,
                              Ahead);

// kTiles[(rows - 1) * kTileVecs + vecs - 1].
template <class D, class T, size_t... kIndex>
constexpr std::array<TileFunction<T>, sizeof...(kIndex)> tile_table(
    std::index_sequence<kIndex...>) {
  return {multiply_tile<D, kIndex / kTileVecs + 1, kIndex % kTileVecs + 1>...};
}
template <class D, class T = hn::TFromD<D>>
inline constexpr auto kTiles = tile_table<D, T>(std::make_index_sequence<kTileRows * kTileVecs>());

}  // namespace ullage::cpu::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
