// What a product does with its accumulators. See product_kernel for the interface. Each has a path
// for tiles that lie inside the matrix, as short as it can be made: a warpgroup's epilogue runs
// once through straight-line code, so instruction fetch, not arithmetic, sets its time (H200:
// per-element bounds and label tests made it three times the products of a d_model of 1024).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/product/blocked_matrix.h"
#include "cuda/product/fragment.cuh"
#include "cuda/product/product_sm90.cuh"

namespace ullage::cuda::sm90 {

// C[slice][m][n] float32: stored, or continued from what C holds (one chain of additions over
// successive calls). f16 products are of operands times `unit`, a power of two: the chain runs at
// that scale, C holds it divided by it.
template <class Tile, class T>
struct ChainF32 {
  static_assert(Tile::kConsumers == Consumers::kTogether);
  using Operand = T;
  static constexpr bool kScaled = std::is_same_v<T, __half>;
  struct Params {
    CUtensorMap c_map;  // f32 [k_slices][m][n], boxes of 64 rows by 32 columns, 128-byte swizzle
    float* c;           // the same
    int64_t row_stride, slice_stride;
    int m, n;
    bool accumulate;
    float unit;
  };

  static constexpr int kTileBoxes = Tile::kN / 32;

  // One thread asks for the old values of a box of the tile.
  static __device__ __forceinline__ void ask(const Params& p, const TilePosition& at, int box,
                                             int first_row, const Staging& staging) {
    const int to = box % Tile::kBoxes;
    const uint32_t barrier = staging.barriers + 8 * to;
    ptx::barrier_expect(barrier, Tile::kBoxBytes);
    tensor_load(staging.box(to), &p.c_map, at.n + 32 * box, at.m + first_row, at.slice, barrier);
  }

  // Where this thread's columns {0, 1} of block j of a box's row lie: 16-byte pieces of a row are
  // exchanged by its number, the copy engine's 128-byte swizzle.
  static __device__ __forceinline__ float2* place(uint8_t* box, int row, int block, int thread) {
    const int piece = (2 * block + (thread % 4) / 2) ^ (row & 7);
    return reinterpret_cast<float2*>(box + row * 128 + piece * 16 + (thread & 1) * 8);
  }

  // This thread's part of a box: stored from acc, where `stores`, and then replaced by what was
  // there, where `loads`. Odd rows take their 8-column blocks in another order: the four rows of a
  // half warp then meet different banks.
  template <bool kStores>
  static __device__ __forceinline__ void exchange(const Params& p,
                                                  float (&acc)[Tile::kHalves][Tile::kN / 2],
                                                  int box, bool loads, int thread,
                                                  uint8_t* staged) {
    const bool odd = (thread / 4) & 1;
    const float inverse_unit = kScaled ? 1 / p.unit : 1.0f;
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = fragment_row(thread, 0, pair);
      float2 old[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int even_at = 4 * (4 * box + j) + 2 * pair;
        const int odd_at = 4 * (4 * box + (j ^ 2)) + 2 * pair;
        float2* const at = place(staged, row, odd ? j ^ 2 : j, thread);
        if (loads) {
          old[j] = *at;
          if (kScaled) old[j] = {old[j].x * p.unit, old[j].y * p.unit};
        }
        if (kStores) {
          *at = {(odd ? acc[0][odd_at] : acc[0][even_at]) * inverse_unit,
                 (odd ? acc[0][odd_at + 1] : acc[0][even_at + 1]) * inverse_unit};
        }
      }
      if (!loads) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int i = 4 * (4 * box + j) + 2 * pair;
        acc[0][i] = odd ? old[j ^ 2].x : old[j].x;
        acc[0][i + 1] = odd ? old[j ^ 2].y : old[j].y;
      }
    }
  }

  static __device__ __forceinline__ bool begin(const Params& p, const TilePosition& at,
                                               float (&acc)[Tile::kHalves][Tile::kN / 2],
                                               int first_row, int thread, Staging& staging) {
    if (!p.accumulate) return false;
    prefetch(p, at, first_row, thread, staging);
#pragma unroll
    for (int box = 0; box < kTileBoxes; ++box) {
      staging.await(box % Tile::kBoxes);
      exchange<false>(p, acc, box, true, thread, staging.box(box % Tile::kBoxes));
      warpgroup_sync(4 + first_row / 64);
      if (thread == 0 && box + Tile::kBoxes < kTileBoxes)
        ask(p, at, box + Tile::kBoxes, first_row, staging);
    }
    return true;
  }

  // As many boxes of old values as staging holds, once the last tile has left it.
  static __device__ __forceinline__ void prefetch(const Params& p, const TilePosition& at,
                                                  int first_row, int thread,
                                                  const Staging& staging) {
    if (!p.accumulate || thread != 0) return;
    ptx::bulk_wait_reads();
#pragma unroll
    for (int box = 0; box < Tile::kBoxes; ++box) ask(p, at, box, first_row, staging);
  }

  // By way of shared memory, 32 columns at a time, so that the copy engine stores while the next
  // product runs; what lies outside the matrix it leaves out. Where the next tile has old values, a
  // box holds them until this tile's take their place.
  static __device__ __forceinline__ bool end(const Params& p, const TilePosition& at, bool more,
                                             const TilePosition& next,
                                             float (&acc)[Tile::kHalves][Tile::kN / 2],
                                             int first_row, int thread, Staging& staging) {
    const bool loads = more && p.accumulate;
    const int warpgroup_barrier = 4 + first_row / 64;
#pragma unroll
    for (int box = 0; box < kTileBoxes; ++box) {
      const int to = box % Tile::kBoxes;
      if (loads) {
        staging.await(to);
      } else {
        // The copy that read this box last is kBoxes copies old.
        if (thread == 0) ptx::bulk_wait_reads<Tile::kBoxes - 1>();
        warpgroup_sync(warpgroup_barrier);
      }
      exchange<true>(p, acc, box, loads, thread, staging.box(to));
      ptx::fence_async_shared();
      warpgroup_sync(warpgroup_barrier);
      if (thread != 0) continue;
      tensor_store(&p.c_map, staging.box(to), at.n + 32 * box, at.m + first_row, at.slice);
      ptx::bulk_commit();
      // The box before has been read by now, or soon.
      if (loads && box > 0 && box - 1 + Tile::kBoxes < kTileBoxes) {
        ptx::bulk_wait_reads<1>();
        ask(p, next, box - 1 + Tile::kBoxes, first_row, staging);
      }
    }
    return loads;
  }
};

// C[m][n] rounded once to T, but for rows that are not finished yet: those go to a float32 buffer.
template <class Tile, class T>
struct RoundOnce {
  static_assert(Tile::kConsumers == Consumers::kTogether);
  using Operand = T;
  struct Params {
    CUtensorMap c_map;  // T [m][n], boxes of 64 rows by 64 columns, 128-byte swizzle
    const int* slots;   // [m]: an unfinished row's place in `unfinished`, or -1
    float* unfinished;  // f32 [..][n]
    int m, n;           // n a multiple of 8
    float unit;         // as in ChainF32
  };

  static __device__ __forceinline__ bool begin(const Params&, const TilePosition&,
                                               float (&)[Tile::kHalves][Tile::kN / 2], int, int,
                                               const Staging&) {
    return false;
  }
  static __device__ __forceinline__ void prefetch(const Params&, const TilePosition&, int, int,
                                                  const Staging&) {}

  // As ChainF32::end, 64 columns at a time.
  static __device__ __forceinline__ bool end(const Params& p, const TilePosition& at, bool,
                                             const TilePosition&,
                                             float (&acc)[Tile::kHalves][Tile::kN / 2],
                                             int first_row, int thread, const Staging& staging) {
    const int warpgroup_barrier = 4 + first_row / 64;
    const int lane_column = 2 * (thread % 4);
    if constexpr (std::is_same_v<T, __half>) {
      const float inverse_unit = 1 / p.unit;
#pragma unroll
      for (int i = 0; i < Tile::kN / 2; ++i) acc[0][i] *= inverse_unit;
    }
    int slots[2];
#pragma unroll
    for (int pair = 0; pair < 2; ++pair) {
      const int row = at.m + first_row + fragment_row(thread, 0, pair);
      slots[pair] = row < p.m ? p.slots[row] : -1;
    }
#pragma unroll
    for (int box = 0; box < Tile::kN / 64; ++box) {
      uint8_t* const buffer = staging.box(box % Tile::kBoxes);
      if (thread == 0) ptx::bulk_wait_reads<Tile::kBoxes - 1>();
      warpgroup_sync(warpgroup_barrier);
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = fragment_row(thread, 0, pair);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int i = 4 * (8 * box + j) + 2 * pair;
          *reinterpret_cast<uint32_t*>(buffer + row * 128 + (j ^ (row & 7)) * 16 +
                                       2 * lane_column) = pack<T>(acc[0][i], acc[0][i + 1]);
        }
        if (slots[pair] >= 0) {
          float* const to = p.unfinished + int64_t{slots[pair]} * p.n + at.n + lane_column;
#pragma unroll
          for (int j = 8 * box; j < 8 * box + 8; ++j) {
            const int i = 4 * j + 2 * pair;
            if (at.n + 8 * j < p.n)
              *reinterpret_cast<float2*>(to + 8 * j) = {acc[0][i], acc[0][i + 1]};
          }
        }
      }
      ptx::fence_async_shared();
      warpgroup_sync(warpgroup_barrier);
      if (thread == 0) {
        tensor_store(&p.c_map, buffer, at.n + 64 * box, at.m + first_row, 0);
        ptx::bulk_commit();
      }
    }
    return false;
  }
};

// The logits of a tile, reduced where they are born: with a = scale * z, stores E = T(e^(a - c))
// and each row's sum. The shift c is 0 where the row's sum over the tile lies in T's comfortable
// range then, so that almost every tile of almost every model needs no maximum and E no rescaling;
// else the multiple of kStep that brings the row's largest near e^kTop. a - c is exact: a large
// common offset costs the loss nothing. The label's column is left out, of E (stored as 0), of the
// sum and of the shift: what a loss near 0 and the gradient q_y P - L depend on is the sum of the
// others, which would drown in the label's own exponential. Its exact logit is kept apart.
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr int kNoLabel = -1, kIgnoredRow = -2;

// bf16 keeps its full relative precision for all that matters between sums of e^-40 and e^40, and
// the products that read E stay finite.
template <class T>
struct ExponentialRange {
  static constexpr float kSmallest = 4.3e-18f, kLargest = 2.3e17f;  // e^-40, e^40
  static constexpr float kStep = 32, kTop = 0;
};
// f16 is finite below 2^16 and off by 2^-25 below 2^-14: no exponential exceeds 2^15 (sums are no
// less than their largest) or e^(6 + 4) = 2^14.5; what a tile of 192 columns loses stays below
// 192 * 2^-25 of a sum of at least 2^-6, 2^-11.4, and of e^2 where there is a shift.
template <>
struct ExponentialRange<__half> {
  static constexpr float kSmallest = 0x1p-6f, kLargest = 0x1p15f;
  static constexpr float kStep = 8, kTop = 6;
};

template <class Tile, class T>
struct ScaledExponentials {
  using Operand = T;
  using Range = ExponentialRange<T>;
  struct Params {
    BlockedMatrix e;     // columns from vocab to the end of the last block are written as zeros
    bool store_e;        // else statistics alone
    int e_row;           // e's row of this call's first
    const int* columns;  // [rows]: the label's column, kNoLabel, or kIgnoredRow whose E is 0
    float2* partial;     // [rows][n_tiles]: (c, sum of e^(a - c)), the label's apart
    float* label_logit;  // [rows]: a_y
    int rows, vocab, n_tiles;
    int first_column;  // of the vocabulary: where this call's columns start
    float scale;
  };

  static __device__ __forceinline__ bool begin(const Params&, const TilePosition&,
                                               float (&)[Tile::kHalves][Tile::kN / 2], int, int,
                                               const Staging&) {
    return false;
  }
  static __device__ __forceinline__ void prefetch(const Params&, const TilePosition&, int, int,
                                                  const Staging&) {}

  static __device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }

  // The shift of a row whose largest product is the largest of its quad's `top`.
  static __device__ __noinline__ float settle_shift(float top, float scale) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
    return top == -INFINITY ? 0.f : Range::kStep * rintf((top - Range::kTop) / Range::kStep);
  }

  static __device__ __forceinline__ bool end(const Params& p, const TilePosition& at, bool,
                                             const TilePosition&,
                                             float (&acc)[Tile::kHalves][Tile::kN / 2],
                                             int first_row, int thread, const Staging&) {
    if (at.n >= p.vocab) return false;
    const int lane_column = 2 * (thread % 4);
    const float scale_log2 = p.scale * kLog2E;
    // A tile lies within one range.
    const int first_block = at.n / kBlockColumns, blocks = p.e.n_blocks - first_block;
    T* const tile = p.store_e ? static_cast<T*>(p.e.block(first_block)) : nullptr;
    if (at.n + Tile::kN > p.vocab) {
#pragma unroll
      for (int j = 0; j < Tile::kN / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (at.n + 8 * j + lane_column + (i & 1) >= p.vocab) {
#pragma unroll
            for (int half = 0; half < Tile::kHalves; ++half) acc[half][4 * j + i] = -INFINITY;
          }
        }
      }
    }
    int columns[Tile::kHalves][2];
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = at.m + first_row + fragment_row(thread, half, pair);
        columns[half][pair] = row < p.rows ? p.columns[row] : kIgnoredRow;
      }
    }
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = at.m + first_row + fragment_row(thread, half, pair);
        const bool inside = row < p.rows, counted = columns[half][pair] != kIgnoredRow;
        // Unsigned: less than kN for the tile's columns alone; a row without a label is far from
        // it.
        const unsigned label_offset =
            static_cast<unsigned>(columns[half][pair]) - p.first_column - at.n;
        if (__builtin_expect(__any_sync(0xffffffffu, label_offset < Tile::kN), false)) {
          // This lane's columns of block j are 8 j and 8 j + 1 from here.
          const unsigned mine = label_offset - lane_column;
          float label = 0;
#pragma unroll
          for (int j = 0; j < Tile::kN / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              if (mine != 8u * j + i) continue;
              label = acc[half][4 * j + 2 * pair + i];
              acc[half][4 * j + 2 * pair + i] = -INFINITY;
            }
          }
          if (mine < Tile::kN && mine % 8 < 2) p.label_logit[row] = label * p.scale;
        }
        float shift = 0;
        float sum0 = 0, sum1 = 0;
        uint32_t words[Tile::kN / 8];
#pragma unroll
        for (int j = 0; j < Tile::kN / 8; ++j) {
          const float e0 = ptx::exp2_approx(acc[half][4 * j + 2 * pair] * scale_log2);
          const float e1 = ptx::exp2_approx(acc[half][4 * j + 2 * pair + 1] * scale_log2);
          sum0 += e0;
          sum1 += e1;
          words[j] = pack<T>(e0, e1);
        }
        float sum = quad_sum(sum0 + sum1);
        // Written so that NaN takes the long way.
        const bool plain = sum >= Range::kSmallest && sum <= Range::kLargest;
        if (__builtin_expect(__any_sync(0xffffffffu, inside && (!plain || !counted)), false)) {
          // Not the same value to the compiler, which would keep every exponential for this rare
          // path.
          float scale_again = scale_log2;
          asm volatile("" : "+f"(scale_again));
          float top = -INFINITY;
          if (!plain) {
#pragma unroll
            for (int j = 0; j < Tile::kN / 4; ++j) {
              top = fmaxf(top, acc[half][4 * (j / 2) + 2 * pair + (j & 1)]);
            }
          }
          const float candidate = settle_shift(top, p.scale);
          if (!plain) shift = candidate;
          sum0 = sum1 = 0;
#pragma unroll
          for (int j = 0; j < Tile::kN / 8; ++j) {
            float e[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
              const float a = acc[half][4 * j + 2 * pair + i] * p.scale;
              e[i] = ptx::exp2_approx(plain ? acc[half][4 * j + 2 * pair + i] * scale_again
                                            : (a - shift) * kLog2E);
            }
            sum0 += e[0];
            sum1 += e[1];
            words[j] = counted ? pack<T>(e[0], e[1]) : 0;
          }
          sum = quad_sum(sum0 + sum1);
        }
        if (inside && thread % 4 == 0)
          p.partial[int64_t{row} * p.n_tiles + at.n / Tile::kN] = {shift, sum};
        if (!p.store_e) continue;
        T* out = tile + (row + p.e_row) * int64_t{kBlockColumns} + 8 * (thread % 4);
#pragma unroll
        for (int j = 0; j < Tile::kN / 8; j += 4) {
          const uint4 words8 =
              quad_transpose(words[j], words[j + 1], words[j + 2], words[j + 3], thread);
          if (inside && j / 8 < blocks) *reinterpret_cast<uint4*>(out + j % 8 * 8) = words8;
          if (j % 8 == 4) out += p.e.rows * kBlockColumns;
        }
      }
    }
    return false;
  }
};

}  // namespace ullage::cuda::sm90
