#include "session/text_loss.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <string>

#include "cpu/worker_pool.h"
#include "session/arena.h"
#include "session/decoder.h"
#include "ullage/lossk/contract.h"

namespace ullage::session {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);

// Hidden states are collected over whole windows up to this many scored tokens, then reduced chunk
// by chunk: enough that a chunk need not end with a window.
constexpr int64_t kGroupTokens = 8192;

// Scored tokens of the largest group: as many windows as fit, at least one.
int64_t group_tokens(int64_t window, int64_t n_scored) {
  const int64_t per_window = window - 1;
  return std::min(n_scored, std::max<int64_t>(1, kGroupTokens / per_window) * per_window);
}

DecoderOptions decoder_options(const TextLossRequest& request) {
  return {.max_ctx = request.window, .n_threads = request.n_threads};
}

struct Layout {
  ArenaPlan plan;
  size_t hidden, logits, targets, losses, verify_losses;

  Layout(int64_t group, int64_t chunk, int64_t d_model, int64_t vocab, bool verify) {
    // One row more: a window's last state, which scores nothing, is overwritten by the next window.
    hidden = plan.book("hidden states f32", group + 1, d_model * kFloatBytes);
    logits = plan.book("logits of a chunk f32", chunk, vocab * kFloatBytes);
    targets = plan.book("targets", group, sizeof(int32_t));
    losses = plan.book("token losses f64", group, sizeof(double));
    verify_losses = plan.book("token losses f64, again", verify ? group : 0, sizeof(double));
  }
};

// (max-shifted log-sum-exp) - (max-shifted target logit), summed in float64 in column order.
double token_loss(const float* logits, int64_t vocab, int32_t target) {
  float max = logits[0];
  for (int64_t j = 1; j < vocab; ++j) max = std::max(max, logits[j]);
  double sum = 0;
  for (int64_t j = 0; j < vocab; ++j) sum += std::exp(logits[j] - max);
  return std::log(sum) - (static_cast<double>(logits[target]) - max);
}

struct Group {
  const float* hidden;     // [n][d_model]
  const int32_t* targets;  // [n]
  int64_t n;
};

void reduce(Decoder& decoder, const Group& group, int64_t d_model, int64_t vocab, int64_t chunk,
            float* logits, double* losses) {
  for (int64_t first = 0; first < group.n; first += chunk) {
    const int64_t rows = std::min(chunk, group.n - first);
    decoder.logits(group.hidden + first * d_model, rows, logits);
    decoder.pool().run(rows, [&](int64_t row, int) {
      losses[first + row] = token_loss(logits + row * vocab, vocab, group.targets[first + row]);
    });
  }
}

}  // namespace

Result<int64_t> chunk_for_budget(int64_t vocab, int64_t budget_bytes) {
  const int64_t cells = std::min(budget_bytes / kFloatBytes, lossk::kLossMaxLogitCells);
  if (vocab < 1 || cells < vocab) {
    return Status(kLossBadChunk, "one token's logits are " + std::to_string(vocab) +
                                     " f32 values; the budget is " + std::to_string(budget_bytes) +
                                     " bytes");
  }
  return static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(cells / vocab)));
}

Result<TextLossPlan> plan_text_loss(const model::Checkpoint& checkpoint, int64_t n_tokens,
                                    const TextLossRequest& request) {
  const model::Config& config = checkpoint.config();
  if (request.window < 2) {
    return Status(kLossEmptyDimension, "window is " + std::to_string(request.window) +
                                           "; at least 2 tokens are needed, to score one");
  }
  auto decoder = Decoder::plan(checkpoint, decoder_options(request));
  if (!decoder) return decoder.status();

  TextLossPlan plan;
  plan.n_tokens = n_tokens;
  plan.window = request.window;
  const int64_t rest = n_tokens % request.window;
  plan.n_windows = n_tokens / request.window + (rest > 1 ? 1 : 0);
  plan.n_scored = n_tokens / request.window * (request.window - 1) + std::max<int64_t>(0, rest - 1);

  if (request.chunk == 0) {
    auto chunk = chunk_for_budget(config.vocab, request.budget_bytes);
    if (!chunk) return chunk.status();
    plan.chunk = *chunk;
  } else {
    const StatusCode status = lossk::loss_chunk_check(request.chunk, config.vocab);
    if (status != kLossOk) {
      return Status(status, "a chunk of " + std::to_string(request.chunk) + " tokens by " +
                                std::to_string(config.vocab) + " logits; at most " +
                                std::to_string(lossk::kLossMaxLogitCells) + " may exist at once");
    }
    plan.chunk = request.chunk;
  }
  const int64_t group = group_tokens(request.window, plan.n_scored);
  plan.chunk = std::max<int64_t>(1, std::min(plan.chunk, group));
  plan.n_chunks = (plan.n_scored + plan.chunk - 1) / plan.chunk;
  if (request.verify) plan.verify_chunk = plan.chunk > 2 ? plan.chunk / 2 + 1 : 3 - plan.chunk;
  plan.peak_logit_bytes = plan.chunk * config.vocab * kFloatBytes;
  plan.materialized_logit_bytes = plan.n_scored * config.vocab * kFloatBytes;

  const Layout layout(group, std::max(plan.chunk, plan.verify_chunk), config.d_model, config.vocab,
                      request.verify);
  plan.bookings = layout.plan.bookings();
  plan.bookings.insert(plan.bookings.end(), decoder->bookings.begin(), decoder->bookings.end());
  plan.bytes = layout.plan.bytes() + decoder->bytes;
  plan.weight_bytes = checkpoint.stored_bytes();
  return plan;
}

Result<TextLossResult> run_text_loss(const model::Checkpoint& checkpoint,
                                     std::span<const int32_t> tokens,
                                     const TextLossRequest& request, const Progress& progress) {
  const model::Config& config = checkpoint.config();
  const auto n_tokens = static_cast<int64_t>(tokens.size());
  auto plan = plan_text_loss(checkpoint, n_tokens, request);
  if (!plan) return plan.status();
  for (const int32_t token : tokens) {
    if (token < 0 || token >= config.vocab) {
      return Status(kLossTargetOutOfRange, "token id " + std::to_string(token) +
                                               " is outside the vocabulary of " +
                                               std::to_string(config.vocab));
    }
  }
  const int64_t group = group_tokens(plan->window, plan->n_scored);
  const Layout layout(group, std::max(plan->chunk, plan->verify_chunk), config.d_model,
                      config.vocab, request.verify);
  auto arena = Arena::create(layout.plan);
  if (!arena) return arena.status();
  auto decoder = Decoder::create(checkpoint, decoder_options(request));
  if (!decoder) return decoder.status();
  auto* hidden = arena->slice<float>(layout.hidden);
  auto* targets = arena->slice<int32_t>(layout.targets);
  auto* losses = arena->slice<double>(layout.losses);
  auto* verify_losses = arena->slice<double>(layout.verify_losses);
  auto* logits = arena->slice<float>(layout.logits);

  TextLossResult result;
  result.n_scored = plan->n_scored;
  int64_t n_grouped = 0;
  const auto flush = [&] {
    const Group rows = {hidden, targets, n_grouped};
    reduce(*decoder, rows, config.d_model, config.vocab, plan->chunk, logits, losses);
    for (int64_t i = 0; i < n_grouped; ++i) result.total_loss += losses[i];
    if (request.verify) {
      reduce(*decoder, rows, config.d_model, config.vocab, plan->verify_chunk, logits,
             verify_losses);
      for (int64_t i = 0; i < n_grouped; ++i) {
        result.n_verify_mismatches +=
            std::bit_cast<uint64_t>(losses[i]) != std::bit_cast<uint64_t>(verify_losses[i]);
      }
    }
    n_grouped = 0;
  };
  for (int64_t first = 0; first + 1 < n_tokens; first += plan->window) {
    const int64_t n = std::min(plan->window, n_tokens - first);
    if (n_grouped + n - 1 > group) flush();
    decoder->reset();
    const Status status =
        decoder->forward(tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(n)),
                         hidden + n_grouped * config.d_model);
    if (!status.ok()) return status;
    std::copy_n(tokens.begin() + first + 1, n - 1, targets + n_grouped);
    n_grouped += n - 1;
    if (progress) progress(first + n);
  }
  flush();
  result.mean_loss =
      plan->n_scored > 0 ? result.total_loss / static_cast<double>(plan->n_scored) : 0;
  result.perplexity = std::exp(result.mean_loss);
  return result;
}

}  // namespace ullage::session
