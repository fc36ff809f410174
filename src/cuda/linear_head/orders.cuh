// The two orders of a run (config.h), kernel by kernel.
#pragma once

#include "cuda/head_logits/launch.h"
#include "cuda/linear_head/steps.cuh"

namespace ullage::lossk::cuda {

using product::BlockedMatrix;

// One range in `memory`, for `rows` rows of `columns` columns.
inline BlockedMatrix kept_in(void* memory, int64_t rows, int64_t columns) {
  BlockedMatrix e;
  e.last = memory;
  e.rows = rows;
  e.n_blocks = e.range_blocks = static_cast<int>(divide_up(columns, product::kBlockColumns));
  return e;
}

// All ranges but the last in d_weight's memory, each where the next range of d_weight will be.
inline BlockedMatrix lodged_in_weight(const LinearParams& r, int64_t rows) {
  BlockedMatrix e = kept_in(r.lodged_end, rows, r.vocab);
  e.n_ranges = r.layout.n_ranges;
  e.range_blocks = static_cast<int>(r.layout.range_columns / product::kBlockColumns);
  const bool rounds = r.d_weight_rounded != nullptr;
  const int64_t halves = rounds ? 1 : 2;  // 16-bit numbers an element of d_weight holds
  e.first = static_cast<uint16_t*>(rounds ? r.d_weight_rounded : r.d_weight_sum) +
            halves * r.layout.range_columns * r.d_model;
  e.range_stride = halves * r.layout.range_columns * r.d_model;
  return e;
}

// A group's exponentials that do not lie there.
inline BlockedMatrix beside_lodged(const LinearParams& r, const RowGroup& group) {
  return kept_in(r.exponentials, group.rows - group.lodged, r.vocab);
}

// One range of e, as a matrix of its own.
inline BlockedMatrix range_of(const BlockedMatrix& e, int range) {
  BlockedMatrix only;
  const int first_block = range * e.range_blocks;
  only.rows = e.rows;
  only.n_blocks = range == e.n_ranges - 1 ? e.n_blocks - first_block : e.range_blocks;
  only.range_blocks = only.n_blocks;
  only.last = e.block(first_block);
  return only;
}

// Calls step(part) for every part of a group that starts at row `first`.
template <class Step>
Status for_each_part(const LinearParams& r, int64_t first, const RowGroup& group,
                     const Step& step) {
  const auto in_parts = [&](const BlockedMatrix& e, int64_t begin, int64_t end) -> Status {
    for (int64_t row = begin; row < end; row += group.part) {
      const int64_t rows = std::min(group.part, end - row);
      ULLAGE_RETURN_IF_REFUSED(step(Part{first + row, rows, 0, r.vocab, e, row - begin, row}));
    }
    return kCudaOk;
  };
  if (group.lodged > 0)
    ULLAGE_RETURN_IF_REFUSED(in_parts(lodged_in_weight(r, group.lodged), 0, group.lodged));
  return in_parts(beside_lodged(r, group), group.lodged, group.rows);
}

// d_weight (+)= E^T scaled_hidden over a group. Where exponentials lie in d_weight's memory the
// product takes their place.
template <class T>
Status add_group(const LinearParams& r, const RowGroup& group, bool keeps_old,
                 cudaStream_t stream) {
  const BlockedMatrix beside = beside_lodged(r, group);
  WeightPart part{beside, {}, 0, group.rows, group.rows, 0, 0, r.vocab, r.d_weight_sum, keeps_old};
  if (group.lodged > 0) {
    part.e = lodged_in_weight(r, group.lodged);
    part.more = beside;
    part.more_from = group.lodged;
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "linear_head counts of tiles",
        cudaMemsetAsync(r.tiles_read, 0, static_cast<size_t>(part.e.n_ranges) * sizeof(int),
                        stream));
  }
  return start_weight_part<T>(r, part, stream);
}

// d_weight range by range, each from all rows: those whose exponentials are made again first.
template <class T>
Status add_strips(const HeadParams& p, const LinearParams& r, bool accumulates,
                  cudaStream_t stream) {
  const LinearLayout& layout = r.layout;
  const int64_t n = r.n_tok, again = layout.recomputed;
  const bool rounds = r.d_weight_rounded != nullptr, held = layout.slab >= n;
  if (held) ULLAGE_RETURN_IF_REFUSED(start_scaled_rows<T>(r, 0, n, stream));
  for (int i = 0; i < layout.n_ranges; ++i) {
    const auto [column, columns] = layout.range_at(i, r.vocab);
    float* const sum = r.d_weight_sum + (rounds ? 0 : column * r.d_weight_sum_stride);
    bool keeps_old = accumulates;
    const auto add = [&](const BlockedMatrix& e, int64_t e_row, int64_t first,
                         int64_t rows) -> Status {
      if (!held) ULLAGE_RETURN_IF_REFUSED(start_scaled_rows<T>(r, first, rows, stream));
      ULLAGE_RETURN_IF_REFUSED(start_weight_part<T>(
          r, {e, {}, e_row, rows, rows, held ? first : 0, column, columns, sum, keeps_old},
          stream));
      keeps_old = true;
      return kCudaOk;
    };
    for (int64_t first = 0; first < again; first += layout.slab) {
      const int64_t rows = std::min(layout.slab, again - first);
      const Part part{first, rows, column, columns, kept_in(r.made_again, rows, columns), 0, 0};
      const int n_tiles = static_cast<int>(divide_up(columns, LogitsTile::kN));
      ULLAGE_RETURN_IF_REFUSED(start_logits<T>(p, r, part, n_tiles, true, stream));
      ULLAGE_RETURN_IF_REFUSED(start_settled_strip<T>(r, part, stream));
      ULLAGE_RETURN_IF_REFUSED(add(part.e, 0, first, rows));
    }
    for (int64_t first = again; first < n; first += layout.slab) {
      const BlockedMatrix kept = range_of(lodged_in_weight(r, n - again), i);
      ULLAGE_RETURN_IF_REFUSED(add(kept, first - again, first, std::min(layout.slab, n - first)));
    }
    if (rounds) ULLAGE_RETURN_IF_REFUSED(finish_weight_gradient<T>(r, column, columns, stream));
  }
  return rounds ? Status(kCudaOk) : finish_weight_gradient<T>(r, 0, r.vocab, stream);
}

// From label columns to gradients.
template <class T>
Status launch_order(HeadParams p, const LinearParams& r, cudaStream_t stream) {
  const LinearLayout& layout = r.layout;
  const bool wants_d_weight = r.wants_d_weight();
  const bool gradients = r.d_hidden != nullptr || wants_d_weight;
  const bool sequences = p.n_sequence_terms > 0 && r.n_tok > 0;
  const bool one_part = layout.longest_part() >= r.n_tok;
  // Strips read the last group's exponentials, d_hidden every group's.
  const auto stores = [&](int64_t first) {
    return layout.strips ? r.d_hidden != nullptr || first >= layout.recomputed : gradients;
  };
  const auto each_group = [&](const auto& step) -> Status {
    for (int64_t first = 0; first < r.n_tok;) {
      const RowGroup group = layout.group_at(first, r.n_tok);
      ULLAGE_RETURN_IF_REFUSED(step(first, group));
      first += group.rows;
    }
    return kCudaOk;
  };
  if (sequences) {
    // A sequence's slope needs the log-probabilities of all its rows.
    ULLAGE_RETURN_IF_REFUSED(each_group([&](int64_t first, const RowGroup& group) {
      return for_each_part(r, first, group, [&](const Part& part) -> Status {
        const bool keeps = gradients && one_part && stores(part.first);
        ULLAGE_RETURN_IF_REFUSED(start_logits<T>(p, r, part, layout.n_tiles, keeps, stream));
        return start_rows<T>(p, r, part, false, false, stream);
      });
    }));
    ULLAGE_RETURN_IF_REFUSED(launch_sequences(p, stream));
    p.slopes_ready = true;
  }
  const bool accumulates = r.accumulate && r.d_weight_rounded == nullptr;
  if (gradients || !sequences) {
    ULLAGE_RETURN_IF_REFUSED(each_group([&](int64_t first, const RowGroup& group) -> Status {
      ULLAGE_RETURN_IF_REFUSED(for_each_part(r, first, group, [&](const Part& part) -> Status {
        const bool store = stores(part.first);
        if (!(sequences && one_part))
          ULLAGE_RETURN_IF_REFUSED(start_logits<T>(p, r, part, layout.n_tiles, store, stream));
        ULLAGE_RETURN_IF_REFUSED(start_rows<T>(p, r, part, store, gradients, stream));
        if (gradients && r.filter.threshold > 0)
          ULLAGE_RETURN_IF_REFUSED(start_filter(r, part, stream));
        if (r.d_hidden == nullptr) return kCudaOk;
        ULLAGE_RETURN_IF_REFUSED(start_hidden_product<T>(r, part, stream));
        return start_hidden_gradient<T>(r, part, stream);
      }));
      if (!wants_d_weight || layout.strips) return kCudaOk;
      return add_group<T>(r, group, accumulates || first > 0, stream);
    }));
  }
  if (!wants_d_weight) return kCudaOk;
  if (layout.strips) return add_strips<T>(p, r, accumulates, stream);
  if (r.n_tok == 0 && !accumulates) {
    ULLAGE_RETURN_IF_CUDA_FAILS(
        "linear_head d_weight of no rows",
        cudaMemset2DAsync(r.d_weight_sum, static_cast<size_t>(r.d_weight_sum_stride) * 4, 0,
                          static_cast<size_t>(r.d_model) * 4, static_cast<size_t>(r.vocab),
                          stream));
  }
  return finish_weight_gradient<T>(r, 0, r.vocab, stream);
}

}  // namespace ullage::lossk::cuda
