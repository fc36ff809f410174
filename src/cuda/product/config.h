// Tiles of the Hopper product. Host-only: the planner reads it without a CUDA toolkit.
#pragma once

#include <cstdint>

namespace ullage::cuda {

constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Clusters of 2 on the multiprocessors of an H200.
inline constexpr int kResidentClusters = 66;

// Which dimension of an operand is contiguous in memory.
enum class Major { kK, kMN };

// How A lies in memory: rows of a matrix, or a BlockedMatrix.
enum class Form { kRows, kBlocks };

// How the two consumer warpgroups share the work.
enum class Consumers {
  kInTurn,    // each takes whole 128-row tiles, one multiplies while the other is in its epilogue
  kTogether,  // each takes 64 of a tile's 128 rows: wider tiles fit the registers, less is read
              // from L2 and shared memory
};

// kStagedBoxes: 64 rows of 128 bytes each, where a consumer's results meet the copy engine.
template <int kColumns, int kCtasM, int kCtasN, Consumers kSharing, int kStagedBoxes>
struct ProductTile {
  static constexpr int kClusterM = kCtasM;  // CTAs of a cluster along m: they share each B tile
  static constexpr int kClusterN = kCtasN;  // and along n: they share each A tile
  static constexpr int kCluster = kClusterM * kClusterN;
  static constexpr Consumers kConsumers = kSharing;
  static constexpr int kM = 128;
  static constexpr int kHalves =
      kSharing == Consumers::kInTurn ? 2 : 1;  // m64 instructions of one warpgroup
  static constexpr int kN = kColumns;
  static constexpr int kK = 64;  // 64 bf16 = the 128 bytes of one swizzled row
  static constexpr int kAStageBytes = kM * kK * 2;
  static constexpr int kBStageBytes = kN * kK * 2;
  static constexpr int kStageBytes = kAStageBytes + kBStageBytes;
  static constexpr int kBoxes = kStagedBoxes;
  static constexpr int kBoxBytes = 8192;
  static constexpr int kStagingBytes = kBoxes * kBoxBytes;  // of each consumer
  // As many stages as fit 227 KiB beside that, the barriers and the 1 KiB the swizzle's alignment
  // may cost.
  static constexpr int kStages = (227 * 1024 - 2048 - 2 * kStagingBytes) / kStageBytes;
  static constexpr int kSharedBytes = kStages * kStageBytes + 2 * kStagingBytes + 2048;
  static constexpr int kThreads =
      384;  // a producer warpgroup and two consumers that take tiles in turn
};

}  // namespace ullage::cuda
