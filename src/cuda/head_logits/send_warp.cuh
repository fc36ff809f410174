// The warp that sends a block's sections to every block of its cluster (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

template <class Kind>
class SendWarp {
 public:
  __device__ SendWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int lane)
      : p_(shared.p),
        shared_(shared),
        rows_(rows),
        lane_(lane),
        n_sections_(p_.cut.n_strips / p_.cut.strips_per_section),
        sections_here_(min(p_.strips_per_block, 32) / p_.cut.strips_per_section) {
    const int block = lane / sections_here_, section = lane % sections_here_;
    const int block_sections = p_.strips_per_block / p_.cut.strips_per_section;
    const uint32_t here = shared.slots_start;
    sends_ = block < static_cast<int>(ptx::cluster_size());
    from_lane_ = section * p_.cut.strips_per_section;
    // (The instruction is executed whether its result is used or not: a block that exists.)
    to_barrier_ = ptx::address_in_block(here, sends_ ? block : 0) - here;
    to_block_ = to_barrier_ + (ptx::cluster_rank() * block_sections + section) * 4;
  }

  __device__ void run() {
    RowCounts counts;
    RingCursor table;
    unsigned n = 0;  // of the rows that count
    for (int i = 0; i < rows_.count; ++i) {
      if (!counts.next(p_, rows_, i, lane_)) continue;
      if (n > 0) ptx::barrier_wait(shared_.word_there(n - 1), (n - 1) / 2 % 2);
      ptx::barrier_wait(shared_.sums_there(n), n / 2 % 2);
      send_sums(n, table.at);
      if (shared_.has_extras) {
        ptx::barrier_wait(shared_.extras_there(), n % 2);
        send_extras(n);
      }
      table.advance(kSectionTables);
      ++n;
    }
  }

 private:
  __device__ void send_sums(unsigned n, int table) const {
    constexpr int kKinds = kSums<Kind::kFamily>;
    send<kKinds>(shared_.section_sums(table), shared_.sections_there(table),
                 [&](int i, float(&v)[kKinds]) {
                   put_sums(v, 1, 0,
                            section_sums<Kind>(p_, shared_.sums(n), p_.strips_per_block, i,
                                               p_.cut.strips_per_section));
                 });
  }
  __device__ void send_extras(unsigned n) const {
    constexpr int kKinds = kExtras<Kind::kFamily>;
    send<kKinds>(shared_.section_extras(n), shared_.section_extras_there(n),
                 [&](int i, float(&v)[kKinds]) {
#pragma unroll
                   for (int kind = 0; kind < kKinds; ++kind) {
                     v[kind] = section_extra(shared_.extras(), p_.strips_per_block, kind, i,
                                             p_.cut.strips_per_section);
                   }
                 });
  }

  // A lane a section and a block, of each 32 strips. `sections(i, values)`: of the section of
  // strip i, a lane each.
  template <int kKinds, class Sections>
  __device__ void send(const float* table, uint32_t barrier, const Sections& sections) const {
    if (lane_ == 0) ptx::barrier_expect(barrier, kKinds * n_sections_ * 4);
    uint32_t to = ptx::shared_address(table) + to_block_;
    for (int base = 0; base < p_.strips_per_block; base += 32, to += sections_here_ * 4) {
      float mine[kKinds];
      sections(base + lane_, mine);
#pragma unroll
      for (int kind = 0; kind < kKinds; ++kind) {
        const float value = __shfl_sync(~0u, mine[kind], from_lane_);
        if (sends_) {
          ptx::store_in_block(to + kind * kMaxSections * 4, value, barrier + to_barrier_);
        }
      }
    }
    __syncwarp();
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  int n_sections_;
  int sections_here_;  // of a group of 32 strips
  // Of this lane: whether it sends, the lane it takes values from, and how far its slot and its
  // barrier in the other block lie from this block's.
  bool sends_;
  int from_lane_;
  uint32_t to_block_, to_barrier_;
};

#endif

}  // namespace ullage::lossk::cuda
