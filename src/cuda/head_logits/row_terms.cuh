// From a row's sums to every term's loss, and to the few coefficients of its gradient:
//
//   d total / d z_j = q_j (P + R (ln q_j - ln p_j - KL(q | p)) + J (ln (q_j / m_j) - KL(q | m)))
//                     - C p_j - U w_j - L [j = y]
//
// times the softcap's slope; w_j are the class weights, or 1. In kTempered, + C s_j as well, of the
// student s beside the teacher, whose part P has elsewhere.
#pragma once

#include "contract/token_losses.h"
#include "cuda/head_logits/row_sums.cuh"

namespace ullage::lossk::cuda {

// Where a label's column is not one of this head's.
inline constexpr int64_t kNoLabelHere = -1;   // no label, or one outside the vocabulary
inline constexpr int64_t kLabelOfShard = -2;  // another shard's

// What a row brings besides its logits.
struct RowInputs {
  int64_t label = kNoLabelHere;  // a column, or one of the above
  float label_logit = 0;         // z_y, before the softcap
  float upstream = 1, token_weight = 1, class_weight = 1;
  float advantage = 0, old_log_prob = 0, reference_log_prob = 0;
};

struct RowCoefficients {
  float p = 0, label = 0, uniform = 0, teacher = 0, reverse = 0, mix = 0;
};

// An index as it lies in memory, so that nothing waits for it here, and what it says.
__device__ inline uint64_t index_bits_at(const RowIndices& v, int64_t i) {
  return v.id_bytes == 8 ? static_cast<const uint64_t*>(v.data)[i * v.stride]
                         : static_cast<const uint32_t*>(v.data)[i * v.stride];
}
__device__ inline int64_t as_index(const RowIndices& v, uint64_t bits) {
  return v.id_bytes == 8 ? static_cast<int64_t>(bits) : static_cast<int32_t>(bits);
}
__device__ inline int64_t index_at(const RowIndices& v, int64_t i) {
  return as_index(v, index_bits_at(v, i));
}
// One past the last row of this launch.
__device__ inline int64_t end_row(const HeadParams& p) { return p.first_row + p.n_rows; }
// A row's label as stored; -1 where there are none.
__device__ inline int64_t stored_label(const HeadParams& p, int64_t row) {
  return p.labels.data == nullptr ? -1 : index_at(p.labels, row);
}
// Whether a label counts: one of this head's or, of a shard, of its group's.
__device__ inline bool is_label(const HeadParams& p, int64_t label) {
  return label >= p.first_label && label <= p.last_label;
}
__device__ inline bool has_label(const HeadParams& p, int64_t row) {
  return is_label(p, stored_label(p, row));
}
__device__ inline int64_t column_of_label(const HeadParams& p, int64_t label) {
  if (!is_label(p, label)) return kNoLabelHere;
  const int64_t column = label - p.vocab_offset;
  return column >= 0 && column < p.vocab ? column : kLabelOfShard;
}
__device__ inline int64_t label_column(const HeadParams& p, int64_t row) {
  return column_of_label(p, stored_label(p, row));
}

// A labelled row's segment, or -1 where the census refused it.
__device__ inline int64_t as_segment(const HeadParams& p, uint64_t bits) {
  const int64_t segment = as_index(p.segments, bits);
  return segment >= 0 && segment < p.n_segments ? segment : -1;
}
__device__ inline int64_t segment_of(const HeadParams& p, int64_t row) {
  return as_segment(p, index_bits_at(p.segments, row));
}
__device__ inline int tokens_of_segment(const HeadParams& p, int64_t row) {
  const int64_t segment = segment_of(p, row);
  return segment < 0 ? 1 : p.segment_tokens[segment];
}

// Whether anything of the row is read.
__device__ inline bool row_counts(const HeadParams& p, int64_t row, int64_t label) {
  return p.every_row_counts || (p.masked_rows_count && p.mask[row] != 0) || is_label(p, label);
}

__device__ inline bool term_counts(const HeadParams& p, const TermParams& term, int64_t row,
                                   const RowInputs& in) {
  switch (term.mask) {
    case RowMask::kLabels:
      return in.label != kNoLabelHere;
    case RowMask::kOwn:
      return p.mask[row] != 0;
    default:
      return true;
  }
}

// Whether the outputs of rows report it: it has a label, or there are none.
__device__ inline bool is_reported(const HeadParams& p, const RowInputs& in) {
  return p.labels.data == nullptr || in.label != kNoLabelHere;
}

__device__ inline void report(const HeadParams& p, int64_t row, Fault fault) {
  atomicMin(&p.census->fault,
            static_cast<unsigned long long>(row) << 8 | static_cast<unsigned long long>(fault));
}

// All but the label's logit.
__device__ inline RowInputs load_row_vectors(const HeadParams& p, int64_t row, int64_t label) {
  RowInputs in;
  in.label = column_of_label(p, label);
  in.upstream = float_at(p.upstream_rows, row, 1);
  if (in.label == kNoLabelHere) return in;
  in.token_weight = float_at(p.token_weights, row, 1);
  in.class_weight = float_at(p.class_weights, in.label, 1);
  in.advantage = float_at(p.advantages, row, 0);
  in.old_log_prob = float_at(p.old_log_probs, row, 0);
  in.reference_log_prob = float_at(p.reference_log_probs, row, 0);
  return in;
}

// As stored, so that nothing waits for it here.
template <class T>
__device__ inline T label_logit(const HeadParams& p, int64_t row, int64_t label) {
  if (label < 0) return T{};
  return static_cast<const T*>(p.logits)[(row - p.first_row) * p.logits_stride + label];
}

__device__ inline float log_sum_exp(const RowSums& row) {
  return kLn2 * (row.reference + row.log2_sum);
}
// The max-shifted target logit minus the max-shifted log-sum-exp.
template <class Kind>
__device__ inline float label_log_prob(const HeadParams& p, const RowInputs& in,
                                       const RowSums& row) {
  const float x = Kind::kSoftcap ? softcapped(p, in.label_logit) : in.label_logit;
  return kLn2 * (fmaf(x, p.log2_scale, -row.reference) - row.log2_sum);
}

// ln q of a row's label: in a shard, -inf where another has it; in its group. 0 without a label.
__device__ inline float log_prob_of_shard(const RowInputs& in, const RowSums& sums,
                                          float log_prob) {
  const bool nothing = in.label == kLabelOfShard || (in.label >= 0 && sums.sum == 0);
  return nothing ? minus_infinity<float>() : log_prob;
}
__device__ inline float group_log_prob(const HeadParams& p, int64_t row, const RowInputs& in) {
  return in.label == kNoLabelHere ? 0.0f : float_at(p.group_label_log_prob, row, 0);
}

// Of a shard, ln q of the row's label: its group's, whose statistics then take the place of the
// row's own; else that of the shard, -inf where another has the label.
__device__ inline float place_in_group(const HeadParams& p, int64_t row, const RowInputs& in,
                                       RowSums& sums, float log_prob) {
  if (p.group_shift.data == nullptr) return log_prob_of_shard(in, sums, log_prob);
  sums.max = float_at(p.group_shift, row, 0);
  sums.reference = sums.max * p.log2_scale;
  // The sums make up for what rounding the reference takes.
  const float off = fmaf(sums.max, p.log2_scale, -sums.reference);
  sums.log2_sum = fmaf(float_at(p.group_log_sum, row, 0), kLog2E, off);
  sums.sum = exp2f(sums.log2_sum);
  sums.smooth = fmaf(p.smoothed_columns, off, float_at(p.group_distance, row, 0) * kLog2E);
  return group_log_prob(p, row, in);
}

// `normalized`: the sums are those of the second exchange.
__device__ inline float divergence_loss(const TermParams& term, const RowSums& row,
                                        bool normalized) {
  if (normalized) {
    switch (term.divergence) {
      case Divergence::kCrossEntropy:
        return -kLn2 * row.cross;
      case Divergence::kForwardKl:
        return kLn2 * row.forward_kl;
      case Divergence::kReverseKl:
        return kLn2 * row.reverse_kl;
      default:
        return kLn2 *
               fmaf(term.beta, row.teacher_from_mix, (1.0f - term.beta) * row.student_from_mix);
    }
  }
  switch (term.divergence) {
    case Divergence::kCrossEntropy:
      return kLn2 * (row.tempered_log2_sum - row.cross / row.teacher_sum);
    case Divergence::kForwardKl:
      return kLn2 *
             ((row.tempered_log2_sum - row.teacher_log2_sum) - row.forward_kl / row.teacher_sum);
    default:
      return kLn2 * (row.reverse_kl / row.sum - (row.log2_sum - row.teacher_log2_sum));
  }
}

// What a lane's top-k term comes to (top_k.cuh): its loss, and what it adds to every column's q.
struct TopKTerm {
  float loss = 0, dense = 0;
};

// One term's loss of one row, and what it adds to the coefficients.
template <Family kFamily>
__device__ inline float term_of_row(const HeadParams& p, const TermParams& term, int64_t row_index,
                                    const RowInputs& in, const RowSums& row, float term_gain,
                                    float log_prob, const TopKTerm& top_k, RowCoefficients& add) {
  if (!term_counts(p, term, row_index, in)) return 0;
  const float gain = term_gain * in.upstream * term.scale;
  switch (term.kind) {
    case LossKind::kCrossEntropy: {
      const float hit = (1.0f - term.smoothing) * in.class_weight;
      float loss = -hit * log_prob, target_sum = hit, share = 0;
      if (term.smoothing > 0) {
        share = term.smoothing / p.smoothed_columns;
        const auto weight_sum = static_cast<float>(p.census->all_class_weights);
        loss = fmaf(share * kLn2, fmaf(weight_sum, row.log2_sum, -row.smooth), loss);
        target_sum = fmaf(share, weight_sum, hit);
      }
      add.p = gain * in.token_weight * target_sum;
      add.label = gain * in.token_weight * hit;
      add.uniform = gain * in.token_weight * share;
      return in.token_weight * loss;
    }
    case LossKind::kZLoss: {
      const float lse = log_sum_exp(row);
      add.p = gain * 2.0f * lse;
      return lse * lse;
    }
    case LossKind::kDistillation: {
      const float slope = gain * term.loss_scale;
      if (term.top_k) {
        add.p = slope * top_k.dense;
        return term.loss_scale * top_k.loss;
      }
      switch (term.divergence) {
        case Divergence::kReverseKl:
          add.reverse = slope;
          break;
        case Divergence::kJensenShannon:
          add.mix = slope * (1.0f - term.beta);
          break;
        default:
          // Its student's has the coefficient of the teacher.
          if (kFamily != Family::kTempered) add.p = slope;
          add.teacher = slope;
      }
      return term.loss_scale * divergence_loss(term, row, kOwnExtras<kFamily> > 0);
    }
    case LossKind::kGspo:
    case LossKind::kDpo: {
      if (!p.slopes_ready) return 0;
      const float slope = gain * p.row_slopes[term.sequence * p.n_tok + row_index];
      add.p = -slope;
      add.label = -slope;
      return 0;
    }
    default: {
      const float log_ratio = log_prob - in.old_log_prob;
      TokenLoss<float> token =
          term.kind == LossKind::kGrpo
              ? clipped_ratio_loss(log_ratio, in.advantage, term.epsilon_low, term.epsilon_high)
              : clipped_weight_loss(log_prob, log_ratio, in.advantage, term.epsilon_low,
                                    term.epsilon_high);
      if (term.kl_beta > 0) {
        const TokenLoss<float> penalty = k3_penalty(log_prob, in.reference_log_prob);
        token.loss = fmaf(term.kl_beta, penalty.loss, token.loss);
        token.slope = fmaf(term.kl_beta, penalty.slope, token.slope);
      }
      if (term.per_segment_mean) {
        const auto n = static_cast<float>(tokens_of_segment(p, row_index));
        token.loss /= n;
        token.slope /= n;
      }
      add.p = -gain * token.slope;
      add.label = -gain * token.slope;
      return token.loss;
    }
  }
}

// Calls act(member) for each coefficient that a family has.
template <Family kFamily, class Act>
__device__ inline void for_each_coefficient(const Act& act) {
  act(&RowCoefficients::p);
  act(&RowCoefficients::label);
  act(&RowCoefficients::uniform);
  if constexpr (kIsForward<kFamily> || kFamily == Family::kMixed) {
    act(&RowCoefficients::teacher);
  }
  if constexpr (kFamily == Family::kReverse || kFamily == Family::kMixed) {
    act(&RowCoefficients::reverse);
  }
  if constexpr (kOwnExtras<kFamily> > 0) act(&RowCoefficients::mix);
}

// A lane a term, `term`, its gain in that lane; the warp adds up those of this pass, for lane 0.
// `write`: this warp also writes the term's row losses.
template <Family kFamily>
__device__ inline RowCoefficients evaluate_terms(const HeadParams& p, const TermParams& term,
                                                 int64_t row_index, const RowInputs& in,
                                                 const RowSums& row, float gain, float log_prob,
                                                 const TopKTerm& top_k, int lane, bool write) {
  RowCoefficients c;
  if (lane < p.n_terms && term.here) {
    const float loss = term_of_row<kFamily>(p, term, row_index, in, row, gain, log_prob, top_k, c);
    if (term.weight == 0) c = {};
    if (write && term.sequence < 0) p.row_losses[lane * p.n_tok + row_index] = loss;
  }
  for (int step = 1; step < p.n_terms; step *= 2) {
    for_each_coefficient<kFamily>(
        [&](auto which) { c.*which += __shfl_xor_sync(~0u, c.*which, step); });
  }
  return c;
}
// The same by one lane: this pass's terms, each with its own gain, added in the same tree.
template <Family kFamily>
__device__ inline RowCoefficients evaluate_terms_alone(const HeadParams& p, int64_t row_index,
                                                       const RowInputs& in, const RowSums& row,
                                                       float log_prob) {
  constexpr int kLevels = 4;
  static_assert(1 << kLevels == kMaxTerms);
  RowCoefficients level[kLevels], c;
  // Up to a power of two: what is beyond the terms adds 0.
  for (int t = 0; t < p.n_terms || (t & (t - 1)) != 0; ++t) {
    c = {};
    if (t < p.n_terms && p.terms[t].here) {
      const TermParams& term = p.terms[t];
      const float loss =
          term_of_row<kFamily>(p, term, row_index, in, row, p.census->gain[t], log_prob, {}, c);
      if (term.weight == 0) c = {};
      if (term.sequence < 0) p.row_losses[t * p.n_tok + row_index] = loss;
    }
    bool carries = true;
#pragma unroll
    for (int k = 0; k < kLevels; ++k) {
      if (!carries) continue;
      carries = t >> k & 1;
      for_each_coefficient<kFamily>([&](auto which) {
        if (carries) {
          c.*which += level[k].*which;
        } else {
          level[k].*which = c.*which;
        }
      });
    }
  }
  return c;
}
template <Family kFamily>
__device__ inline RowCoefficients evaluate_terms(const HeadParams& p, int64_t row_index,
                                                 const RowInputs& in, const RowSums& row,
                                                 float gain, float log_prob, int lane, bool write) {
  return evaluate_terms<kFamily>(p, p.terms[lane < p.n_terms ? lane : 0], row_index, in, row, gain,
                                 log_prob, {}, lane, write);
}

}  // namespace ullage::lossk::cuda
