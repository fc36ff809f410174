// What a loss configuration, a plan and a run are held to before any work. Every message names the
// term and the field, the offending value, and what is accepted.
//
// `lossk::validate(config)`, the part that needs neither shape nor data, is declared in
// ullage/lossk/head.h.
#pragma once

#include <cstdint>

#include "ullage/lossk/head.h"

namespace ullage::lossk {

// What `plan` refuses once the shape is known (after `validate`): 581, 583 for the shape; 661, 683
// and 695 for a request that the configuration or the door cannot serve; 662 for a shard outside
// its group's vocabulary; 694 and 697 for a teacher that does not fit the vocabulary; 696 for a
// storage type that is none.
Status check_plan(const Shape& shape, const HeadConfig& config, const Request& request);

// What `run` refuses: 585 upstream, 586 labels, 661 and 663 of a shard, 683 a missing input, 692
// segments, 693 pairs, 694 top-k ids or log-probabilities, 695 shapes, 696 storage types. Reads
// labels, masks, segments, pairs and top-k teachers; of ignored rows only the label. Allocates
// nothing unless it refuses.
Status check_inputs(const Shape& shape, const HeadConfig& config, const Request& request,
                    const Inputs& inputs, const Outputs& outputs);

// What becomes of the three for a shard of a vocabulary (group.h): 661 to 663. A run on a GPU calls
// the last by itself.
Status check_group(const HeadConfig& config);
Status check_shard(const Shape& shape, const HeadOptions& options);
Status check_group_inputs(const Shape& shape, const HeadConfig& config, const Inputs& inputs,
                          const Outputs& outputs);

// --- What the fields that are `kAuto` or not given mean. -----------------------------------------

// Labels lie in [first, last]; those of a shard are its group's.
struct LabelRange {
  int64_t first = 0, last = 0;
};
constexpr LabelRange label_range(const HeadOptions& options, int64_t vocab) {
  if (options.group_vocab > 0) return {0, options.group_vocab - 1};
  return {options.vocab_offset, options.vocab_offset + (vocab - 1)};
}

// Columns that share what label smoothing spreads.
constexpr int64_t whole_vocab(const HeadOptions& options, int64_t vocab) {
  return options.group_vocab > 0 ? options.group_vocab : vocab;
}

inline bool smooths_labels(const HeadConfig& config) {
  for (const LossTerm& term : config.terms) {
    if (term.kind == LossKind::kCrossEntropy && term.label_smoothing > 0) return true;
  }
  return false;
}

constexpr bool is_policy(LossKind kind) {
  return kind == LossKind::kGrpo || kind == LossKind::kGspo || kind == LossKind::kCispo;
}

// Terms that count exactly the rows whose label is >= 0.
constexpr bool needs_labels(LossKind kind) {
  return kind != LossKind::kZLoss && kind != LossKind::kDistillation;
}

constexpr RowMask resolved_mask(const LossTerm& term, bool labels_given, bool mask_given) {
  if (needs_labels(term.kind)) return RowMask::kLabels;
  if (term.mask != RowMask::kAuto) return term.mask;
  if (labels_given) return RowMask::kLabels;
  return mask_given ? RowMask::kOwn : RowMask::kNone;
}

constexpr PolicyNormalizer resolved_normalizer(const LossTerm& term) {
  if (term.normalizer != PolicyNormalizer::kAuto) return term.normalizer;
  return term.kind == LossKind::kGspo ? PolicyNormalizer::kSequences : PolicyNormalizer::kTokens;
}

// Whether the term's row losses, and not only its divisor, depend on segment ids.
constexpr bool needs_segment_ids(const LossTerm& term) {
  return term.kind == LossKind::kGspo || term.kind == LossKind::kDpo ||
         (is_policy(term.kind) && resolved_normalizer(term) == PolicyNormalizer::kSequenceMeans);
}

// Whether the term's default divisor is a number of segments.
constexpr bool divides_by_segments(const LossTerm& term) {
  return is_policy(term.kind) && !term.divisor &&
         resolved_normalizer(term) != PolicyNormalizer::kTokens;
}

// Whether the term counts the row. A row that no term counts and whose label is negative is
// ignored: nothing of it is read.
inline bool counts_row(const LossTerm& term, const Inputs& inputs, int64_t row) {
  switch (resolved_mask(term, static_cast<bool>(inputs.labels), !inputs.mask.empty())) {
    case RowMask::kLabels:
      return inputs.labels[row] >= 0;
    case RowMask::kOwn:
      return inputs.mask[static_cast<size_t>(row)] != 0;
    default:
      return true;
  }
}

}  // namespace ullage::lossk
