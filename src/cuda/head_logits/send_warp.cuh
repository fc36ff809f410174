// The warp that sends a block's sections to every block of its cluster (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

template <class Kind>
class SendWarp {
  using T = typename Kind::Element;

 public:
  __device__ SendWarp(const ClusterShared<Kind>& shared, int lane)
      : p_(shared.p),
        shared_(shared),
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

  // What is sent for a row that does not count is not read, but the others wait for it: no block
  // gets so far ahead through such rows that it writes over what a peer has still to read.
  __device__ void run() {
    for (int i = 0;; ++i) {
      const RowId row = shared_.wait_for_id(i);
      if (row.is_none()) return;
      // Read before the row is sent for, and so before any block writes its gradient, which may lie
      // where the logits do.
      T logit{};
      if (lane_ == 0 && row.counts()) {
        logit = label_logit<T>(p_, p_.first_row + row.row(), row.label);
      }
      if (i >= p_.tables / 2) shared_.wait_for_word(i - p_.tables / 2);
      ptx::barrier_wait(shared_.sums_there(i), shared_.table_parity(i));
      if (lane_ == 0) *shared_.label_logit(i) = to_float(logit);
      send_sums(i);
      if (shared_.n_extras == 0) continue;
      ptx::barrier_wait(shared_.extras_there(i), shared_.extras_parity(i));
      send_extras(i);
    }
  }

 private:
  __device__ void send_sums(int row) const {
    constexpr int kKinds = kSums<Kind::kFamily>;
    send<kKinds>(shared_.section_sums(row), shared_.sections_there(row),
                 [&](int i, float(&v)[kKinds]) {
                   put_sums(v, 1, 0,
                            section_sums<Kind>(p_, shared_.sums(row), p_.strips_per_block, i,
                                               p_.cut.strips_per_section));
                 });
  }
  __device__ void send_extras(int row) const {
    with_extras<Kind>(p_, [&]<int kKinds>() {
      send<kKinds>(shared_.section_extras(row), shared_.section_extras_there(row),
                   [&](int i, float(&v)[kKinds]) {
                     section_extras<Kind>(shared_.extras(row), p_.strips_per_block, i,
                                          p_.cut.strips_per_section, v);
                   });
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
