// The mean next-token loss of a text under a model, in a memory that is known before the work
// starts.
//
// The tokens are cut into windows that know nothing of each other; a window scores every token but
// its first, each from the tokens of the window before it. The losses are lossk's cross-entropy of
// the hidden states: logits exist a chunk of tokens at a time. Per-token losses are summed in token
// order, so the result does not depend on the chunk, on the batch or on the thread count, to the
// last bit.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "model/checkpoint.h"
#include "ullage/lossk/terms.h"
#include "ullage/plan.h"
#include "ullage/status.h"

namespace ullage::runtime {

struct TextLossRequest {
  int64_t window = 512;                // tokens, at least 2
  int64_t chunk = 0;                   // tokens whose logits exist at once; 0: see budget_bytes
  int64_t budget_bytes = 256LL << 20;  // logits may take, where no chunk is given
  int n_threads = 0;                   // 0: as many as the machine has
  bool verify = false;                 // compute every loss at a second chunk size too
  // Losses to report beside the cross-entropy: cross_entropy and z_loss terms, the ones that need
  // labels alone. A divisor not given is the number of scored tokens.
  lossk::HeadConfig losses = {};
};

struct TextLossPlan {
  int64_t n_tokens = 0;
  int64_t n_windows = 0;
  int64_t n_scored = 0;  // tokens that have a loss
  int64_t window = 0;
  int64_t chunk = 0;
  int64_t verify_chunk = 0;  // 0: no verification
  int64_t n_chunks = 0;
  int64_t peak_logit_bytes = 0;          // chunk * vocab in f32
  int64_t materialized_logit_bytes = 0;  // n_scored * vocab in f32
  std::vector<Booking> bookings;         // everything allocated; the weights are mapped
  int64_t bytes = 0;                     // their sum
  int64_t weight_bytes = 0;              // of the mapped file that the forward reads
};

struct TextLossResult {
  double mean_loss = 0;   // nats a scored token; 0 where none is
  double total_loss = 0;  // their sum, in token order
  double perplexity = 0;  // exp(mean_loss)
  int64_t n_scored = 0;
  int64_t n_verify_mismatches = 0;  // token losses whose bits differ at plan.verify_chunk
  std::vector<double> terms;        // of request.losses, unweighted
  double total = 0;                 // sum of weight * term
};

// The largest chunk whose f32 logits fit the budget, a power of two, at most 2^27 / vocab tokens.
// 587 where not even one token's logits fit.
Result<int64_t> chunk_for_budget(int64_t vocab, int64_t budget_bytes);

// Errors: 581 for a window below 2 or a chunk below 1, 587 for a chunk whose logits exceed 2^27
// cells or a budget below one row, the decoder's 601-603, and 680-699 for losses that are
// meaningless or need more than a text gives (683).
Result<TextLossPlan> plan_text_loss(const model::Checkpoint& checkpoint, int64_t n_tokens,
                                    const TextLossRequest& request);

// Called between windows with the tokens done so far.
using Progress = std::function<void(int64_t n_done)>;

// Errors: as the plan's, 586 for a token id outside the vocabulary (before any work), 602 where the
// system refuses the memory.
Result<TextLossResult> run_text_loss(const model::Checkpoint& checkpoint,
                                     std::span<const int32_t> tokens,
                                     const TextLossRequest& request, const Progress& progress);

}  // namespace ullage::runtime
