// C = A B on Hopper: TMA loads multicast over a cluster, a producer warpgroup and two consumers
// (config.h), a persistent grid.
//
// Every element of C is one chain of k16 tensor-core steps in ascending k, started at zero or at
// C's old value: its bits do not depend on the other rows, the grid or the tile order.
#pragma once

#include <cuda.h>

#include <climits>

#include "cuda/product/blocked_matrix.h"
#include "cuda/product/config.h"
#include "cuda/wgmma.cuh"

namespace ullage::cuda {

// Cluster tiles are walked in this order: k slice outermost, then groups of m, then n, then m
// within the group, so that the tiles in flight share a few rows of A and a few columns of B in L2.
struct ProductGrid {
  int m_tiles;       // cluster tiles of Tile::kM * Tile::kClusterM rows
  int n_tiles;       // cluster tiles of Tile::kN * Tile::kClusterN columns
  int m_group;       // m tiles walked together
  int k_slices;      // slices of k, each its own output
  int k_blocks;      // 64-deep blocks of the whole k
  int slice_blocks;  // blocks of one slice; the last may be shorter, none is empty

  __host__ __device__ int64_t tiles() const { return int64_t{m_tiles} * n_tiles * k_slices; }
};

// What the copy engine loads. A tile of A travels in two boxes of 64 rows (or columns, where m is
// contiguous), B's in strips of 64 columns, both shared out among the cluster.
struct ProductOperands {
  CUtensorMap a;       // of a blocked A: the ranges before the last
  CUtensorMap a_last;  // of a blocked A: the last range
  CUtensorMap a_more;  // of a blocked A with m contiguous: where A lies from k = more_from on
  CUtensorMap b;
  BlockedMatrix blocks;       // how a blocked A is cut
  int first_row;              // of a blocked A
  int more_from = INT_MAX;    // a multiple of Tile::kK
  int* tiles_read = nullptr;  // C lies where A does: see RangeOrder
};

// Which blocks of k the tiles of each cluster row take, where that is not all of them: ascending
// entries, each for `span` adjacent blocks. A slice of k is then an even share of the entries.
struct BlockLists {
  const int* counts = nullptr;   // [cluster rows]
  const int* entries = nullptr;  // [cluster rows][stride]
  int stride = 0, span = 1;
};

namespace sm90 {

inline constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;

// Where one consumer's results meet the copy engine: Tile::kBoxes boxes, and a barrier for each,
// with the parity that its next load will complete.
struct Staging {
  uint8_t* boxes;
  uint32_t barriers;
  uint32_t parities = 0;

  __device__ __forceinline__ uint8_t* box(int i) const { return boxes + i * 8192; }
  __device__ __forceinline__ void await(int i) {
#if ULLAGE_SM90
    ptx::barrier_wait(barriers + 8 * i, parities >> i & 1);
    parities ^= 1u << i;
#endif
  }
};

struct TilePosition {
  int m, n;  // first row, first column of this CTA's tile
  int slice;
  int first_block, n_blocks;
  const int* entries;  // of a listed product: from the slice's first on
};

template <class Tile, bool kListed>
__device__ __forceinline__ TilePosition locate(const ProductGrid& grid, const BlockLists& lists,
                                               int64_t tile, int cta_m, int cta_n) {
  const int64_t per_slice = int64_t{grid.m_tiles} * grid.n_tiles;
  const int slice = static_cast<int>(tile / per_slice);
  int64_t rest = tile - slice * per_slice;
  const int64_t per_group = int64_t{grid.m_group} * grid.n_tiles;
  const int group = static_cast<int>(rest / per_group);
  rest -= group * per_group;
  const int group_rows = min(grid.m_group, grid.m_tiles - group * grid.m_group);
  const int n_tile = static_cast<int>(rest / group_rows);
  const int m_tile = group * grid.m_group + static_cast<int>(rest - int64_t{n_tile} * group_rows);
  const int m = (m_tile * Tile::kClusterM + cta_m) * Tile::kM;
  const int n = (n_tile * Tile::kClusterN + cta_n) * Tile::kN;
  if constexpr (kListed) {
    const int count = lists.counts[m_tile];
    const int share = (count + grid.k_slices - 1) / grid.k_slices;
    const int first = min(slice * share, count), taken = min(share, count - first);
    const int* const entries = lists.entries + int64_t{m_tile} * lists.stride + first;
    // The last entry of k may stand for fewer blocks.
    const int last = taken > 0 ? entries[taken - 1] : 0;
    const int beyond = taken > 0 ? max((last + 1) * lists.span - grid.k_blocks, 0) : 0;
    return {m, n, slice, 0, taken * lists.span - beyond, entries};
  }
  const int first = slice * grid.slice_blocks;
  return {m, n, slice, first, min(grid.slice_blocks, grid.k_blocks - first), nullptr};
}

template <bool kListed>
__device__ __forceinline__ int block_of(const TilePosition& at, const BlockLists& lists,
                                        int index) {
  if constexpr (!kListed) return at.first_block + index;
  return at.entries[index / lists.span] * lists.span + index % lists.span;
}

template <class T, Major kA, Major kB>
__device__ __forceinline__ void multiply_step(float (&d)[96], uint64_t a, uint64_t b, int keep) {
  wgmma_m64n192k16<T, kA == Major::kMN, kB == Major::kMN>(d, a, b, keep);
}

template <class T, Major kA, Major kB>
__device__ __forceinline__ void multiply_step(float (&d)[128], uint64_t a, uint64_t b, int keep) {
  wgmma_m64n256k16<T, kA == Major::kMN, kB == Major::kMN>(d, a, b, keep);
}

// acc[64 kHalves][kN] += one 64-deep block: four k16 steps, the two 64-row halves in turn.
template <class Tile, class T, Major kA, Major kB>
__device__ __forceinline__ void multiply_block(float (&acc)[Tile::kHalves][Tile::kN / 2],
                                               const uint8_t* a, const uint8_t* b, int keep) {
#pragma unroll
  for (int step = 0; step < Tile::kK / 16; ++step) {
    // Along k: 32 bytes of a swizzled row (K-major), or 16 rows of 128 bytes (MN-major).
    const uint64_t b_descriptor = kB == Major::kK ? tile_descriptor(b + step * 32, 16, 1024)
                                                  : tile_descriptor(b + step * 2048, 8192, 1024);
#pragma unroll
    for (int half = 0; half < Tile::kHalves; ++half) {
      const uint8_t* const a_half = a + half * 8192;
      const uint64_t a_descriptor = kA == Major::kK
                                        ? tile_descriptor(a_half + step * 32, 16, 1024)
                                        : tile_descriptor(a_half + step * 2048, 8192, 1024);
      multiply_step<T, kA, kB>(acc[half], a_descriptor, b_descriptor, step == 0 ? keep : 1);
    }
  }
}

// Where a block of A lies.
struct BlockPlace {
  const CUtensorMap* map;
  int block, range;  // the block in its range, the range in its map
};
__device__ __forceinline__ BlockPlace place_of(const ProductOperands& operands, int block) {
  const BlockedMatrix& blocks = operands.blocks;
  const int range = blocks.range_of(block);
  const bool last = range == blocks.n_ranges - 1;
  return {last ? &operands.a_last : &operands.a, block - range * blocks.range_blocks,
          last ? 0 : range};
}

// Where C's memory holds A: range r of A (m contiguous, so a range of C's rows too) lies in the
// rows of C's range r + 1, the last elsewhere. tiles_read[r] counts the tiles whose part of range r
// has arrived in shared memory; all of them have before a tile of range r + 1 is stored. Tiles are
// taken in the order of their ranges (ranges are whole groups of m): blocks seldom wait long, and
// not for ever, since they report a range before they wait in the next, and all of them are
// resident (start_product.cuh).
struct RangeOrder {
  int tiles = 0;  // read of this block's present range, not yet reported
  int range = 0;  // all before it are read

  // By the thread of a consumer that stores, between the tile's products and its store. `next_m`:
  // of the block's next tile, -1: none. `reports`: one consumer does.
  template <class Tile>
  __device__ __forceinline__ void take_place(const ProductOperands& operands,
                                             const ProductGrid& grid, int m, int next_m,
                                             bool reports) {
    const BlockedMatrix& blocks = operands.blocks;
    const int here = blocks.range_of(m / kBlockColumns);
    ++tiles;
    if (next_m < 0 || blocks.range_of(next_m / kBlockColumns) != here) {
      if (reports) ptx::count_release(operands.tiles_read + here, tiles);
      tiles = 0;
    }
    if (here == range) return;
    range = here;
    const int range_tiles = blocks.range_blocks * kBlockColumns / Tile::kM;
    ptx::await_count(operands.tiles_read + here - 1, range_tiles * grid.n_tiles * Tile::kClusterN);
    ptx::fence_async();
  }
};

// Launched in clusters of Tile::kCluster blocks.
//
// An epilogue is a struct with Operand, the 16-bit type of A and B, Params and static functions of
// the parameters, a tile's position, its accumulators, the warpgroup's first row within the tile
// and the thread:
//   bool begin      fills acc with C's old values (true) or leaves it (false: start at zero)
//   void prefetch   may ask for the old values of the next tile
//   bool end        stores the tile, by way of this warpgroup's staging; may also begin the next
//                   tile, where there is one
template <class Tile, Form kFormA, Major kA, Major kB, class Epilogue, bool kListed>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    product_kernel(const __grid_constant__ ProductOperands operands,
                   const __grid_constant__ ProductGrid grid,
                   const __grid_constant__ BlockLists lists,
                   const __grid_constant__ typename Epilogue::Params params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Strips of 64 columns, shared out whole among the CTAs that share B.
  static_assert(Tile::kN % 64 == 0 && (Tile::kN / Tile::kClusterM) % 8 == 0);
  static_assert(!kListed || Tile::kConsumers == Consumers::kTogether);
  static_assert(Tile::kM == 128 && 2 % Tile::kClusterN == 0, "A travels in two boxes of 64 rows");
  // Consumers' and producer's registers together fit the multiprocessor's 65,536.
  static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 65536);
  constexpr int kStages = Tile::kStages;
  extern __shared__ uint8_t raw_shared[];
  // 128-byte swizzle repeats every 1024 bytes; the dynamic base is the same in every CTA, so the
  // aligned one is too.
  uint8_t* const shared = raw_shared + ((1024 - (shared_address(raw_shared) & 1023)) & 1023);
  uint8_t* const a_tiles = shared;                                 // [stage][128 x 64]
  uint8_t* const b_tiles = shared + kStages * Tile::kAStageBytes;  // [stage][kN x 64]
  // Barriers of 8 bytes: a stage is full, a stage is empty.
  uint8_t* const staging = shared + kStages * Tile::kStageBytes;
  const uint32_t full = shared_address(staging + 2 * Tile::kStagingBytes);
  const uint32_t empty = full + 8 * kStages;
  const uint32_t staged = empty + 8 * kStages;  // and a box of a consumer's staging has arrived

  const uint32_t rank = ptx::cluster_rank();
  const int cta_m = static_cast<int>(rank) / Tile::kClusterN,
            cta_n = static_cast<int>(rank) % Tile::kClusterN;
  const int warpgroup = ptx::warp_of_block() / 4;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      ptx::barrier_init(full + 8 * i, 1);
      // A stage is refilled once the consumers of all CTAs that receive this CTA's copies are done
      // with it: its own, its row neighbours and its column neighbours.
      ptx::barrier_init(empty + 8 * i, (Tile::kClusterM + Tile::kClusterN - 1) *
                                           (Tile::kConsumers == Consumers::kTogether ? 2 : 1));
    }
    for (int i = 0; i < 2 * Tile::kBoxes; ++i) ptx::barrier_init(staged + 8 * i, 1);
    ptx::fence_barrier_init();
  }
  __syncwarp();
  ptx::cluster_sync();

  const int64_t n_tiles = grid.tiles();
  const int64_t first_tile = blockIdx.x / Tile::kCluster;
  const int64_t tile_step = gridDim.x / Tile::kCluster;

  if (warpgroup == 0) {
    registers_lower<kProducerRegisters>();
    // One thread. Several could share a stage's copies if each had one in every stage: a phase's
    // parity cannot tell a lap of the ring from the one before the last, so whoever waits by it has
    // to be waited for in every lap. (Of four, one had none of the logits' three: it fell two laps
    // behind in one of some hundred runs, and its block never ended.)
    if (threadIdx.x == 0) {
      // A goes to the CTAs with this cta_m, B to those with this cta_n.
      const uint16_t row_mask =
          static_cast<uint16_t>(((1u << Tile::kClusterN) - 1) << (cta_m * Tile::kClusterN));
      uint16_t column_mask = 0;
      for (int i = 0; i < Tile::kClusterM; ++i)
        column_mask |= static_cast<uint16_t>(1u << (i * Tile::kClusterN + cta_n));
      int stage = 0;
      uint32_t parity = 1;  // a fresh barrier's previous phase counts as complete
      for (int64_t tile = first_tile; tile < n_tiles; tile += tile_step) {
        const TilePosition at = locate<Tile, kListed>(grid, lists, tile, cta_m, cta_n);
        // Both blocks of a tile's columns lie in one range. Found here and not at each stage, where
        // its two integer divisions made d_weight a quarter slower (H200).
        BlockPlace place = {};
        if constexpr (kFormA == Form::kBlocks && kA == Major::kMN)
          place = place_of(operands, at.m / kBlockColumns);
        for (int block = 0; block < at.n_blocks; ++block) {
          const int k = block_of<kListed>(at, lists, block) * Tile::kK;
          if constexpr (kFormA == Form::kBlocks && kA == Major::kK)
            place = place_of(operands, k / kBlockColumns);
          const uint32_t arrived = full + 8 * stage;
          ptx::barrier_wait(empty + 8 * stage, parity);
          ptx::barrier_expect(arrived, Tile::kStageBytes);
          uint8_t* const a = a_tiles + stage * Tile::kAStageBytes;
          uint8_t* const b = b_tiles + stage * Tile::kBStageBytes;
          // A in boxes of 64 of its 128 rows, each CTA of a row its share; B likewise along the
          // column.
          for (int half = cta_n; half < 2; half += Tile::kClusterN) {
            const int m = at.m + half * 64;
            uint8_t* const to = a + half * (Tile::kAStageBytes / 2);
            if constexpr (kFormA == Form::kRows) {
              tensor_load_multicast(to, &operands.a, kA == Major::kK ? k : m,
                                    kA == Major::kK ? m : k, arrived, row_mask);
            } else if constexpr (kA == Major::kK) {
              tensor_load_multicast(to, place.map, 0, operands.first_row + m, place.block,
                                    place.range, arrived, row_mask);
            } else {
              const bool more = k >= operands.more_from;
              tensor_load_multicast(to, more ? &operands.a_more : place.map, 0,
                                    more ? k - operands.more_from : operands.first_row + k,
                                    more ? m / kBlockColumns : place.block + half,
                                    more ? 0 : place.range, arrived, row_mask);
            }
          }
          if constexpr (kB == Major::kK) {
            tensor_load_multicast(b + cta_m * (Tile::kBStageBytes / Tile::kClusterM), &operands.b,
                                  k, at.n + cta_m * (Tile::kN / Tile::kClusterM), arrived,
                                  column_mask);
          } else {
            // Strips of 64 columns by 64 k; each CTA brings its part of every strip's k.
            constexpr int kRows = 64 / Tile::kClusterM;
            for (int strip = 0; strip < Tile::kN / 64; ++strip) {
              tensor_load_multicast(b + strip * 8192 + cta_m * kRows * 128, &operands.b,
                                    at.n + strip * 64, k + cta_m * kRows, arrived, column_mask);
            }
          }
          if (++stage == kStages) stage = 0, parity ^= 1;
        }
      }
    }
  } else {
    registers_raise<kConsumerRegisters>();
    constexpr bool kInTurn = Tile::kConsumers == Consumers::kInTurn;
    const bool in_place =
        kFormA == Form::kBlocks && kA == Major::kMN && operands.tiles_read != nullptr;
    RangeOrder order;
    const int thread = threadIdx.x % 128;
    const int first_row = kInTurn ? 0 : (warpgroup - 1) * 64;  // of the tile
    const uint8_t* const my_a_tiles = a_tiles + first_row * 128;
    // Threads 0 .. kCluster - 1 each release a stage at one CTA that copies to this one.
    const bool sender = thread < Tile::kCluster &&
                        (thread / Tile::kClusterN == cta_m || thread % Tile::kClusterN == cta_n);
    int stage = 0;
    uint32_t parity = 0;
    int64_t turn = 0;
    // The consumers multiply in strict turn: a phase parity cannot tell this lap of the ring from
    // the one before the last, so no consumer may wait for a stage while the other still has the
    // previous lap to take.
    const int my_turn = warpgroup, other_turn = 3 - warpgroup;
    if (kInTurn && warpgroup == 2) pass_turn(other_turn);
    float acc[Tile::kHalves][Tile::kN / 2];
    bool begun = false;
    Staging mine{staging + (warpgroup - 1) * Tile::kStagingBytes,
                 staged + (warpgroup - 1) * 8 * Tile::kBoxes};
    for (int64_t tile = first_tile; tile < n_tiles; tile += tile_step, ++turn) {
      const TilePosition at = locate<Tile, kListed>(grid, lists, tile, cta_m, cta_n);
      if (kInTurn && (turn & 1) != warpgroup - 1) {
        // The other consumer's tile: step over its stages.
        stage += at.n_blocks;
        if ((stage / kStages) & 1) parity ^= 1;
        stage %= kStages;
        continue;
      }
      if (!begun) begun = Epilogue::begin(params, at, acc, first_row, thread, mine);
      const int keep = begun ? 1 : 0;
      const bool more = !kInTurn && tile + tile_step < n_tiles;
      const TilePosition next =
          more ? locate<Tile, kListed>(grid, lists, tile + tile_step, cta_m, cta_n)
               : TilePosition{};
#pragma unroll
      for (int half = 0; half < Tile::kHalves; ++half) registers_settle(acc[half]);
      if constexpr (kListed) {
        if (at.n_blocks == 0) {
          if (!begun) {
#pragma unroll
            for (int i = 0; i < Tile::kN / 2; ++i) acc[0][i] = 0;
          }
          if (more) Epilogue::prefetch(params, next, first_row, thread, mine);
          if (in_place && thread == 0)
            order.take_place<Tile>(operands, grid, at.m, more ? next.m : -1, warpgroup == 1);
          begun = Epilogue::end(params, at, more, next, acc, first_row, thread, mine);
          continue;
        }
      }
      if (kInTurn) await_turn(my_turn);
      // The first block stands apart: a loop whose first trip starts from registers that loads
      // wrote makes the assembler wait after every product (C7515).
      ptx::barrier_wait(full + 8 * stage, parity);
      wgmma_fence();
      multiply_block<Tile, typename Epilogue::Operand, kA, kB>(
          acc, my_a_tiles + stage * Tile::kAStageBytes, b_tiles + stage * Tile::kBStageBytes, keep);
      wgmma_commit();
      if (more) Epilogue::prefetch(params, next, first_row, thread, mine);
      int previous = stage;
      if (++stage == kStages) stage = 0, parity ^= 1;
      for (int block = 1; block < at.n_blocks; ++block) {
        ptx::barrier_wait(full + 8 * stage, parity);
        wgmma_fence();
        multiply_block<Tile, typename Epilogue::Operand, kA, kB>(
            acc, my_a_tiles + stage * Tile::kAStageBytes, b_tiles + stage * Tile::kBStageBytes, 1);
        wgmma_commit();
        wgmma_wait<1>();
        if (sender) barrier_arrive_remote(empty + 8 * previous, thread);
        previous = stage;
        if (++stage == kStages) stage = 0, parity ^= 1;
      }
      if (kInTurn) pass_turn(other_turn);
      wgmma_wait<0>();
      if (sender) barrier_arrive_remote(empty + 8 * previous, thread);
      if (in_place && thread == 0)
        order.take_place<Tile>(operands, grid, at.m, more ? next.m : -1, warpgroup == 1);
      begun = Epilogue::end(params, at, more, next, acc, first_row, thread, mine);
    }
    ptx::bulk_wait_reads();  // shared memory outlives the copies from it
  }
  __syncwarp();
  ptx::cluster_sync();  // no CTA leaves while a neighbour may still signal it
#endif
}

}  // namespace sm90
}  // namespace ullage::cuda
