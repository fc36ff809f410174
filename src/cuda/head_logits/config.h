// How a row of logits is laid over a GPU: pure host arithmetic, so that a plan for an H200 is made
// where there is neither a GPU nor a CUDA toolkit.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "contract/describe.h"
#include "cuda/head_logits/params.h"
#include "ullage/lossk/cuda_head.h"
#include "ullage/plan.h"

namespace ullage::lossk::cuda {

enum class RowKernel {
  kCluster,   // a cluster of blocks keeps the row in shared memory: one read, one write
  kStreamed,  // a block reads the row three times, the second and third from L2 where it can
};

constexpr std::string_view name_of(RowKernel kernel) {
  return kernel == RowKernel::kCluster ? "head_rows_sm90_cluster" : "head_rows_sm80_streamed";
}

// 0: chosen here. What the benchmark sweeps.
struct Tuning {
  int cluster = 0;
  int warps = 0;
};

struct RowLayout {
  RowKernel kernel = RowKernel::kStreamed;
  int cluster = 1;  // blocks a row
  int warps = 1;    // a block
  int strip_columns = 0;
  int n_strips = 0;
  int strips_per_block = 0;
  int strips_per_warp = 0;
  int64_t strip_pitch_bytes = 0;
  int64_t row_bytes = 0;  // a block's strips, the teacher's included
  int64_t partial_bytes = 0;
  int64_t shared_bytes = 0;  // a block
};

inline constexpr int64_t kMinStripColumns = 1024;
// CUDA keeps this much of every block's shared memory to itself.
inline constexpr int64_t kReservedSharedBytes = 1024;
inline constexpr int kMaxWarps = 16;
// 64 registers a thread (__launch_bounds__(512, 2)) leave room for this many warps on a
// multiprocessor. At 48 registers every family spills.
inline constexpr int kResidentWarps = 32;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Tables of strip values: the sums, of two rows, and those of the optional further pass.
constexpr int n_partials(Family family) {
  return 2 * n_sums(family) + kCommonExtras + n_mixed_extras(family);
}

// A strip's columns: enough that 128 strips cover the row, few enough that short rows still use
// several warps. A function of the vocabulary alone (see kMaxStrips).
constexpr int64_t strip_columns_of(int64_t vocab) {
  const int64_t even = round_up((vocab + kMaxStrips - 1) / kMaxStrips, kWarpColumns);
  return even > kMinStripColumns ? even : kMinStripColumns;
}

// Blocks of a layout whose shared memory one multiprocessor holds.
inline int64_t resident_blocks(int64_t shared_bytes, const CudaDevice& device) {
  return device.shared_per_multiprocessor_bytes / (shared_bytes + kReservedSharedBytes);
}

inline RowLayout layout_of(RowKernel kernel, int64_t vocab, int64_t element_bytes, Family family,
                           const CudaDevice& device, int cluster, const Tuning& tuning) {
  RowLayout layout;
  layout.kernel = kernel;
  layout.strip_columns = static_cast<int>(strip_columns_of(vocab));
  layout.n_strips = static_cast<int>((vocab + layout.strip_columns - 1) / layout.strip_columns);
  layout.cluster = cluster;
  layout.strips_per_block = (layout.n_strips + cluster - 1) / cluster;
  layout.partial_bytes = n_partials(family) * int64_t{kMaxStrips} * 4;
  int64_t warps = kMaxWarps;
  if (kernel == RowKernel::kCluster) {
    layout.strip_pitch_bytes = layout.strip_columns * element_bytes;
    layout.row_bytes =
        layout.strip_pitch_bytes * layout.strips_per_block * (family == Family::kLabels ? 1 : 2);
    layout.shared_bytes =
        layout.row_bytes + layout.partial_bytes + (int64_t{kMaxWarps} + 3) * 8;  // barriers
    const int64_t fit = resident_blocks(layout.shared_bytes, device);
    if (fit > 1) warps = kResidentWarps / fit;
    if (tuning.warps > 0) warps = tuning.warps;
  } else {
    layout.shared_bytes = layout.partial_bytes;
  }
  if (warps > kMaxWarps) warps = kMaxWarps;
  if (warps > layout.strips_per_block) warps = layout.strips_per_block;
  if (warps < 1) warps = 1;
  layout.strips_per_warp = static_cast<int>((layout.strips_per_block + warps - 1) / warps);
  // As few warps as that needs.
  layout.warps = (layout.strips_per_block + layout.strips_per_warp - 1) / layout.strips_per_warp;
  return layout;
}

// plan_cuda with a layout that is not the one chosen here.
Result<CudaHeadPlan> plan_with_tuning(const Shape& shape, const HeadConfig& config,
                                      const Request& request, const CudaHeadOptions& options,
                                      const Tuning& tuning);

// The kernel for a row, and one reason for each candidate passed over. `forced` names a kernel, or
// is empty.
inline Result<RowLayout> choose_row_layout(int64_t vocab, DType dtype, Family family,
                                           const CudaDevice& device, std::string_view forced,
                                           const Tuning& tuning,
                                           std::vector<Rejection>& rejections) {
  const std::string cluster_name(name_of(RowKernel::kCluster));
  const std::string streamed_name(name_of(RowKernel::kStreamed));
  if (!forced.empty() && forced != cluster_name && forced != streamed_name) {
    return Status(kHeadUnknownKernel, "kernel '" + std::string(forced) +
                                          "'; accepted: " + cluster_name + ", " + streamed_name);
  }
  if (device.compute_capability < 80) {
    return Status(kCudaUnsupportedDevice, device.name + " has compute capability " +
                                              describe(device.compute_capability) +
                                              "; needed: 80 or more");
  }
  const auto streamed = [&] {
    return layout_of(RowKernel::kStreamed, vocab, size_of(dtype), family, device, 1, tuning);
  };
  const auto pass_over = [&](const std::string& reason) -> Result<RowLayout> {
    if (forced == cluster_name) return Status(kHeadUnknownKernel, cluster_name + ": " + reason);
    rejections.push_back({cluster_name, reason});
    return streamed();
  };
  if (forced == streamed_name) return pass_over(streamed_name + " was asked for");
  if (device.compute_capability != 90) {
    return pass_over("compiled for compute capability 90, and " + device.name + " has " +
                     describe(device.compute_capability));
  }
  if (forced.empty() && tuning.cluster == 0 && vocab <= kMinStripColumns) {
    return pass_over("a row of " + describe(vocab) +
                     " columns is one strip, which one warp streams out of L1 with less ado");
  }
  // Room for several blocks on a multiprocessor comes first, a small cluster second: a larger one
  // waits for more peers, and 16 blocks crowd a GPC. The order is that of the sweeps on an H200
  // (bench/results): 3 blocks of a cluster of 16 beat 1 of 8 (bf16, 262144 columns, a teacher), and
  // 1 of 8 beats 2 of 16 (f32, 151936 columns, a teacher).
  const struct {
    int blocks, first_cluster, last_cluster;
  } wishes[] = {{3, 1, 8}, {2, 1, 8}, {3, 16, 16}, {1, 1, 8}, {1, 16, 16}};
  for (const auto& wish : wishes) {
    for (int cluster = wish.first_cluster; cluster <= wish.last_cluster; cluster *= 2) {
      if (cluster > device.max_cluster_blocks) break;
      if (tuning.cluster > 0 && cluster != tuning.cluster) continue;
      const RowLayout layout =
          layout_of(RowKernel::kCluster, vocab, size_of(dtype), family, device, cluster, tuning);
      if (layout.shared_bytes > device.shared_per_block_bytes) continue;
      if (resident_blocks(layout.shared_bytes, device) >= wish.blocks) return layout;
    }
  }
  return pass_over("a row of " + describe(vocab) +
                   " columns exceeds the shared memory of a cluster of " +
                   describe(device.max_cluster_blocks) + " blocks, " +
                   describe(device.shared_per_block_bytes) + " bytes each");
}

}  // namespace ullage::lossk::cuda
