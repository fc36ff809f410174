// head_rows_sm80_streamed: a block a row, read where it lies. Three or four reads of a row, all but
// the first from L1 or L2 while (rows at work) x (row bytes) fit: 108 blocks of 297 KiB on an A100
// do.
#pragma once

#include "cuda/head_logits/streamed_strip.cuh"

namespace ullage::lossk::cuda {

template <class Kind>
__global__ void __launch_bounds__(512, 2) streamed_rows(const __grid_constant__ HeadParams p) {
  // strips' sums | sections' sums | strips' extras | sections' extras, each [kind][strip or
  // section]
  extern __shared__ __align__(16) float streamed_tables[];
  using T = typename Kind::Element;
  constexpr int kSumKinds = kSums<Kind::kFamily>, kExtraKinds = kExtras<Kind::kFamily>;
  __shared__ alignas(RowWord) std::byte word_bytes[sizeof(RowWord)];  // no constructor runs
  RowWord& word = reinterpret_cast<RowWord&>(word_bytes);
  const int warp = ullage::cuda::ptx::warp_of_block(), lane = threadIdx.x % 32;
  const int n_strips = p.cut.n_strips, n_sections = n_strips / p.cut.strips_per_section;
  float* const sums = streamed_tables;
  float* const section_table = sums + kSumKinds * n_strips;
  float* const extras = section_table + kSumKinds * kMaxSections;
  float* const section_extras = extras + kExtraKinds * n_strips;
  const int first = warp * p.strips_per_warp, last = first + p.strips_per_warp;
  const TermParams& term = p.terms[lane < p.n_terms ? lane : 0];
  float gain = 0;
  bool gain_known = false;
  const auto wait_for_census = [&] {
    if (gain_known) return;
    ullage::cuda::ptx::wait_for_previous_kernel();
    gain = lane < p.n_terms ? p.census->gain[lane] : 0.0f;
    gain_known = true;
  };
  for (int64_t row = p.first_row + blockIdx.x; row < end_row(p); row += gridDim.x) {
    const int64_t label = stored_label(p, row);
    const int span_column = first_column(p, first);
    T* const to = gradient_at<T>(p, row, span_column);
    const int span_columns = columns_between(p, first, last);
    if (!row_counts(p, row, label)) {
      wait_for_census();
      clear_gradient(p, to, span_columns, lane);
      if (warp == 0) clear_row(p, row, lane);
      continue;
    }
    RowInputs in;
    if (warp == 0) {
      in = load_row_vectors(p, row, label);
      in.label_logit = to_float(label_logit<T>(p, row, in.label));
    }
    for (int s = first; s < last; ++s) {
      const int64_t column = first_column(p, s);
      const int columns = columns_between(p, s, s + 1);
      with_columns<Kind>(p, row, column, [&](const auto& student, const auto& teacher) {
        const StripMaxima most = strip_maxima<Kind>(student, teacher, columns, lane);
        put_strip(sums, n_strips, s, most,
                  lane_sums<Kind>(p, student, teacher, columns, lane, most), lane);
      });
    }
    __syncthreads();
    RowSums total;
    if (warp == 0) {
      fold_strips<Kind>(p, sums, n_strips, section_table, lane);
      total = row_sums<Kind>(p, section_table, n_sections, lane);
    }
    if (kOwnExtras<Kind::kFamily> > 0 || wants_extra<Kind::kFamily>(p)) {
      if (threadIdx.x == 0) word.sums = total;
      __syncthreads();
      for (int s = first; s < last; ++s) {
        const int64_t column = first_column(p, s);
        const int columns = columns_between(p, s, s + 1);
        with_columns<Kind>(p, row, column, [&](const auto& student, const auto& teacher) {
          put_strip_extras<Kind, true>(p, extras, n_strips, s, student, teacher, columns, column,
                                       word.sums, lane);
        });
      }
      __syncthreads();
      if (warp == 0) {
        fold_extras<Kind>(p, extras, n_strips, section_extras, lane);
        add_extras<Kind>(p, section_extras, n_sections, lane, total);
      }
    }
    if (warp == 0) {
      wait_for_census();
      const FinishedRow done = finish_row<Kind>(p, term, row, in, total, gain, lane, true);
      if (lane == 0) word = done.word;
      write_finished_row<Kind>(p, row, in, done, lane);
    }
    __syncthreads();
    if (p.gradient != nullptr) {
      with_columns<Kind>(p, row, span_column, [&](const auto& student, const auto& teacher) {
        write_gradient<Kind>(p, student, teacher, span_columns, to, span_column, word, lane);
      });
    }
    __syncthreads();  // every warp has read this row's word
  }
  ullage::cuda::ptx::let_next_kernel_start();
}

struct StreamedRows {
  template <class Kind>
  static const void* of() {
    return reinterpret_cast<const void*>(&streamed_rows<Kind>);
  }
};

}  // namespace ullage::lossk::cuda
