// What a product does with its accumulators. See product_kernel for the interface. Each has a path
// for tiles that lie inside the matrix, as short as it can be made: a warpgroup's epilogue runs
// once through straight-line code, so instruction fetch, not arithmetic, sets its time (H200:
// per-element bounds and label tests made it three times the products of a d_model of 1024).
#pragma once

#include <cuda_bf16.h>

#include "cuda/product/fragment.cuh"
#include "cuda/product/product_sm90.cuh"

namespace ullage::cuda::sm90 {

// C[slice][m][n] float32: stored, or continued from what C holds (one chain of additions over
// successive calls). Bringing the next tile's old values to L2 while this one multiplies
// (cp.async.bulk.prefetch.L2 from the producer) made d_weight a quarter slower, H200.
template <class Tile>
struct ChainF32 {
  struct Params {
    float* c;  // [k_slices][m][n], rows 16-byte aligned, n a multiple of 4
    int64_t row_stride, slice_stride;
    int m, n;
    bool accumulate;
  };

  // The thread's first element of a fragment row; its others lie 8 columns apart.
  static __device__ __forceinline__ float* row_start(const Params& p, const TilePosition& at,
                                                     int row, int thread) {
    return p.c + at.slice * p.slice_stride + int64_t{at.m + row} * p.row_stride + at.n +
           2 * (thread % 4);
  }
  static __device__ __forceinline__ bool interior(const Params& p, const TilePosition& at) {
    return at.m + Tile::kM <= p.m && at.n + Tile::kN <= p.n;
  }

  static __device__ __forceinline__ bool begin(const Params& p, const TilePosition& at,
                                               float (&acc)[Tile::kHalves][Tile::kN / 2],
                                               int first_row, int thread) {
    const bool whole = interior(p, at);
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = first_row + fragment_row(thread, half, pair);
        const float* const c = row_start(p, at, row, thread);
        const int columns = p.n - at.n - 2 * (thread % 4);
        const bool read = p.accumulate && (whole || at.m + row < p.m);
#pragma unroll
        for (int j = 0; j < Tile::kN / 8; ++j) {
          float2 old = {0, 0};
          if (read && (whole || 8 * j < columns)) old = *reinterpret_cast<const float2*>(c + 8 * j);
          acc[half][4 * j + 2 * pair] = old.x;
          acc[half][4 * j + 2 * pair + 1] = old.y;
        }
      }
    }
    return true;
  }

  static __device__ __forceinline__ void end(const Params& p, const TilePosition& at,
                                             const float (&acc)[Tile::kHalves][Tile::kN / 2],
                                             int first_row, int thread) {
    if (interior(p, at)) {
#pragma unroll
      for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
          float* const c = row_start(p, at, first_row + fragment_row(thread, half, pair), thread);
#pragma unroll
          for (int j = 0; j < Tile::kN / 8; ++j) {
            *reinterpret_cast<float2*>(c + 8 * j) = {acc[half][4 * j + 2 * pair],
                                                     acc[half][4 * j + 2 * pair + 1]};
          }
        }
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = first_row + fragment_row(thread, half, pair);
        if (at.m + row >= p.m) continue;
        float* const c = row_start(p, at, row, thread);
        const int columns = p.n - at.n - 2 * (thread % 4);
#pragma unroll
        for (int j = 0; j < Tile::kN / 8; ++j) {
          if (8 * j < columns) {
            *reinterpret_cast<float2*>(c + 8 * j) = {acc[half][4 * j + 2 * pair],
                                                     acc[half][4 * j + 2 * pair + 1]};
          }
        }
      }
    }
  }
};

// The logits of a tile, reduced where they are born: with a = scale * z, stores E = bf16(e^(a - c))
// and each row's sum. The shift c is 0 where the row's sum over the tile then lies within e^-40 ...
// e^40 (bf16 keeps its full relative precision for all that matters, and the products that read E
// stay finite), else the multiple of 32 nearest the row's maximum. So almost every tile of almost
// every model needs no maximum, and E no rescaling. a - c is exact: a large common offset costs the
// loss nothing. The label's column is stored as 0: its gradient q_y P - L is formed in float32 from
// the exact logit and added apart, where it cannot cancel.
inline constexpr float kLog2E = 1.4426950408889634f;
inline constexpr int kNoLabel = -1, kIgnoredRow = -2;

template <class Tile>
struct ScaledExponentials {
  struct Params {
    __nv_bfloat16* e;    // [rows][e_stride], or null: statistics alone
    int64_t e_stride;    // a multiple of 8, >= vocab; columns from vocab on are written as zeros
    const int* columns;  // [rows]: the label's column, kNoLabel, or kIgnoredRow whose E is 0
    float2* partial;     // [rows][n_tiles]: (c, sum of e^(a - c))
    float* label_logit;  // [rows]: a_y
    int rows, vocab, n_tiles;
    int first_column;  // of the vocabulary: where this call's columns start
    float scale;
  };
  static constexpr float kLargest = 2.3e17f, kSmallest = 4.3e-18f;  // e^40, e^-40

  static __device__ __forceinline__ bool begin(const Params&, const TilePosition&,
                                               float (&)[Tile::kHalves][Tile::kN / 2], int, int) {
    return false;
  }

  static __device__ __forceinline__ float power_of_two(float x) {
    float power;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(x));
    return power;
  }

  static __device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    return x + __shfl_xor_sync(0xffffffffu, x, 2);
  }

  // A row that holds its label here, lies at the ragged edge, or needs a shift.
  static __device__ __noinline__ float settle_shift(float top, float scale) {
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2)) * scale;
    return top == -INFINITY ? 0.f : 32.f * rintf(top * (1.f / 32.f));
  }

  static __device__ __forceinline__ void end(const Params& p, const TilePosition& at,
                                             float (&acc)[Tile::kHalves][Tile::kN / 2],
                                             int first_row, int thread) {
    if (at.n >= p.vocab) return;
    const int lane_column = 2 * (thread % 4);
    const float scale_log2 = p.scale * kLog2E;
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
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
#pragma unroll
      for (int pair = 0; pair < 2; ++pair) {
        const int row = at.m + first_row + fragment_row(thread, half, pair);
        const bool inside = row < p.rows;
        const int column = inside ? p.columns[row] : kIgnoredRow;
        const int label_offset = column - p.first_column - at.n;
        const bool label_here = column >= 0 && label_offset >= 0 && label_offset < Tile::kN;
        float shift = 0;
        float sum0 = 0, sum1 = 0;
        uint32_t words[Tile::kN / 8];
#pragma unroll
        for (int j = 0; j < Tile::kN / 8; ++j) {
          const float e0 = power_of_two(acc[half][4 * j + 2 * pair] * scale_log2);
          const float e1 = power_of_two(acc[half][4 * j + 2 * pair + 1] * scale_log2);
          sum0 += e0;
          sum1 += e1;
          words[j] = pack_bf16(e0, e1);
        }
        float sum = quad_sum(sum0 + sum1);
        // Written so that NaN takes the long way.
        const bool plain = sum >= kSmallest && sum <= kLargest;
        if (__any_sync(0xffffffffu, inside && (label_here || !plain))) {
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
              e[i] = plain ? power_of_two(acc[half][4 * j + 2 * pair + i] * scale_log2)
                           : power_of_two((a - shift) * kLog2E);
            }
            sum0 += e[0];
            sum1 += e[1];
            const int first = 8 * j + lane_column;
            if (label_here && (first == label_offset || first + 1 == label_offset)) {
              const int i = first == label_offset ? 0 : 1;
              p.label_logit[row] =
                  (i == 0 ? acc[half][4 * j + 2 * pair] : acc[half][4 * j + 2 * pair + 1]) *
                  p.scale;
              if (i == 0) {
                e[0] = 0;
              } else {
                e[1] = 0;
              }
            }
            words[j] = pack_bf16(e[0], e[1]);
          }
          sum = quad_sum(sum0 + sum1);
        }
        if (inside && thread % 4 == 0)
          p.partial[int64_t{row} * p.n_tiles + at.n / Tile::kN] = {shift, sum};
        if (p.e == nullptr) continue;
        __nv_bfloat16* const out = p.e + int64_t{row} * p.e_stride + at.n + 8 * (thread % 4);
        const int64_t columns = p.e_stride - at.n - 8 * (thread % 4);
        const bool counted = column != kIgnoredRow;
#pragma unroll
        for (int j = 0; j < Tile::kN / 8; j += 4) {
          uint4 block = quad_transpose(words[j], words[j + 1], words[j + 2], words[j + 3], thread);
          if (!counted) block = {0, 0, 0, 0};
          if (inside && 8 * j < columns) *reinterpret_cast<uint4*>(out + 8 * j) = block;
        }
      }
    }
  }
};

}  // namespace ullage::cuda::sm90
