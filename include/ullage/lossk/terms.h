// The loss algebra's configuration: any number of terms over the same logits.
//
// Notation of docs/losses.md, used throughout: a = s * softcap(z + bias) are the effective logits
// of a row, lse = ln sum_j exp(a_j), q = softmax(a) the student, p = softmax of the teacher's
// logits, y the row's label, lp = a_y - lse its log-probability. total = sum over terms of weight *
// scalar; scalar = (sum over rows of the term's row loss) / divisor. Terms of weight 0 stay out of
// the sum.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "ullage/dtype.h"

namespace ullage::lossk {

enum class LossKind {
  kCrossEntropy,  // from labels:  -lp
  kZLoss,         // lse^2
  kDistillation,  // a divergence between a teacher's distribution p and q
  kGrpo,          // clipped token ratio (https://arxiv.org/abs/2402.03300)
  kGspo,          // clipped sequence ratio (https://arxiv.org/abs/2507.18071)
  kCispo,  // clipped importance weight, not differentiated (https://arxiv.org/abs/2506.13585)
  kDpo,    // preference pairs (https://arxiv.org/abs/2305.18290)
};

enum class Divergence {
  kCrossEntropy,   // -sum p ln q
  kForwardKl,      // sum p ln(p / q)
  kReverseKl,      // sum q ln(q / p)
  kJensenShannon,  // beta KL(p | m) + (1 - beta) KL(q | m), m = beta p + (1 - beta) q
};

// Which rows a z-loss or distillation term counts.
enum class RowMask {
  kAuto,  // the label mask where labels are given, else kOwn where a mask is given, else every row
  kLabels,  // rows whose label is >= 0
  kOwn,     // rows whose `mask` byte is not 0
  kNone,    // every row
};

// How the token losses of a policy term are weighted, and its divisor where none is given. Segments
// are counted as given, `n_segments`, whether or not they hold a labelled token.
enum class PolicyNormalizer {
  kAuto,           // kTokens for grpo and cispo, kSequences for gspo
  kTokens,         // every token 1; divisor: labelled tokens (dapo, bnpo)
  kSequenceMeans,  // a token 1 / (labelled tokens of its segment); divisor: segments (grpo)
  kSequences,      // every token 1; divisor: segments (the length-proportional gspo)
  kMaxLength,      // every token 1; divisor: segments * max_length (dr_grpo)
};

// What a top-k teacher says about the rest of the vocabulary.
enum class TopKTail {
  kTruncated,     // nothing: the sum runs over the k ids alone
  kTailBin,       // one more bin holds the remaining mass of each side
  kRenormalized,  // both sides are renormalised over the k ids
};

struct LossTerm {
  std::string name = {};  // unique, not empty
  LossKind kind = LossKind::kCrossEntropy;
  double weight =
      1;  // of the scalar in the total; 0 reports the scalar, adds nothing to a gradient
  double logits_scale = 1;  // times the head's; > 0
  // What the sum of row losses is divided by; > 0. Not given: cross_entropy: the sum of the class
  // weights of the valid rows (their number without class weights); z_loss, distillation: the rows
  // counted; policy terms: see PolicyNormalizer; dpo: the pairs. A default of 0 (no rows) gives
  // loss 0 and gradients 0.
  std::optional<double> divisor = {};

  double label_smoothing = 0;  // cross_entropy: in [0, 1], as PyTorch's cross_entropy defines it

  RowMask mask = RowMask::kAuto;  // z_loss, distillation

  Divergence divergence = Divergence::kCrossEntropy;  // distillation
  int teacher = 0;                                    // which of the head's teachers
  double temperature = 1;  // the teacher's logits are multiplied by the term's and the head's
                           // logits_scale and divided by this; > 0. Of a top-k teacher: 1
  double student_temperature = 1;  // divides the student's; > 0
  bool t_squared = false;          // multiply the loss by temperature^2
  double beta = 0.5;               // Jensen-Shannon: in (0, 1). dpo: > 0
  TopKTail top_k_tail = TopKTail::kTailBin;
  bool truncate_teacher =
      false;  // accept a wider teacher: its extra columns are dropped, the rest renormalised

  // Policy terms clip the ratio to [1 - epsilon_low, 1 + epsilon_high]; both >= 0.
  double epsilon_low = 0.2;
  double epsilon_high = 0.2;
  // Policy terms: adds kl_beta * k3 per token, k3 = e^d - d - 1 with d = reference - lp; >= 0.
  double kl_beta = 0;
  PolicyNormalizer normalizer = PolicyNormalizer::kAuto;
  int64_t max_length = 0;  // kMaxLength: positions, > 0
};

enum class TeacherKind {
  kLogits,  // [n_tok][vocab] logits
  kHidden,  // [n_tok][d_model] hidden states and a [vocab][d_model] head: logits are made a chunk
            // at a time
  kTopK,    // [n_tok][k] ids and log-probabilities
};

struct Teacher {
  TeacherKind kind = TeacherKind::kLogits;
  int64_t vocab = 0;                 // columns of its logits or rows of its head (kLogits, kHidden)
  int64_t d_model = 0;               // kHidden
  int64_t k = 0;                     // kTopK
  DType dtype = DType::kF32;         // of its logits or hidden states
  DType weight_dtype = DType::kF32;  // of its head
};

// What stands between the last product and the losses.
struct HeadOptions {
  double logits_scale = 1;  // s, after the softcap; > 0
  double softcap = 0;       // z' = softcap * tanh(z / softcap); 0: none
  bool bias = false;        // z = x W^T + bias
  int64_t adapter_rank =
      0;  // r > 0: z = x (W + adapter_scale * B A)^T, A [r][d_model], B [vocab][r]
  double adapter_scale = 1;
  int64_t vocab_offset =
      0;  // labels count from here: this head holds columns [offset, offset + vocab)
  // > 0: of a vocabulary of so many columns, whose others are other ranks': see group.h. Labels
  // then are those of the whole vocabulary.
  int64_t group_vocab = 0;
};

struct HeadConfig {
  std::vector<LossTerm> terms = {};
  std::vector<Teacher> teachers = {};
  HeadOptions options = {};
};

}  // namespace ullage::lossk
