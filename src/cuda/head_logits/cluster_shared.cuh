// What the warps of a cluster's block share (cluster_rows.cuh): its shared memory and barriers.
#pragma once

#include "cuda/head_logits/row_process.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

namespace ptx = ullage::cuda::ptx;

static_assert(sizeof(RowWord) == kRowWordBytes);

// A place in a ring, and the parity of its barriers.
struct RingCursor {
  int at = 0;
  uint32_t parity = 0;

  // `by`: at most `places`.
  __device__ void advance(int places, int by = 1) {
    at += by;
    const bool wraps = at >= places;
    at -= wraps ? places : 0;
    parity ^= wraps;
  }
};

// A row of a cluster, as its blocks are told it: the row of the launch where a term counts it, the
// complement of that where none does, and kNoRow after the last.
struct alignas(8) RowId {
  static constexpr int kNoRow = -0x7fffffff - 1;
  int id;
  int label;  // column_of_label

  __device__ bool is_none() const { return id == kNoRow; }
  __device__ bool counts() const { return id >= 0; }
  __device__ int row() const { return id < 0 ? ~id : id; }
};

// The block's shared memory, in the order of layout_of (config.h):
// slots | strips' sums of `tables` rows | sections' sums of as many | strips' extras of `groups`
// rows | sections' extras of as many | words of `tables` rows | barriers | ids of rows | logits of
// the labels of `tables` rows. Without extras their tables take no room.
template <class Kind>
struct ClusterShared {
  static constexpr int kSumKinds = kSums<Kind::kFamily>;

  const HeadParams& p;
  std::byte* base;
  int n_extras;                    // kinds of them
  uint32_t slots_start, barriers;  // their shared addresses

  // How often it is told that there is no row: every group of column warps and every warp for the
  // terms waits for one of its own.
  __device__ int ends() const { return max(p.groups, p.terms_warps); }

  __device__ std::byte* slot(int i) const { return base + int64_t{i} * p.slot_bytes; }
  // `i`: of the cluster's rows, this is the i-th. Tables, groups and ids are powers of two.
  __device__ int table(int i) const { return i & (p.tables - 1); }
  __device__ uint32_t table_parity(int i) const { return (i & p.tables) != 0; }
  __device__ float* sums(int i) const {
    return tables() + table(i) * kSumKinds * p.strips_per_block;
  }
  __device__ float* section_sums(int i) const {
    return tables() + kSumKinds * (p.tables * p.strips_per_block + table(i) * kMaxSections);
  }
  __device__ float* extras(int i) const {
    return tables() + kSumKinds * p.tables * (p.strips_per_block + kMaxSections) +
           (i & (p.groups - 1)) * n_extras * p.strips_per_block;
  }
  __device__ float* section_extras(int i) const {
    return extras(0) +
           n_extras * (p.groups * p.strips_per_block + (i & (p.groups - 1)) * kMaxSections);
  }
  __device__ RowWord* word(int i) const { return words() + table(i); }
  __device__ uint32_t barrier(int i) const { return barriers + i * 8; }
  // A row has come: as many places as there are slots, but a multiple of the groups, so that the
  // row before in a place is the group's own, which it has waited for.
  __device__ int arrivals() const { return (p.slots + p.groups - 1) & -p.groups; }
  __device__ uint32_t loaded(int arrival) const { return barrier(arrival); }
  // Of a slot: its row is not needed any more.
  __device__ uint32_t emptied(int slot) const { return barrier(arrivals() + slot); }
  __device__ uint32_t sums_there(int i) const { return barrier(arrivals() + p.slots + table(i)); }
  __device__ uint32_t sections_there(int i) const { return sums_there(i) + p.tables * 8; }
  __device__ uint32_t word_there(int i) const { return sums_there(i) + 2 * p.tables * 8; }
  __device__ uint32_t row_sums_there(int i) const {
    return barrier(arrivals() + p.slots + 3 * p.tables + (i & (p.groups - 1)));
  }
  __device__ uint32_t extras_there(int i) const { return row_sums_there(i) + p.groups * 8; }
  __device__ uint32_t section_extras_there(int i) const {
    return row_sums_there(i) + 2 * p.groups * 8;
  }
  __device__ uint32_t extras_parity(int i) const { return (i & p.groups) != 0; }
  __device__ int id_barriers() const { return arrivals() + p.slots + 3 * p.tables + 3 * p.groups; }
  __device__ uint32_t id_there(int i) const { return barrier(id_barriers() + (i & (p.ids - 1))); }
  __device__ RowId* id_place(int i) const {
    return reinterpret_cast<RowId*>(words() + p.tables) + id_barriers() + p.ids + (i & (p.ids - 1));
  }

  // Of a row that was sent for: its label's logit.
  __device__ float* label_logit(int i) const {
    return reinterpret_cast<float*>(id_place(0) + p.ids) + table(i);
  }

  // Once it is there, by a warp.
  __device__ RowId id(int i) const {
    RowId row = *id_place(i);
    row.id = __shfl_sync(~0u, row.id, 0);  // so that the compiler sees that lanes do not part
    return row;
  }
  __device__ RowId wait_for_id(int i) const {
    ptx::barrier_wait(id_there(i), (i & p.ids) != 0);
    return id(i);
  }
  __device__ void wait_for_word(int i) const { ptx::barrier_wait(word_there(i), table_parity(i)); }

  // Every lane that read what is overwritten, or wrote what is read, arrives itself.
  __device__ void init_barriers() const {
    for (int i = 0; i < p.tables; ++i) {
      ptx::barrier_init(sums_there(i), p.row_warps * 32);
      ptx::barrier_init(sections_there(i), 1);
      ptx::barrier_init(word_there(i), 1);
    }
    for (int i = 0; i < p.groups; ++i) {
      ptx::barrier_init(row_sums_there(i), 1);
      ptx::barrier_init(extras_there(i), p.row_warps * 32);
      ptx::barrier_init(section_extras_there(i), 1);
    }
    for (int i = 0; i < arrivals(); ++i) ptx::barrier_init(loaded(i), 32);
    for (int i = 0; i < p.slots; ++i) ptx::barrier_init(emptied(i), p.row_warps * 32);
    for (int i = 0; i < p.ids; ++i) ptx::barrier_init(id_there(i), 1);
    ptx::fence_barrier_init();
    ptx::fence_async_shared();
  }

 private:
  __device__ float* tables() const {
    return reinterpret_cast<float*>(base + int64_t{p.slots} * p.slot_bytes);
  }
  __device__ RowWord* words() const {
    return reinterpret_cast<RowWord*>(base + int64_t{p.slots} * p.slot_bytes + p.table_bytes);
  }
};

#endif

}  // namespace ullage::lossk::cuda
