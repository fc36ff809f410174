#include "runtime/text_loss.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <utility>

#include "session/arena.h"
#include "session/decoder.h"
#include "ullage/lossk/contract.h"
#include "ullage/lossk/head.h"

namespace ullage::runtime {
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

session::DecoderOptions decoder_options(const TextLossRequest& request) {
  return {.max_ctx = request.window, .n_threads = request.n_threads};
}

// The type under which lossk takes the head's weights; none: they are quantised.
std::optional<DType> dense_type(model::ElementType type) {
  switch (type) {
    case model::ElementType::kF32:
      return DType::kF32;
    case model::ElementType::kBF16:
      return DType::kBF16;
    case model::ElementType::kF16:
      return DType::kF16;
    default:
      return std::nullopt;
  }
}

// The losses that are asked for, or cross-entropy; each as a sum, for the text is cut into groups,
// over the tokens that have labels, for the last group is padded.
lossk::HeadConfig sums_of(lossk::HeadConfig losses) {
  if (losses.terms.empty()) losses.terms.push_back({.name = "cross_entropy"});
  for (lossk::LossTerm& term : losses.terms) {
    term.divisor = 1;
    term.mask = lossk::RowMask::kLabels;
  }
  return losses;
}

// What a text cannot give: it has labels and nothing else.
Status check_losses(const lossk::HeadConfig& losses) {
  if (losses.terms.empty()) return kHeadOk;
  if (Status status = lossk::validate(losses); !status.ok()) return status;
  for (const lossk::LossTerm& term : losses.terms) {
    const bool of_labels =
        term.kind == lossk::LossKind::kCrossEntropy || term.kind == lossk::LossKind::kZLoss;
    if (!of_labels || term.mask == lossk::RowMask::kOwn) {
      return {kHeadMissingInput,
              "term '" + term.name +
                  "' needs more than labels, which is all a text gives; "
                  "accepted: cross_entropy and z_loss without a mask of its own"};
    }
  }
  const lossk::HeadOptions& options = losses.options;
  if (options.bias || options.adapter_rank > 0 || options.vocab_offset > 0 ||
      options.group_vocab > 0) {
    return {
        kHeadMissingInput,
        "bias, adapter_rank, vocab_offset or group_vocab is set, and a checkpoint's head has none; "
        "accepted: logits_scale, softcap"};
  }
  return kHeadOk;
}

// Losses of up to n_rows hidden states. Through lossk's door for hidden states; where the head's
// weights are quantised, the decoder makes each chunk's logits and they take the other door.
class Head {
 public:
  static Result<Head> plan(const model::Checkpoint& checkpoint, int64_t n_rows, int64_t chunk,
                           const TextLossRequest& text) {
    const auto dtype = dense_type(checkpoint.head().type);
    const model::Config& config = checkpoint.config();
    const lossk::HeadConfig losses = sums_of(text.losses);
    lossk::Request request;
    request.weight_dtype = dtype.value_or(DType::kF32);
    const lossk::Shape shape = {dtype ? n_rows : chunk, dtype ? config.d_model : 0, config.vocab};
    auto plan = lossk::plan(shape, losses, request, {.chunk = chunk, .n_threads = text.n_threads});
    if (!plan) return plan.status();
    return Head{*std::move(plan), checkpoint.head(), dtype, n_rows, chunk};
  }

  int64_t workspace_bytes() const { return plan_.workspace_bytes(); }
  int64_t logit_rows() const { return dtype_ ? 0 : chunk_; }

  // losses[i] for i < n, and every term's sum added to `sums`, [n_terms]; `terms` is scratch of
  // that size. `labels` is -1 from n on. Labels and losses have room for n_rows + chunk.
  Status run(session::Decoder& decoder, const float* hidden, const int32_t* labels, int64_t n,
             float* logits, double* losses, std::span<double> terms, std::span<double> sums,
             std::span<std::byte> workspace) const {
    const auto loss_of = [&](lossk::Inputs& inputs, int64_t first, int64_t rows) -> Status {
      inputs.labels = {labels + first, sizeof(int32_t), rows};
      lossk::Outputs outputs;
      outputs.terms = terms;
      outputs.label_log_prob = {losses + first, DType::kF64, rows};
      if (Status status = plan_.run(inputs, outputs, workspace); !status.ok()) return status;
      for (int64_t i = first; i < first + rows; ++i) losses[i] = -losses[i];
      for (size_t t = 0; t < terms.size(); ++t) sums[t] += terms[t];
      return kHeadOk;
    };
    const int64_t width = weight_.cols;
    lossk::Inputs inputs;
    if (dtype_) {
      inputs.hidden = {hidden, DType::kF32, n_rows_, width, width};
      inputs.weight = {weight_.data, *dtype_, weight_.rows, width,
                       weight_.row_bytes / size_of(*dtype_)};
      return loss_of(inputs, 0, n_rows_);
    }
    inputs.logits = {logits, DType::kF32, chunk_, weight_.rows, weight_.rows};
    for (int64_t first = 0; first < n; first += chunk_) {
      decoder.logits(hidden + first * width, std::min(chunk_, n - first), logits);
      if (Status status = loss_of(inputs, first, chunk_); !status.ok()) return status;
    }
    return kLossOk;
  }

 private:
  Head(lossk::HeadPlan plan, model::Weight weight, std::optional<DType> dtype, int64_t n_rows,
       int64_t chunk)
      : plan_(std::move(plan)), weight_(weight), dtype_(dtype), n_rows_(n_rows), chunk_(chunk) {}

  lossk::HeadPlan plan_;
  model::Weight weight_;
  std::optional<DType> dtype_;
  int64_t n_rows_;
  int64_t chunk_;
};

// Everything that a run allocates besides the decoder.
struct Work {
  session::ArenaPlan plan;
  int64_t group;  // scored tokens collected before they are reduced
  Head head;
  std::optional<Head> verify_head;
  size_t hidden, logits, labels, losses, verify_losses, workspace;

  static Result<Work> make(const model::Checkpoint& checkpoint, const TextLossPlan& plan,
                           const TextLossRequest& request) {
    const int64_t group = std::max<int64_t>(1, group_tokens(plan.window, plan.n_scored));
    auto head = Head::plan(checkpoint, group, plan.chunk, request);
    if (!head) return head.status();
    std::optional<Head> verify_head;
    if (plan.verify_chunk > 0) {
      auto verify = Head::plan(checkpoint, group, plan.verify_chunk, request);
      if (!verify) return verify.status();
      verify_head = *std::move(verify);
    }
    return Work(checkpoint.config(), plan, group, *std::move(head), std::move(verify_head));
  }

 private:
  Work(const model::Config& config, const TextLossPlan& text, int64_t rows, Head first,
       std::optional<Head> second)
      : group(rows), head(std::move(first)), verify_head(std::move(second)) {
    const int64_t padded = group + std::max(text.chunk, text.verify_chunk);
    int64_t logit_rows = head.logit_rows();
    int64_t workspace_bytes = head.workspace_bytes();
    if (verify_head) {
      logit_rows = std::max(logit_rows, verify_head->logit_rows());
      workspace_bytes = std::max(workspace_bytes, verify_head->workspace_bytes());
    }
    // One row more: a window's last state, which scores nothing, is overwritten by the next window.
    hidden = plan.book("hidden states f32", group + 1, config.d_model * kFloatBytes);
    logits = plan.book("logits of a chunk f32", logit_rows, config.vocab * kFloatBytes);
    labels = plan.book("labels", padded, sizeof(int32_t));
    losses = plan.book("token losses f64", padded, sizeof(double));
    verify_losses = plan.book("token losses f64, again", verify_head ? padded : 0, sizeof(double));
    workspace = plan.book("loss head, with its logits", workspace_bytes, 1);
  }
};

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
  if (Status status = check_losses(request.losses); !status.ok()) return status;
  auto decoder = session::Decoder::plan(checkpoint, decoder_options(request));
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
  const int64_t group = std::max<int64_t>(1, group_tokens(request.window, plan.n_scored));
  plan.chunk = std::min(plan.chunk, group);
  plan.n_chunks = (plan.n_scored + plan.chunk - 1) / plan.chunk;
  if (request.verify) plan.verify_chunk = plan.chunk > 2 ? plan.chunk / 2 + 1 : 3 - plan.chunk;
  plan.peak_logit_bytes = plan.chunk * config.vocab * kFloatBytes;
  plan.materialized_logit_bytes = plan.n_scored * config.vocab * kFloatBytes;

  auto work = Work::make(checkpoint, plan, request);
  if (!work) return work.status();
  plan.bookings = work->plan.bookings();
  plan.bookings.insert(plan.bookings.end(), decoder->bookings.begin(), decoder->bookings.end());
  plan.bytes = work->plan.bytes() + decoder->bytes;
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
  auto work = Work::make(checkpoint, *plan, request);
  if (!work) return work.status();
  auto arena = session::Arena::create(work->plan);
  if (!arena) return arena.status();
  auto decoder = session::Decoder::create(checkpoint, decoder_options(request));
  if (!decoder) return decoder.status();
  auto* hidden = arena->slice<float>(work->hidden);
  auto* labels = arena->slice<int32_t>(work->labels);
  auto* losses = arena->slice<double>(work->losses);
  auto* verify_losses = arena->slice<double>(work->verify_losses);
  const std::span<std::byte> workspace(
      arena->slice<std::byte>(work->workspace),
      static_cast<size_t>(work->plan.bookings()[work->workspace].bytes));

  TextLossResult result;
  result.n_scored = plan->n_scored;
  int64_t n_grouped = 0;
  const std::vector<lossk::LossTerm>& terms = request.losses.terms;
  const size_t n_terms = std::max<size_t>(1, terms.size());
  std::vector<double> scratch(n_terms), sums(n_terms, 0), verify_sums(n_terms, 0);
  const auto reduce = [&](const Head& head, double* to, std::span<double> term_sums) {
    return head.run(*decoder, hidden, labels, n_grouped, arena->slice<float>(work->logits), to,
                    scratch, term_sums, workspace);
  };
  const auto flush = [&]() -> Status {
    const int64_t padded = work->group + std::max(plan->chunk, plan->verify_chunk);
    std::fill(labels + n_grouped, labels + padded, -1);
    if (Status status = reduce(work->head, losses, sums); !status.ok()) return status;
    for (int64_t i = 0; i < n_grouped; ++i) result.total_loss += losses[i];
    if (work->verify_head) {
      if (Status status = reduce(*work->verify_head, verify_losses, verify_sums); !status.ok()) {
        return status;
      }
      for (int64_t i = 0; i < n_grouped; ++i) {
        result.n_verify_mismatches +=
            std::bit_cast<uint64_t>(losses[i]) != std::bit_cast<uint64_t>(verify_losses[i]);
      }
    }
    n_grouped = 0;
    return kLossOk;
  };
  for (int64_t first = 0; first + 1 < n_tokens; first += plan->window) {
    const int64_t n = std::min(plan->window, n_tokens - first);
    if (n_grouped + n - 1 > work->group) {
      if (Status status = flush(); !status.ok()) return status;
    }
    decoder->reset();
    const Status status =
        decoder->forward(tokens.subspan(static_cast<size_t>(first), static_cast<size_t>(n)),
                         hidden + n_grouped * config.d_model);
    if (!status.ok()) return status;
    std::copy_n(tokens.begin() + first + 1, n - 1, labels + n_grouped);
    n_grouped += n - 1;
    if (progress) progress(first + n);
  }
  if (Status status = flush(); !status.ok()) return status;
  result.mean_loss =
      plan->n_scored > 0 ? result.total_loss / static_cast<double>(plan->n_scored) : 0;
  result.perplexity = std::exp(result.mean_loss);
  for (size_t t = 0; t < terms.size(); ++t) {
    const double divisor = terms[t].divisor.value_or(static_cast<double>(plan->n_scored));
    result.terms.push_back(divisor == 0 ? 0 : sums[t] / divisor);
    if (terms[t].weight != 0) result.total += terms[t].weight * result.terms[t];
  }
  return result;
}

}  // namespace ullage::runtime
