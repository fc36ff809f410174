// What one run hands its kernels, by value. Plain data, no CUDA header: the host's plan fills it.
// Every pointer is device memory; n = n_tok, V = vocab.
#pragma once

#include <bit>
#include <cstdint>

#include "ullage/dtype.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk::cuda {

// Of a head; those that a launch evaluates are added in one tree of all (row_terms.cuh).
inline constexpr int kMaxTerms = 16;

inline constexpr int kLaneColumns = 8;                  // adjacent columns a lane takes at a time
inline constexpr int kWarpColumns = 32 * kLaneColumns;  // columns a warp takes at a time, a round

// How a row is cut, a function of V, type and family, so that a row's sums are the same bits
// whatever kernel, cluster or number of warps forms them: into rounds of kWarpColumns, those into
// strips, each summed by one warp, those into sections, whose strips are added in a tree; then the
// sections.
inline constexpr int kMaxStrips = 256;
inline constexpr int kMaxSections = 16;  // a cluster has at most as many blocks
inline constexpr int kMaxColumnWarps = 16;
// Of a cluster's block (cluster_rows.cuh): one for loads, two for the terms and one that sends; a
// block alone sends nothing, and has three for the terms. 20 warps can have 96 registers a lane, 21
// only 80.
inline constexpr int kOtherWarps = 4;
// 64 registers a thread leave room for this many warps of the streamed kernel on a multiprocessor.
inline constexpr int kResidentWarps = 32;
// Short rows: warps of a block, blocks of a multiprocessor, rows that a warp takes at a time at
// most.
inline constexpr int kShortWarps = 8, kShortBlocks = 3, kRowsOfWarp = 16;
inline constexpr int64_t kTopKSumsBytes = 256;  // of the gather of top-k ids, at most
struct RowCut {
  int n_rounds = 0;  // the last may be short
  int n_strips = 1;  // 2^log2_strips or three times as many
  int log2_strips = 0;
  bool in_thirds = false;      // three times; strip s starts at round s * n_rounds / n_strips
  int strips_per_section = 1;  // a power of two
};

inline constexpr int64_t kRowWordBytes = 128;  // what the terms' warps tell the others (RowWord)
// Bytes of the rows that a warp of short rows takes at a time: what all warps go through twice more
// mostly fits L1, and a lane's part its registers.
inline constexpr int64_t kShortBytes = 8192;
// Short rows in registers: warps of a block, blocks of a multiprocessor, vectors that a lane holds,
// a teacher's included, and so the rows that a warp takes at a time: of one strip, or of several of
// up to kRoundsOfStrip.
inline constexpr int kHeldWarps = 4, kHeldBlocks = 3, kRoundsOfStrip = 4;
constexpr int vectors_held(int64_t element_bytes) {
  return static_cast<int>(kShortBytes / (kWarpColumns * element_bytes));
}
// Shared memory of a warp: the next rows, and the words of its own.
inline constexpr int64_t kHeldBytes = kShortBytes + kRowsOfWarp * kRowWordBytes;
constexpr int rounds_held(const RowCut& cut) {
  return cut.n_strips == 1 ? cut.n_rounds : cut.n_strips * kRoundsOfStrip;
}
// `vectors`: of a row and its teacher's.
constexpr int rows_held(int64_t element_bytes, int vectors) {
  return static_cast<int>(
      std::bit_floor(static_cast<unsigned>(vectors_held(element_bytes) / vectors)));
}

// What the row kernel sums besides the softmax of the logits, fixed when it is compiled.
enum class Family : int {
  kLabels,         // no dense teacher: nothing
  kForward,        // sum p ln q or sum p ln (q / p): distillation by cross-entropy or by forward KL
  kReverse,        // sum q ln(q / p)
  kMixed,          // several divergences together: one more pass over the row
  kJensenShannon,  // sum p ln(p / m) and sum q ln(q / m) of a mixture m: one more pass as well
  kEntropy,        // no dense teacher: sum q ln q, of a run that asks for no other extra
  kTempered,       // kForward of a student at a scale of its own, beside terms of the labels'
};
inline constexpr int kFamilies = 7;

constexpr bool has_teacher(Family family) {
  return family != Family::kLabels && family != Family::kEntropy;
}
constexpr int n_matrices(Family family) { return has_teacher(family) ? 2 : 1; }
// sum p ln q or sum p ln (q / p).
constexpr bool is_forward(Family family) {
  return family == Family::kForward || family == Family::kTempered;
}
// Whether the first pass sums logarithms beside the exponentials.
constexpr bool has_log_sum(Family family) {
  return is_forward(family) || family == Family::kReverse || family == Family::kEntropy;
}
// Of a row that is held in registers. Of several strips, sums of logarithms are sooner formed by a
// cluster (4096 columns: 1.52 times the copy, not 1.58).
constexpr int most_strips_held(Family family) { return has_log_sum(family) ? 1 : kMaxStrips; }
// Values that a strip brings to the two exchanges of a row (row_sums.cuh).
constexpr int n_sums(Family family) {
  return (has_teacher(family) ? 4 : 2) + (has_log_sum(family) ? 1 : 0) +
         (family == Family::kTempered ? 1 : 0);
}
// `asked_for`: with the entropy, the smoothing and the arg max, which few ask for.
constexpr int n_extras(Family family, bool asked_for) {
  if (family == Family::kEntropy) return 0;
  const int own = family == Family::kMixed ? 5 : family == Family::kJensenShannon ? 2 : 0;
  return own + (asked_for ? 3 : 0);
}

// What a row kernel is compiled for.
template <class T, Family kFamily_, bool kSoftcap_>
struct RowKind {
  using Element = T;
  static constexpr Family kFamily = kFamily_;
  static constexpr bool kSoftcap = kSoftcap_;
  static constexpr bool kHasTeacher = has_teacher(kFamily_), kHasLogSum = has_log_sum(kFamily_);
  static constexpr bool kTempered = kFamily_ == Family::kTempered;
  static constexpr int kMatrices = n_matrices(kFamily_);
  // Rounds whose columns a lane holds at a time, as registers allow: for maxima, which take few
  // instructions, for sums and for a gradient. A strip has 4 to 10: of five at a time, the loops of
  // those left over would be fetched for them alone.
  static constexpr int kRoundsOfMax = sizeof(T) == 2 ? 4 : kHasTeacher ? 1 : 2;
  static constexpr int kRoundsOfSums = kSoftcap_ || kHasTeacher ? 1 : 2;
  static constexpr int kRoundsOfGradient =
      sizeof(T) == 2 && (kFamily_ == Family::kForward || kFamily_ == Family::kReverse) && !kSoftcap_
          ? 2
          : kRoundsOfSums;
  // The same of rows in memory, which answers late; where more than one is held.
  static constexpr int kRoundsFromMemory = sizeof(T) == 2 ? 5 : 2;
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
  int pass = 0;      // that takes it (passes.h)
  bool here = true;  // that is this launch's
  float scale = 1;   // of the softmax that it is of
  LossKind kind = LossKind::kCrossEntropy;
  Divergence divergence = Divergence::kCrossEntropy;
  RowMask mask = RowMask::kNone;  // resolved: kLabels, kOwn or kNone
  bool per_segment_mean = false;  // token losses are divided by their segment's labelled tokens
  bool census_divisor = false;    // `divisor` is not known before the rows are counted
  bool wants_metrics = false;     // grpo and gspo
  int sequence = -1;              // gspo and dpo: which of the sequence terms this is
  bool top_k = false;             // distillation from the teacher's k likeliest ids
  TopKTail tail = TopKTail::kTailBin;
  float smoothing = 0;
  float beta = 0.5f;
  float epsilon_low = 0, epsilon_high = 0;
  float kl_beta = 0;
  float loss_scale = 1;  // t_squared
  double weight = 1;
  double divisor = 0;  // 0: loss and gradient are 0
};

// Rows are counted, and their losses summed, in up to so many parts.
inline constexpr int kMostParts = 8;

// What the census finds, and the row kernel's scratch words. One a run, in the workspace.
struct Census {
  // The first refused row: row << 8 | Fault; ~0 where there is none.
  unsigned long long fault;
  long long n_labelled;      // rows whose label is >= 0; every row without labels
  double all_class_weights;  // over the vocabulary; V without class weights
  double inverse_divisor[kMaxTerms];
  float gain[kMaxTerms];  // upstream * weight / divisor
  unsigned finished;      // blocks of the last kernel that wrote their part of a scalar
  unsigned rows_taken;    // of the row kernel, beyond those that its clusters start with
  int clusters_ended;
  struct Part {
    double n_labelled, n_masked, label_weights;
  } parts[kMostParts];
  double scalar_parts[kMaxTerms][kMostParts];
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
  int parts = 1;  // in which all rows are counted and summed (launch.cu)
  int64_t first_row = 0, n_rows = 0;
  int64_t vocab = 0;
  int64_t vocab_offset = 0;
  int64_t first_label = 0, last_label = -1;  // that count: of these columns, or of a shard's group
  bool is_shard = false;
  float smoothed_columns = 1;  // of the vocabulary, or of a shard's group
  bool accumulate = false;     // the gradient is added to what `gradient` holds

  // --- How the row is cut and laid over a cluster (config.h).
  RowCut cut;
  int strips_per_block = 0;
  int strips_per_warp = 0;  // a warp takes adjacent strips, its span
  // Of a cluster's block: warps that share a row, groups of them that take rows in turn, tables of
  // exchanged sums, places for rows' ids; all but the first powers of two.
  int row_warps = 0, groups = 1, tables = 2, ids = 0;
  int terms_warps = 0;     // that take rows in turn
  int rows_at_a_time = 1;  // that a cluster, or a warp of short rows, takes
  int slots = 0;           // rows that a block of a cluster holds
  int slot_bytes = 0;      // the teacher's columns included
  int matrix_bytes = 0;    // of one of them
  int table_bytes = 0;     // exchanged sums
  // Every row of logits and teacher begins a 16-byte word and, in a cluster, ends one.
  bool in_whole_words = false;

  // --- The algebra.
  float scale = 1;       // a = scale * softcap(z), of a run of one softmax (linear_head)
  float log2_scale = 1;  // scale * log2 e
  // kTempered: of the student beside the teacher; how often its exponentials are squared to be the
  // labels', 0: never.
  float tempered_log2_scale = 1;
  int squarings = 0;
  float teacher_log2_scale = 1;
  float softcap = 0, inverse_softcap = 0;  // 0: none
  float mix_beta = 0.5f;                   // of the pass's Jensen-Shannon terms
  bool wants_cross = false;                // not forward KL
  bool wants_entropy = false;
  bool wants_argmax = false;
  bool wants_smoothing = false;    // a term smooths its labels
  bool every_row_counts = false;   // a term counts rows whatever their label, or there are none
  bool masked_rows_count = false;  // a term counts the rows whose mask byte is not 0
  int n_terms = 0;
  int n_sequence_terms = 0;
  int top_k = 0;              // k of a top-k teacher, 0: none
  bool wants_others = false;  // a term has a bin for the columns that are not among the k
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
  // Of every pass; a launch of rows has those of its own.
  float* row_log_prob = nullptr;  // [n_passes][n]
  float* row_entropy = nullptr;   // [n_passes][n], with wants_entropy
  float* row_losses = nullptr;    // [n_terms][n]
  float* row_slopes = nullptr;    // [n_sequence_terms][n]: d loss / d lp
  bool slopes_ready = false;      // this launch adds the sequence terms' slopes
  // With a top-k teacher: the logits of its ids and what the gradient held there, before it is
  // written; the reference and log2 of the sum of the other columns; what the gradient is made of.
  float* top_k_logits = nullptr;  // [n][k]
  float* top_k_held = nullptr;    // [n][k]
  float* top_k_others = nullptr;  // [n][2]
  void* row_words = nullptr;      // [n] RowWord

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
