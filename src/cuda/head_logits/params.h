// What one run hands its kernels, by value. Plain data, no CUDA header: the host's plan fills it.
// Every pointer is device memory; n = n_tok, V = vocab.
#pragma once

#include <cstdint>

#include "ullage/dtype.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk::cuda {

// A launch evaluates every term; a warp gives each term a lane and one shuffle tree adds them up.
inline constexpr int kMaxTerms = 16;

// A row is cut into at most this many strips of columns, each summed by one warp. The cut depends
// on V alone, and strip sums are added in strip order, so a row's sums are the same bits whatever
// kernel, cluster or number of warps computes them.
inline constexpr int kMaxStrips = 128;
inline constexpr int kLaneColumns = 8;                  // adjacent columns a lane takes at a time
inline constexpr int kWarpColumns = 32 * kLaneColumns;  // columns a warp takes at a time

// What the row kernel sums besides the softmax of the logits, fixed when it is compiled.
enum class Family : int {
  kLabels,   // no dense teacher
  kForward,  // sum p ln p, sum p ln q: distillation by cross-entropy or forward KL
  kReverse,  // sum q ln(q / p)
  kMixed,    // any divergences together, Jensen-Shannon among them: one more pass over the row
};
inline constexpr int kFamilies = 4;

// Values that a strip brings to an exchange between warps (row_sums.cuh).
constexpr int n_sums(Family family) {
  return family == Family::kLabels    ? 2
         : family == Family::kForward ? 6
         : family == Family::kReverse ? 5
                                      : 4;
}
constexpr int n_mixed_extras(Family family) { return family == Family::kMixed ? 5 : 0; }
inline constexpr int kCommonExtras = 3;

// What a row kernel is compiled for.
template <class T, Family kFamily_, bool kSoftcap_>
struct RowKind {
  using Element = T;
  static constexpr Family kFamily = kFamily_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr bool kHasTeacher = kFamily_ != Family::kLabels;
  static constexpr int kUnroll = kHasTeacher || kSoftcap_ ? 1 : 2;  // vectors under way in a pass
};

struct RowFloats {
  const float* data = nullptr;  // may be nullptr
  int64_t stride = 1;           // elements; 0 repeats one value
};

struct RowIndices {
  const void* data = nullptr;  // may be nullptr
  int64_t stride = 1;
  int id_bytes = 8;
};

struct RowOutput {
  float* data = nullptr;  // may be nullptr
  int64_t stride = 1;
};

struct TermParams {
  LossKind kind = LossKind::kCrossEntropy;
  Divergence divergence = Divergence::kCrossEntropy;
  RowMask mask = RowMask::kNone;  // resolved: kLabels, kOwn or kNone
  bool per_segment_mean = false;  // token losses are divided by their segment's labelled tokens
  bool census_divisor = false;    // `divisor` is not known before the rows are counted
  bool wants_metrics = false;     // grpo and gspo
  int sequence = -1;              // gspo and dpo: which of the sequence terms this is
  float smoothing = 0;
  float beta = 0.5f;
  float epsilon_low = 0, epsilon_high = 0;
  float kl_beta = 0;
  float loss_scale = 1;  // t_squared
  double weight = 1;
  double divisor = 0;  // 0: loss and gradient are 0
};

// What the census finds, and the row kernel's scratch words. One a run, in the workspace.
struct Census {
  // The first refused row: row << 8 | Fault; ~0 where there is none.
  unsigned long long fault;
  long long n_labelled;      // rows whose label is >= 0; every row without labels
  double all_class_weights;  // over the vocabulary; V without class weights
  double inverse_divisor[kMaxTerms];
  double scalars[kMaxTerms];
  float gain[kMaxTerms];  // upstream * weight / divisor
  unsigned finished;      // blocks of the last kernel that wrote their scalar
};

enum class Fault : int { kLabel = 1, kNonFinite = 2, kSegment = 3, kPair = 4, kTopK = 5 };

struct HeadParams {
  // --- The rows of one launch: first_row to first_row + n_rows - 1 of n_tok. The matrices hold
  // these rows alone; every vector over rows holds all n_tok.
  const void* logits = nullptr;   // [n_rows][V]
  const void* teacher = nullptr;  // [n_rows][V or more]
  void* gradient = nullptr;       // [n_rows][V], nullptr: forward only; may be the logits
  int64_t logits_stride = 0, teacher_stride = 0, gradient_stride = 0;  // elements
  int64_t n_tok = 0;
  int64_t first_row = 0, n_rows = 0;
  int64_t vocab = 0;
  int64_t vocab_offset = 0;
  int64_t first_label = 0, last_label = -1;  // that count: of these columns, or of a shard's group
  bool is_shard = false;
  float smoothed_columns = 1;  // of the vocabulary, or of a shard's group
  bool accumulate = false;     // the gradient is added to what `gradient` holds

  // --- How the row is cut (config.h).
  int strip_columns = 0;  // a multiple of kWarpColumns
  int n_strips = 0;
  int last_columns = 0;  // of the last strip
  int strips_per_block = 0;
  int strips_per_warp = 0;    // a warp takes adjacent strips
  int strip_pitch_bytes = 0;  // a strip in shared memory
  int row_bytes = 0;          // a block's strips, the teacher's included
  int partial_bytes = 0;      // the exchanged strip sums

  // --- The algebra.
  float scale = 1;       // a = scale * softcap(z)
  float log2_scale = 1;  // scale * log2 e
  float teacher_log2_scale = 1;
  float softcap = 0, inverse_softcap = 0;  // 0: none
  float mix_beta = 0.5f;                   // of every Jensen-Shannon term
  bool wants_cross = false;                // kForward: a term is a cross-entropy
  bool wants_forward_kl = false;           // kForward: a term is a forward KL
  bool wants_entropy = false;
  bool wants_argmax = false;
  bool wants_smoothing = false;    // a term smooths its labels
  bool smooths_by_class = false;   // and there are class weights
  bool every_row_counts = false;   // a term counts rows whatever their label, or there are none
  bool masked_rows_count = false;  // a term counts the rows whose mask byte is not 0
  int n_terms = 0;
  int n_sequence_terms = 0;
  int top_k = 0;  // k of a top-k teacher, 0: none
  TopKTail top_k_tail = TopKTail::kTailBin;
  TermParams terms[kMaxTerms];

  // --- Row inputs.
  RowIndices labels;
  RowIndices segments;
  RowIndices pairs;
  RowIndices top_k_ids;       // [n * k]
  RowFloats top_k_log_probs;  // [n * k]
  int64_t n_segments = 0, n_pairs = 0;
  const uint8_t* mask = nullptr;
  RowFloats token_weights, class_weights, advantages, old_log_probs, reference_log_probs;
  RowFloats group_shift, group_log_sum, group_label_log_prob, group_distance, group_entropy;
  RowFloats upstream_rows;
  double upstream = 1;

  // --- Workspace.
  Census* census = nullptr;
  int* segment_tokens = nullptr;   // [n_segments] labelled rows
  double* segment_sums = nullptr;  // [n_sequence_terms][2][n_segments]: log ratios, advantages
  float* row_log_prob = nullptr;   // [n]
  float* row_entropy = nullptr;    // [n], with wants_entropy
  float* row_losses = nullptr;     // [n_terms][n]
  float* row_slopes = nullptr;     // [n_sequence_terms][n]: d loss / d lp
  bool slopes_ready = false;       // this launch adds the sequence terms' slopes

  // --- Row outputs.
  RowOutput token_loss, lse, label_log_prob, entropy, shift, log_sum, distance;
  int64_t* argmax = nullptr;
  uint8_t* correct = nullptr;

  // --- Scalars.
  double* term_scalars = nullptr;  // [n_terms]
  double* total = nullptr;
  int64_t* n_valid = nullptr;
  PolicyMetrics* policy_metrics = nullptr;  // [n_terms]
};

}  // namespace ullage::lossk::cuda
