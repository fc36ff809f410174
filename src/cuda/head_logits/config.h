// How a row of logits is laid over a GPU: pure host arithmetic, so that a plan for an H200 is made
// where there is neither a GPU nor a CUDA toolkit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "contract/describe.h"
#include "cuda/head_logits/params.h"
#include "ullage/lossk/cuda_head.h"
#include "ullage/plan.h"

namespace ullage::lossk::cuda {

enum class RowKernel {
  kCluster,   // a cluster of blocks keeps rows in shared memory: one read, one write
  kStreamed,  // a block reads the row three or four times, from L2 where it can
  kShort,     // a warp takes several rows of one strip, or holds some in registers
};

constexpr std::string_view name_of(RowKernel kernel) {
  switch (kernel) {
    case RowKernel::kCluster:
      return "head_rows_sm90_cluster";
    case RowKernel::kStreamed:
      return "head_rows_sm80_streamed";
    default:
      return "head_rows_sm80_short";
  }
}

// What a launch does with its rows; without a gradient and without extras it only sums them.
struct RowWork {
  Family family = Family::kLabels;
  bool extras = false;  // arg max, smoothed labels, or the entropy beside other sums
  bool gradient = true;
  bool aligned = true;  // every row of logits and teacher begins a 16-byte word
  bool top_k = false;   // from a top-k teacher

  constexpr bool sums_only() const { return !gradient && n_extras(family, extras) == 0; }
};

// 0: chosen here. What the benchmark sweeps. A slot holds a row; `slots`: of each group of warps,
// or, where rows are only summed, of all.
struct Tuning {
  int cluster = 0;
  int warps = 0;
  int slots = 0;
};

struct RowLayout {
  RowKernel kernel = RowKernel::kStreamed;
  RowCut cut;
  int cluster = 1;  // blocks a row
  int warps = 1;    // a block; of a cluster's, those that share a row
  // Of a cluster's block: groups of such warps, tables of exchanged sums, places for rows' ids.
  int groups = 1, tables = 0, ids = 0;
  int terms_warps = 0;
  int strips_per_block = 0;
  int strips_per_warp = 0;
  int rows_at_a_time = 1;  // that a warp of short rows takes
  bool held = false;       // in registers
  int slots = 0;
  int64_t matrix_bytes = 0, slot_bytes = 0;
  bool in_whole_words = false;
  int64_t table_bytes = 0;
  int64_t shared_bytes = 0;  // a block
};

// Three rows of a group: one is loaded, one summed, one written.
inline constexpr int kSlots = 3;
inline constexpr int kMaxGroups = 4;  // of a block's column warps
// Of a row that is only summed, so that one group sums while another begins and ends: a row's
// beginning and end are as long as its sums.
inline constexpr int kMaxSummingWarps = kMaxColumnWarps / 2;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// What a block of an H200 can have at most of each of kSlots rows of its groups together, beside
// its tables. A block alone has more of them, and so has each group, and a teacher's sums; eight
// blocks hold two rows where they do not hold three.
constexpr int64_t most_slice_bytes(Family family, int blocks, int groups) {
  const int of_teacher = has_teacher(family) && blocks < 8 ? 1 : 0;
  return (75 - of_teacher - (blocks == 1 ? 1 + groups : 0)) * 1024;
}

// Strips of up to ten rounds of a column's two bytes, of five and three where a column has four or
// eight, a teacher's included: long enough to be worth a warp's reduction, short enough that each
// of the 16 warps of the 4, 8 or 16 blocks that hold 151936 columns finds one. Rows for fewer than
// 16 warps: of four. Of rows that are gone through once, as many strips as the blocks have warps
// that hold kSlots of them for each of their groups (40008 columns of 16 strips, which one block
// just does not hold, took eight blocks of two warps, and 2.15 times the copy).
//
// A teacher's that three blocks hold are cut for these: the beginning and the end of a row take
// every warp of its blocks the same time, and there are 39 such clusters beside 30 of four (but 17
// of six beside 15 of eight; H200).
constexpr RowCut cut_of(int64_t vocab, int64_t element_bytes, Family family) {
  const int64_t column_bytes = element_bytes * n_matrices(family);
  const bool once = n_extras(family, false) == 0;
  RowCut cut;
  cut.n_rounds = static_cast<int>((vocab + kWarpColumns - 1) / kWarpColumns);
  const auto slice_bytes = [&](int blocks) {
    return (cut.n_rounds + blocks - 1) / blocks * kWarpColumns * column_bytes;
  };
  for (; cut.n_strips < kMaxStrips; cut.n_strips *= 2, ++cut.log2_strips) {
    const int of_many = column_bytes <= 2 ? 10 : column_bytes <= 4 ? 5 : 3;
    const int most_rounds = cut.n_strips < kMaxColumnWarps ? std::min(4, of_many) : of_many;
    const int blocks = std::max(1, cut.n_strips / kMaxColumnWarps);
    const int groups = std::clamp(kMaxColumnWarps / cut.n_strips, 1, kMaxGroups);
    const bool fits =
        !once || slice_bytes(blocks) * groups <= most_slice_bytes(family, blocks, groups);
    if (most_rounds * cut.n_strips >= cut.n_rounds && fits) break;
  }
  if (once && has_teacher(family) && cut.n_strips == 4 * kMaxColumnWarps &&
      slice_bytes(3) <= most_slice_bytes(family, 3, 1)) {
    cut.n_strips = 3 * kMaxColumnWarps;
    cut.log2_strips -= 2;
    cut.in_thirds = true;
  }
  while (cut.n_strips > kMaxSections * cut.strips_per_section) cut.strips_per_section *= 2;
  return cut;
}
constexpr int n_sections(const RowCut& cut) { return cut.n_strips / cut.strips_per_section; }

// Whether short rows can be held in registers: they are gone through once for their sums, lanes
// have all of a vector or nothing, and a lane has so many registers.
constexpr bool can_hold(int64_t vocab, int64_t element_bytes, const RowWork& work) {
  const RowCut cut = cut_of(vocab, element_bytes, work.family);
  return n_extras(work.family, work.extras) == 0 && !work.top_k && work.aligned && vocab > 0 &&
         vocab % kLaneColumns == 0 && cut.n_strips <= most_strips_held(work.family) &&
         rounds_held(cut) * n_matrices(work.family) <= vectors_held(element_bytes);
}

// The gather of a top-k teacher's ids keeps a bit for each column, whether it is among them, in
// shared memory, beside some words for each warp.
constexpr int64_t top_k_bitmap_bytes(int64_t vocab) { return (vocab + 31) / 32 * 4; }
constexpr int64_t most_top_k_columns(const CudaDevice& device) {
  return (device.shared_per_block_bytes - kTopKSumsBytes) / 4 * 32;
}

// Tables that warps exchange sums through, in bytes, `strips` a block: each its strips' sums and
// everyone's sections', of `tables` rows; their extras of `groups`. `extras`: some are asked for.
constexpr int64_t table_bytes(Family family, bool extras, int64_t strips, int64_t tables,
                              int64_t groups) {
  const int64_t sums = n_sums(family) * tables * (strips + kMaxSections);
  const int64_t second = n_extras(family, extras) * groups * (strips + kMaxSections);
  return round_up((sums + second) * 4, 16);
}
// Of a cluster's block: rows that have come, each slot emptied; for every table its strips' sums,
// everyone's sections' and the row's word; for every group the row's sums, its strips' extras and
// everyone's sections'; each id.
constexpr int64_t n_barriers(const RowLayout& layout) {
  return round_up(layout.slots, layout.groups) + layout.slots + 3 * layout.tables +
         3 * layout.groups + layout.ids;
}

// Rows that a cluster is told before any is loaded.
constexpr int rows_told_ahead(const RowLayout& layout) {
  return std::min(2 * layout.groups, layout.slots);
}

inline RowLayout layout_of(RowKernel kernel, int64_t vocab, int64_t element_bytes,
                           const RowWork& work, int cluster, int tables_of_group,
                           const Tuning& tuning) {
  const Family family = work.family;
  RowLayout layout;
  layout.kernel = kernel;
  layout.cut = cut_of(vocab, element_bytes, family);
  layout.cluster = cluster;
  layout.strips_per_block = layout.cut.n_strips / cluster;
  if (kernel == RowKernel::kShort) {
    const int64_t row_bytes = vocab * element_bytes * n_matrices(family);
    layout.warps = kShortWarps;
    layout.strips_per_warp = layout.cut.n_strips;
    layout.in_whole_words = work.aligned;
    layout.held = can_hold(vocab, element_bytes, work);
    if (layout.held) {
      layout.warps = kHeldWarps;
      layout.rows_at_a_time =
          rows_held(element_bytes, rounds_held(layout.cut) * n_matrices(family));
      layout.shared_bytes = layout.warps * kHeldBytes;
      return layout;
    }
    layout.rows_at_a_time = static_cast<int>(
        std::clamp<int64_t>(kShortBytes / std::max<int64_t>(row_bytes, 1), 1, kRowsOfWarp));
    return layout;
  }
  const bool sums_only = kernel == RowKernel::kCluster && work.sums_only();
  layout.warps = tuning.warps > 0 ? tuning.warps : sums_only ? kMaxSummingWarps : kMaxColumnWarps;
  if (layout.warps > layout.strips_per_block) layout.warps = layout.strips_per_block;
  while (layout.strips_per_block % layout.warps != 0) --layout.warps;
  layout.strips_per_warp = layout.strips_per_block / layout.warps;
  if (kernel == RowKernel::kStreamed) {
    layout.shared_bytes = table_bytes(family, true, layout.strips_per_block, 1, 1);
    return layout;
  }
  while (layout.warps * layout.groups * 2 <= kMaxColumnWarps && layout.groups < kMaxGroups)
    layout.groups *= 2;
  layout.terms_warps = kOtherWarps - (cluster > 1 ? 2 : 1);
  layout.slots =
      sums_only ? std::max(tuning.slots, layout.groups + 1) : tuning.slots * layout.groups;
  const bool exchanged_twice = n_extras(family, work.extras) > 0;
  layout.tables = (exchanged_twice ? 2 : tables_of_group) * layout.groups;
  // So that a third warp for the terms takes no other row's sums for its own (cluster_rows.cuh).
  while (cluster == 1 && layout.tables < rows_told_ahead(layout) + layout.slots) layout.tables *= 2;
  layout.table_bytes =
      table_bytes(family, work.extras, layout.strips_per_block, layout.tables, layout.groups);
  for (layout.ids = 1; layout.ids < 2 * layout.slots + layout.tables;) layout.ids *= 2;
  layout.in_whole_words = work.aligned && vocab * element_bytes % 16 == 0;
  const int64_t rounds = (int64_t{layout.cut.n_rounds} + cluster - 1) / cluster;
  layout.matrix_bytes = rounds * kWarpColumns * element_bytes + (layout.in_whole_words ? 0 : 16);
  layout.slot_bytes = layout.matrix_bytes * n_matrices(family);
  layout.shared_bytes = layout.slots * layout.slot_bytes + layout.table_bytes +
                        layout.tables * (kRowWordBytes + 4) + n_barriers(layout) * 8 +
                        layout.ids * 8;
  return layout;
}

// Clusters in the order in which they are wished for, with the rows a block is to hold. The
// smallest with three: a larger one waits for more peers, and has less of a row for each beginning
// and end. Of 16 blocks, a GPC holds one cluster. Where rows are so short, a fourth hides how late
// memory answers (1.26 to 1.21 times the copy at 8192 columns, 1.17 to 1.11 at 16384).
struct ClusterWish {
  int cluster, slots;
};
// Two rows in a block alone are chosen only where `Tuning` allows no larger cluster.
inline constexpr ClusterWish kUsualWishes[] = {
    {1, kSlots + 1}, {1, kSlots},  {2, kSlots},     {3, kSlots},     {4, kSlots},
    {8, kSlots},     {16, kSlots}, {1, kSlots - 1}, {8, kSlots - 1}, {16, kSlots - 1}};
// Where rows are only summed, or a teacher's twice, no gradient waits for a third row: two of them
// in half as many blocks are better (24576 to 200064 columns: by 1 to 30 %).
inline constexpr ClusterWish kTwoRowWishes[] = {
    {1, kSlots},     {1, kSlots - 1}, {2, kSlots},     {2, kSlots - 1}, {4, kSlots},
    {4, kSlots - 1}, {8, kSlots},     {8, kSlots - 1}, {16, kSlots},    {16, kSlots - 1}};
inline std::span<const ClusterWish> wishes_of(const RowWork& work) {
  const bool twice = has_teacher(work.family) && n_extras(work.family, work.extras) > 0;
  if (twice || work.sums_only()) return kTwoRowWishes;
  return kUsualWishes;
}

// plan_cuda with a layout that is not the one chosen here.
Result<CudaHeadPlan> plan_with_tuning(const Shape& shape, const HeadConfig& config,
                                      const Request& request, const CudaHeadOptions& options,
                                      const Tuning& tuning);

// The kernel for a row, and why not the cluster's where it is another. `forced` names a kernel, or
// is empty.
inline Result<RowLayout> choose_row_layout(int64_t vocab, DType dtype, const RowWork& work,
                                           const CudaDevice& device, std::string_view forced,
                                           const Tuning& tuning,
                                           std::vector<Rejection>& rejections) {
  const Family family = work.family;
  const std::string cluster_name(name_of(RowKernel::kCluster));
  const std::string streamed_name(name_of(RowKernel::kStreamed));
  const std::string short_name(name_of(RowKernel::kShort));
  if (!forced.empty() && forced != cluster_name && forced != streamed_name &&
      forced != short_name) {
    return Status(kHeadUnknownKernel, "kernel '" + std::string(forced) + "'; accepted: " +
                                          cluster_name + ", " + streamed_name + ", " + short_name);
  }
  if (device.compute_capability < 80) {
    return Status(kCudaUnsupportedDevice, device.name + " has compute capability " +
                                              describe(device.compute_capability) +
                                              "; needed: 80 or more");
  }
  const int n_strips = cut_of(vocab, size_of(dtype), family).n_strips;
  const bool held = can_hold(vocab, size_of(dtype), work);
  const bool is_short = (n_strips == 1 && !work.top_k) || held;
  if (forced == short_name && (n_strips > 1 || work.top_k)) {
    return Status(kHeadUnknownKernel,
                  short_name + ": " +
                      (work.top_k ? "a top-k teacher's ids are gathered for whole rows"
                                  : "a row of " + describe(vocab) + " columns has " +
                                        describe(n_strips) + " strips; accepted: 1"));
  }
  const auto otherwise = [&] {
    const bool takes_short = is_short && forced != streamed_name;
    return layout_of(takes_short ? RowKernel::kShort : RowKernel::kStreamed, vocab, size_of(dtype),
                     work, 1, 0, tuning);
  };
  const auto pass_over = [&](const std::string& reason) -> Result<RowLayout> {
    if (forced == cluster_name) return Status(kHeadUnknownKernel, cluster_name + ": " + reason);
    rejections.push_back({cluster_name, reason});
    return otherwise();
  };
  if (forced == streamed_name || forced == short_name) {
    return pass_over(std::string(forced) + " was asked for");
  }
  if (device.compute_capability != 90) {
    return pass_over("compiled for compute capability 90, and " + device.name + " has " +
                     describe(device.compute_capability));
  }
  if (forced.empty() && tuning.cluster == 0 && (n_strips == 1 || held)) {
    return pass_over("a row of " + describe(vocab) +
                     (held
                          ? " columns fits a warp's registers"
                          : " columns is one strip, which one warp takes out of L1 with less ado"));
  }
  const auto fits = [&](const RowLayout& layout) {
    return layout.shared_bytes <= device.shared_per_block_bytes;
  };
  for (const ClusterWish& wish : wishes_of(work)) {
    if (wish.cluster > device.max_cluster_blocks ||
        n_sections(cut_of(vocab, size_of(dtype), family)) % wish.cluster != 0 ||
        (tuning.cluster > 0 && wish.cluster != tuning.cluster)) {
      continue;
    }
    Tuning wished = tuning;
    if (wished.slots == 0) wished.slots = wish.slots;
    const auto lay = [&](int tables) {
      return layout_of(RowKernel::kCluster, vocab, size_of(dtype), work, wish.cluster, tables,
                       wished);
    };
    const auto take = [&](const RowLayout& layout) -> Result<RowLayout> {
      if (work.sums_only() && layout.cluster == 16 && layout.slots < kSlots && forced.empty()) {
        return pass_over("rows of " + describe(vocab) +
                         " columns, of which a cluster of 16 blocks holds two, are summed sooner "
                         "from memory");
      }
      return layout;
    };
    // With four tables a group, a block's sums may be two rows of it ahead of the words.
    for (const int tables : {4, 2}) {
      if (const RowLayout layout = lay(tables); fits(layout)) return take(layout);
    }
    // Two groups that only sum have twice the tables of one, and a slot more than two.
    if (!work.sums_only() || tuning.warps > 0) continue;
    wished.warps = kMaxColumnWarps;
    if (const RowLayout layout = lay(2); fits(layout) && layout.slots >= wish.slots) {
      return take(layout);
    }
  }
  return pass_over("a row of " + describe(vocab) + " columns, " + describe(kSlots - 1) +
                   " times, exceeds the shared memory of a cluster of " +
                   describe(device.max_cluster_blocks) + " blocks, " +
                   describe(device.shared_per_block_bytes) + " bytes each");
}

}  // namespace ullage::lossk::cuda
