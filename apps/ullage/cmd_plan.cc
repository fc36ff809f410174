// ullage plan MODEL [--context N] [--kv TYPE] [--weights TYPE] [--memory BYTES] [--train-tokens N]
//                   [--budget BYTES] [--json]
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "model_argument.h"
#include "runtime/host.h"
#include "runtime/session_plan.h"
#include "runtime/text_loss.h"
#include "session/sizing.h"
#include "ullage/residentk/contract.h"
#include "units.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

using model::ElementType;

const std::map<std::string, ElementType> kTypes = {{"f32", ElementType::kF32},
                                                   {"f16", ElementType::kF16},
                                                   {"bf16", ElementType::kBF16},
                                                   {"q8_0", ElementType::kQ8_0},
                                                   {"q4_0", ElementType::kQ4_0}};

struct Options {
  std::string model;
  session::SizingRequest request;
  ElementType weight_type = ElementType::kBF16;
  std::string memory;
  std::string budget = "256MiB";
  int64_t train_tokens = 0;
  bool json = false;
};

// The loss head of a training step.
struct Head {
  int64_t n_tokens = 0;  // 0: not asked
  int64_t chunk = 0;
  int64_t n_chunks = 0;
  int64_t chunk_bytes = 0;
  int64_t materialized_bytes = 0;
};

struct Plan {
  runtime::SizedModel subject;
  session::SizingRequest request;
  session::Sizing sizing;
  Head head;
};

Result<Head> plan_head(const model::Config& config, int64_t n_tokens, int64_t budget_bytes) {
  auto chunk = runtime::chunk_for_budget(config.vocab, budget_bytes);
  if (!chunk) return chunk.status();
  constexpr int64_t kFloatBytes = sizeof(float);
  Head head;
  head.n_tokens = n_tokens;
  head.chunk = n_tokens > 0 ? std::min(*chunk, n_tokens) : *chunk;
  head.n_chunks = (n_tokens + head.chunk - 1) / head.chunk;
  head.chunk_bytes = head.chunk * config.vocab * kFloatBytes;
  if (__builtin_mul_overflow(n_tokens, config.vocab * kFloatBytes, &head.materialized_bytes)) {
    return Status(kLossDimensionTooLarge, "--train-tokens " + std::to_string(n_tokens));
  }
  return head;
}

Result<Plan> make_plan(const Options& options) {
  const auto budget = parse_bytes(options.budget);
  if (!budget) {
    return Status(kLossBadChunk, "--budget '" + options.budget + "'; for instance 256MiB");
  }
  auto request = options.request;
  if (options.memory.empty()) {
    request.memory_bytes = runtime::probe_host().memory_bytes;
  } else if (const auto memory = parse_bytes(options.memory)) {
    request.memory_bytes = *memory;
  } else {
    return Status(kResidentDimensionTooLarge,
                  "--memory '" + options.memory + "'; for instance 24GiB");
  }
  auto subject = runtime::open_sized_model(model_path(options.model), options.weight_type);
  if (!subject) return subject.status();
  auto sizing = session::size_session(subject->config, subject->weights, request);
  if (!sizing) return sizing.status();
  auto head = plan_head(subject->config, options.train_tokens, *budget);
  if (!head) return head.status();
  return Plan{*std::move(subject), request, *std::move(sizing), *head};
}

std::string context_limit(const Plan& plan) {
  const session::Sizing& s = plan.sizing;
  const std::string trained =
      fmt::format("trained to {}", with_commas(plan.subject.config.max_position));
  if (s.largest_context == s.memory_context) {
    return fmt::format("largest context {} ({})", with_commas(s.largest_context), trained);
  }
  return fmt::format("largest context {}, the contract's ceiling (memory for {}; {})",
                     with_commas(s.largest_context), with_commas(s.memory_context), trained);
}

void print_text(const Options& options, const Plan& plan) {
  const auto& [subject, request, s, head] = plan;
  const model::Config& c = subject.config;
  const std::string kv_type(model::name_of(request.kv_type));
  const std::string waste =
      s.bucket_waste_bytes == 0
          ? "nothing wasted"
          : fmt::format("{} of it past the context", human_bytes(s.bucket_waste_bytes));
  const std::string where = options.memory.empty() ? "this machine's " : "";

  fmt::print("{}   {}, {} layers, {}/{} heads of {}, d_model {}, d_ff {}, vocab {}, {} head\n",
             subject.name, model::name_of(c.family), c.n_layers, c.h_q, c.h_kv, c.d_head,
             with_commas(c.d_model), with_commas(c.d_ff), with_commas(c.vocab),
             c.tied_head ? "tied" : "untied");
  fmt::print("  parameters  {}\n", with_commas(c.n_parameters()));
  if (subject.weights.stored_elements != c.n_parameters()) {
    fmt::print("  on disk     {} elements, {}: the file stores more than the model holds\n",
               with_commas(subject.weights.stored_elements),
               human_bytes(subject.weights.stored_bytes));
  }
  fmt::print("  weights     {}  {}{}\n", human_bytes(subject.weights.resident_bytes),
             subject.weights.type, subject.assumed ? ", assumed" : "");
  fmt::print("  KV cache    {}  {}, {} positions (bucket {}, {})\n", human_bytes(s.kv_bytes),
             kv_type, with_commas(request.context), with_commas(s.bucket), waste);
  fmt::print(
      "  fits        {}, {:.1f} % of {}{}; {}\n", s.fits ? "yes" : "no",
      100.0 * static_cast<double>(s.resident_bytes) / static_cast<double>(request.memory_bytes),
      where, human_bytes(request.memory_bytes), context_limit(plan));
  if (s.session.ok()) {
    fmt::print("  a token     {} dispatches, {} with attention split; {} read\n", s.dispatches,
               s.dispatches_deep, human_bytes(s.token_read_bytes));
  } else {
    fmt::print("  a token     {} read; no session of this library: {}\n",
               human_bytes(s.token_read_bytes), s.session.to_string());
  }
  if (head.n_tokens > 0) {
    fmt::print("  loss head   {} tokens: logits {} in f32 all at once\n",
               with_commas(head.n_tokens), human_bytes(head.materialized_bytes));
    fmt::print(
        "              {} in {} chunks of {}, {:.1f} x less; the same bits as any other chunk\n",
        human_bytes(head.chunk_bytes), with_commas(head.n_chunks), with_commas(head.chunk),
        static_cast<double>(head.materialized_bytes) / static_cast<double>(head.chunk_bytes));
  } else {
    fmt::print("  loss head   {} tokens at a time: {} of f32 logits, within {}\n",
               with_commas(head.chunk), human_bytes(head.chunk_bytes), options.budget);
  }
}

void print_json(const Plan& plan) {
  const Head& head = plan.head;
  auto out = nlohmann::ordered_json::parse(
      runtime::session_plan_json({plan.subject, plan.request, plan.sizing}));
  out["loss_head"] = {{"n_tokens", head.n_tokens},
                      {"chunk", head.chunk},
                      {"n_chunks", head.n_chunks},
                      {"chunk_bytes", head.chunk_bytes},
                      {"materialized_bytes", head.materialized_bytes}};
  fmt::print("{}\n", out.dump(2));
}

}  // namespace

void add_plan(CLI::App& program, int& exit_code) {
  const auto options = std::make_shared<Options>();
  session::SizingRequest& request = options->request;
  CLI::App* verb = program.add_subcommand("plan", "What a model costs, before it is loaded");
  verb->add_option("model", options->model,
                   std::string(kModelHelp) + "; a config.json alone is enough")
      ->required();
  verb->add_option("--context", request.context, "Positions of the KV cache")
      ->capture_default_str();
  verb->add_option("--kv", request.kv_type, "Type of the KV cache")
      ->transform(CLI::CheckedTransformer(kTypes))
      ->default_str("bf16");
  verb->add_option("--weights", options->weight_type,
                   "Type of the weights, where only a config is at hand")
      ->transform(CLI::CheckedTransformer(kTypes))
      ->default_str("bf16");
  verb->add_option("--memory", options->memory, "Of the device; default: this machine's");
  verb->add_option("--train-tokens", options->train_tokens,
                   "Tokens of a training step, for the loss head")
      ->check(CLI::NonNegativeNumber);
  verb->add_option("--budget", options->budget, "What the loss head's logits may take")
      ->capture_default_str();
  verb->add_flag("--json", options->json, "One JSON document");
  verb->callback([options, &exit_code] {
    const auto plan = make_plan(*options);
    if (!plan) {
      exit_code = report(plan.status(), options->json);
      return;
    }
    options->json ? print_json(*plan) : print_text(*options, *plan);
    exit_code = 0;
  });
}

}  // namespace ullage::apps
