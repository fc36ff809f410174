// The warp of a cluster's block that evaluates the terms (cluster_rows.cuh).
#pragma once

#include "cuda/head_logits/cluster_shared.cuh"
#include "cuda/head_logits/row_vectors.cuh"

namespace ullage::lossk::cuda {

#if ULLAGE_SM90

template <class Kind>
class TermsWarp {
  using T = typename Kind::Element;

 public:
  __device__ TermsWarp(const ClusterShared<Kind>& shared, const ClusterRowsOf& rows, int lane)
      : p_(shared.p),
        shared_(shared),
        rows_(rows),
        lane_(lane),
        writes_(ptx::cluster_rank() == 0),
        is_alone_(ptx::cluster_size() == 1),
        n_sections_(p_.cut.n_strips / p_.cut.strips_per_section) {}

  __device__ void run() {
    const TermParams term = p_.terms[lane_ < p_.n_terms ? lane_ : 0];
    RowVectors<T> vectors(p_, lane_);
    const auto ask = [&](int i) {
      if (i < rows_.count) vectors.ask(rows_.row(i));
      if (i + 1 < rows_.count) vectors.look_ahead(rows_.row(i + 1));
    };
    if (rows_.count > 0) vectors.look_ahead(rows_.row(0));
    ask(0);
    ptx::wait_for_previous_kernel();
    const float gain = lane_ < p_.n_terms ? p_.census->gain[lane_] : 0.0f;
    RingCursor table;
    unsigned n = 0;  // of the rows that count
    for (int i = 0; i < rows_.count; ++i) {
      const bool counts = vectors.counts();
      const RowInputs in = vectors.inputs();
      ask(i + 1);
      if (counts) {
        evaluate(rows_.row(i), in, term, gain, table, n++);
        table.advance(kSectionTables);
      } else if (writes_) {
        clear_row(p_, rows_.row(i), lane_);
      }
    }
  }

 private:
  __device__ void evaluate(int64_t row, const RowInputs& in, const TermParams& term, float gain,
                           const RingCursor& table, unsigned n) {
    float* const sections = shared_.section_sums(table.at);
    // Also: every column warp is done with the word of the row before last.
    ptx::barrier_wait(shared_.sums_there(n), n / 2 % 2);
    if (is_alone_) {
      fold_strips<Kind>(p_, shared_.sums(n), p_.strips_per_block, sections, lane_);
    } else {
      ptx::barrier_wait(shared_.sections_there(table.at), table.parity);
    }
    RowSums sums = row_sums<Kind>(p_, sections, n_sections_, lane_);
    if (shared_.has_extras) {
      if (lane_ == 0) {
        shared_.word(n)->sums = sums;
        ptx::barrier_arrive(shared_.row_sums_there());
      }
      __syncwarp();
      if (is_alone_) {
        ptx::barrier_wait(shared_.extras_there(), n % 2);
        fold_extras<Kind>(p_, shared_.extras(), p_.strips_per_block, shared_.section_extras(n),
                          lane_);
      } else {
        ptx::barrier_wait(shared_.section_extras_there(n), n / 2 % 2);
      }
      add_extras<Kind>(shared_.section_extras(n), n_sections_, lane_, sums);
    }
    const FinishedRow done = finish_row<Kind>(p_, term, row, in, sums, gain, lane_, writes_);
    if (lane_ == 0) {
      *shared_.word(n) = done.word;
      ptx::barrier_arrive(shared_.word_there(n));
    }
    __syncwarp();
    if (writes_) write_finished_row<Kind>(p_, row, in, done, lane_);
  }

  const HeadParams& p_;
  const ClusterShared<Kind>& shared_;
  const ClusterRowsOf& rows_;
  int lane_;
  bool writes_;    // the row's outputs
  bool is_alone_;  // of its cluster
  int n_sections_;
};

#endif

}  // namespace ullage::lossk::cuda
