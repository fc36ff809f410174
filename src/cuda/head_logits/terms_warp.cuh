// A warp of a cluster's block that evaluates the terms of every p.terms_warps-th row
// (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"
#include "cuda/head_logits/row_vectors.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

template <class Kind>
class TermsWarp {
  using T = typename Kind::Element;
  static constexpr bool kOwn = kOwnExtras<Kind::kFamily> > 0;

 public:
  __device__ TermsWarp(const ClusterShared<Kind>& shared, int warp, int lane)
      : p_(shared.p),
        shared_(shared),
        warp_(warp),
        lane_(lane),
        writes_(ptx::cluster_rank() == 0),
        is_alone_(ptx::cluster_size() == 1),
        n_sections_(p_.cut.n_strips / p_.cut.strips_per_section) {}

  __device__ void run() {
    const TermParams term = p_.terms[lane_ < p_.n_terms ? lane_ : 0];
    RowVectors<T> vectors(p_, is_alone_, lane_);
    RowId row = shared_.wait_for_id(warp_);
    if (row.counts()) vectors.ask(p_.first_row + row.row(), row.label);
    ptx::wait_for_previous_kernel();
    const float gain = lane_ < p_.n_terms ? p_.census->gain[lane_] : 0.0f;
    for (int i = warp_; !row.is_none(); i += p_.terms_warps) {
      const int64_t at = p_.first_row + row.row();
      RowInputs in;
      FinishedRow done;
      if (row.counts()) {
        RowSums sums = sums_of(i);
        in = vectors.inputs();
        if (!is_alone_) in.label_logit = *shared_.label_logit(i);
        if constexpr (kOwn) {
          done = begin_row<Kind>(p_, term, at, in, sums, gain, lane_);
          take_extras(i, sums);
          complete_word<Kind>(sums, done.word);
        } else {
          if (shared_.n_extras > 0) take_extras(i, sums);
          done = finish_row<Kind>(p_, term, at, in, sums, gain, lane_, writes_);
        }
        if (lane_ == 0) *shared_.word(i) = done.word;
      } else {
        pass(i);
      }
      __syncwarp();
      if (lane_ == 0) ptx::barrier_arrive(shared_.word_there(i));
      __syncwarp();
      // What the next row brings travels while this one's outputs are written.
      const RowId next = shared_.wait_for_id(i + p_.terms_warps);
      if (next.counts()) vectors.ask(p_.first_row + next.row(), next.label);
      if (writes_ && row.counts()) {
        if constexpr (kOwn) write_losses<Kind>(p_, term, at, in, done, gain, lane_);
        write_finished_row<Kind>(p_, at, in, done, lane_);
      }
      if (writes_ && !row.counts()) clear_row(p_, at, lane_);
      row = next;
    }
  }

 private:
  __device__ void wait_for_sums(int i) const {
    if (is_alone_) {
      ptx::barrier_wait(shared_.sums_there(i), shared_.table_parity(i));
    } else {
      ptx::barrier_wait(shared_.sections_there(i), shared_.table_parity(i));
    }
  }
  __device__ void wait_for_extras(int i) const {
    if (is_alone_) {
      ptx::barrier_wait(shared_.extras_there(i), shared_.extras_parity(i));
    } else {
      ptx::barrier_wait(shared_.section_extras_there(i), shared_.extras_parity(i));
    }
  }

  // Of the first exchange; told to the column warps where there is a second.
  __device__ RowSums sums_of(int i) const {
    float* const sections = shared_.section_sums(i);
    wait_for_sums(i);
    if (is_alone_) {
      fold_strips<Kind>(p_, shared_.sums(i), p_.strips_per_block, sections, lane_);
    }
    const RowSums sums = row_sums<Kind>(p_, sections, n_sections_, lane_);
    if (shared_.n_extras == 0) return sums;
    if (lane_ == 0) {
      shared_.word(i)->sums = sums;
      ptx::barrier_arrive(shared_.row_sums_there(i));
    }
    __syncwarp();
    return sums;
  }
  __device__ void take_extras(int i, RowSums& sums) const {
    wait_for_extras(i);
    if (is_alone_) {
      fold_extras<Kind>(p_, shared_.extras(i), p_.strips_per_block, shared_.section_extras(i),
                        lane_);
    }
    add_extras<Kind>(p_, shared_.section_extras(i), n_sections_, lane_, sums);
  }

  // A row that no term counts takes the same way, with nothing.
  __device__ void pass(int i) const {
    wait_for_sums(i);
    if (shared_.n_extras == 0) return;
    __syncwarp();
    if (lane_ == 0) ptx::barrier_arrive(shared_.row_sums_there(i));
    wait_for_extras(i);
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  int warp_;  // of the block's for the terms
  int lane_;
  bool writes_;    // the row's outputs
  bool is_alone_;  // of its cluster
  int n_sections_;
};

#endif

}  // namespace ullage::lossk::cuda
