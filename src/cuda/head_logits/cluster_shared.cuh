// What the warps of a cluster's block share (cluster_rows.cuh): its shared memory and barriers, and
// which rows are the cluster's.
#pragma once

#include "cuda/head_logits/row_process.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

namespace ptx = ullage::cuda::ptx;

static_assert(sizeof(RowWord) == kRowWordBytes);

// The block's shared memory, in the order of layout_of (config.h):
// slots | strips' sums of two rows | sections' sums of three rows | strips' extras | sections'
// extras of two rows | words of two rows | barriers. Without extras their tables take no room.
template <class Kind>
struct ClusterShared {
  static constexpr int kSumKinds = kSums<Kind::kFamily>, kExtraKinds = kExtras<Kind::kFamily>;

  const HeadParams& p;
  std::byte* base;
  bool has_extras;
  int warps;                       // of columns
  uint32_t slots_start, barriers;  // their shared addresses

  __device__ std::byte* slot(int i) const { return base + int64_t{i} * p.slot_bytes; }
  __device__ float* sums(unsigned n) const {
    return reinterpret_cast<float*>(base + int64_t{p.slots} * p.slot_bytes) +
           n % 2 * kSumKinds * p.strips_per_block;
  }
  __device__ float* section_sums(int table) const {
    return sums(0) + 2 * kSumKinds * p.strips_per_block + table * kSumKinds * kMaxSections;
  }
  __device__ float* extras() const { return section_sums(kSectionTables); }
  __device__ float* section_extras(unsigned n) const {
    return extras() + kExtraKinds * p.strips_per_block + n % 2 * kExtraKinds * kMaxSections;
  }
  __device__ RowWord* word(unsigned n) const {
    return reinterpret_cast<RowWord*>(base + int64_t{p.slots} * p.slot_bytes + p.table_bytes) +
           n % 2;
  }
  __device__ uint32_t barrier(unsigned i) const { return barriers + i * 8; }
  __device__ uint32_t sections_there(int table) const { return barrier(table); }
  __device__ uint32_t sums_there(unsigned n) const { return barrier(3 + n % 2); }
  __device__ uint32_t word_there(unsigned n) const { return barrier(5 + n % 2); }
  __device__ uint32_t section_extras_there(unsigned n) const { return barrier(7 + n % 2); }
  __device__ uint32_t extras_there() const { return barrier(9); }
  __device__ uint32_t row_sums_there() const { return barrier(10); }
  // Of a slot: its row has come; every warp is done with it.
  __device__ uint32_t loaded(int slot) const { return barrier(11 + slot); }
  __device__ uint32_t emptied(int slot) const { return barrier(11 + p.slots + slot); }

  // Every lane that read what is overwritten, or wrote what is read, arrives itself.
  __device__ void init_barriers() const {
    for (int table = 0; table < kSectionTables; ++table) {
      ptx::barrier_init(sections_there(table), 1);
    }
    for (unsigned n = 0; n < 2; ++n) {
      ptx::barrier_init(sums_there(n), warps * 32);
      ptx::barrier_init(word_there(n), 1);
      ptx::barrier_init(section_extras_there(n), 1);
    }
    ptx::barrier_init(extras_there(), warps * 32);
    ptx::barrier_init(row_sums_there(), 1);
    for (int slot = 0; slot < p.slots; ++slot) {
      ptx::barrier_init(loaded(slot), 32);
      ptx::barrier_init(emptied(slot), warps * 32);
    }
    ptx::fence_barrier_init();
    ptx::fence_async_shared();
  }
};

// Rows first, first + stride, ... of a cluster, counted from 0.
struct ClusterRowsOf {
  int64_t first, stride;
  int count;

  explicit __device__ ClusterRowsOf(const HeadParams& p)
      : first(p.first_row + ptx::cluster_id()), stride(ptx::n_clusters()) {
    count = first < end_row(p) ? static_cast<int>((end_row(p) - first + stride - 1) / stride) : 0;
  }
  __device__ int64_t row(int i) const { return first + i * stride; }
};

// Which of a cluster's rows count: a warp looks at 32 of them at a time, ascending.
class RowCounts {
 public:
  // Called for every row i, ascending, by the whole warp.
  __device__ bool next(const HeadParams& p, const ClusterRowsOf& rows, int i, int lane) {
    if (i % 32 == 0) {
      const int mine = i + lane;
      bits_ = __ballot_sync(
          ~0u, mine < rows.count && row_counts(p, rows.row(mine), stored_label(p, rows.row(mine))));
    }
    return bits_ >> (i % 32) & 1;
  }

 private:
  unsigned bits_ = 0;
};

// An element of this block's slice of the cluster's first row.
__device__ inline int64_t first_element(const HeadParams& p, const ClusterRowsOf& rows,
                                        int64_t row_stride, int column) {
  return (rows.first - p.first_row) * row_stride + column;
}

// A place in a ring, and the parity of its barriers.
struct RingCursor {
  int at = 0;
  uint32_t parity = 0;

  __device__ void advance(int places) {
    if (++at == places) at = 0, parity ^= 1;
  }
};

#endif

}  // namespace ullage::lossk::cuda
