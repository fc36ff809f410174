// ullage loss MODEL --text FILE [--losses FILE] [--window N] [--chunk N | --budget BYTES]
//             [--threads N] [--verify] [--json]
#include <fmt/format.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model_argument.h"
#include "runtime/head_config_json.h"
#include "runtime/text_loss.h"
#include "units.h"
#include "verbs.h"

namespace ullage::apps {
namespace {

using runtime::TextLossPlan;
using runtime::TextLossResult;

struct Options {
  std::string model;
  std::string text;
  std::string losses;
  std::string budget = "256MiB";
  runtime::TextLossRequest request;
  bool json = false;
};

struct Measured {
  int64_t peak_resident_bytes;
  double seconds;
};

// The most this process ever held, mapped weights and the program itself included.
int64_t peak_resident_bytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024;
}

Result<std::string> read_text(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text;
  try {
    text.assign(std::istreambuf_iterator<char>(file), {});
  } catch (const std::ios_base::failure&) {  // a directory, for instance
    file.setstate(std::ios::badbit);
  }
  if (!file.is_open() || file.bad()) return Status(kModelUnreadable, "cannot read '" + path + "'");
  return text;
}

void print_plan(const TextLossPlan& plan) {
  fmt::print("plan\n");
  fmt::print(
      "  text      {} tokens in {} windows of {}; {} scored, all but the first of a window\n",
      with_commas(plan.n_tokens), with_commas(plan.n_windows), with_commas(plan.window),
      with_commas(plan.n_scored));
  fmt::print("  logits    {} in f32, {} tokens at a time; all at once they are {}\n",
             human_bytes(plan.peak_logit_bytes), with_commas(plan.chunk),
             human_bytes(plan.materialized_logit_bytes));
  fmt::print("  memory    {} allocated, logits included, and {} of weights mapped\n",
             human_bytes(plan.bytes), human_bytes(plan.weight_bytes));
  std::fflush(stdout);
}

void print_result(const TextLossPlan& plan, const TextLossResult& result,
                  const std::vector<lossk::LossTerm>& terms, const Measured& measured) {
  fmt::print("measured\n");
  fmt::print("  loss      {:.6f} nats a token, perplexity {:.4f}\n", result.mean_loss,
             result.perplexity);
  for (size_t t = 0; t < terms.size(); ++t) {
    fmt::print("  {:<9} {:.6f}, times {:g} in the total\n", terms[t].name, result.terms[t],
               terms[t].weight);
  }
  if (!terms.empty()) fmt::print("  total     {:.6f}\n", result.total);
  if (plan.verify_chunk > 0 && result.n_verify_mismatches == 0) {
    fmt::print("  verified  the same bits with {} tokens at a time\n",
               with_commas(plan.verify_chunk));
  }
  fmt::print(
      "  memory    {} resident at most, program and mapped weights included; {} of logits "
      "never existed\n",
      human_bytes(measured.peak_resident_bytes),
      human_bytes(plan.materialized_logit_bytes - plan.peak_logit_bytes));
  fmt::print("  time      {:.2f} s, {:.0f} tokens/s\n", measured.seconds,
             static_cast<double>(plan.n_tokens) / measured.seconds);
}

void print_json(const std::string& model, const TextLossPlan& plan, const TextLossResult& result,
                const std::vector<lossk::LossTerm>& terms, const Measured& measured) {
  nlohmann::ordered_json bookings = nlohmann::ordered_json::array();
  for (const Booking& booking : plan.bookings) {
    bookings.push_back({{"purpose", booking.purpose}, {"bytes", booking.bytes}});
  }
  nlohmann::ordered_json out = {
      {"model", model},
      {"plan",
       {{"n_tokens", plan.n_tokens},
        {"n_windows", plan.n_windows},
        {"window", plan.window},
        {"n_scored", plan.n_scored},
        {"chunk", plan.chunk},
        {"n_chunks", plan.n_chunks},
        {"peak_logit_bytes", plan.peak_logit_bytes},
        {"materialized_logit_bytes", plan.materialized_logit_bytes},
        {"allocated_bytes", plan.bytes},
        {"weight_bytes", plan.weight_bytes},
        {"bookings", bookings}}},
      {"result",
       {{"mean_loss", result.mean_loss},
        {"total_loss", result.total_loss},
        {"perplexity", result.perplexity},
        {"n_scored", result.n_scored}}},
      {"measured",
       {{"peak_resident_bytes", measured.peak_resident_bytes},
        {"seconds", measured.seconds},
        {"tokens_per_second", static_cast<double>(plan.n_tokens) / measured.seconds}}}};
  for (size_t t = 0; t < terms.size(); ++t) {
    out["result"]["losses"][terms[t].name] = result.terms[t];
    out["result"]["total"] = result.total;
  }
  if (plan.verify_chunk > 0) {
    out["result"]["verify_chunk"] = plan.verify_chunk;
    out["result"]["verify_mismatches"] = result.n_verify_mismatches;
  }
  fmt::print("{}\n", out.dump(2));
}

// One line on standard error, only where someone watches it.
runtime::Progress progress_bar(int64_t n_tokens) {
  if (!isatty(STDERR_FILENO)) return {};
  return [n_tokens](int64_t n_done) {
    constexpr int64_t kWidth = 40;
    const auto filled = static_cast<size_t>(kWidth * n_done / n_tokens);
    fmt::print(stderr, "\r  [{:-<40}] {} of {} tokens", std::string(filled, '#'),
               with_commas(n_done), with_commas(n_tokens));
    // Gone when it is done.
    if (n_done == n_tokens) fmt::print(stderr, "\r\033[K");
    std::fflush(stderr);
  };
}

Result<std::vector<int32_t>> encode(const model::Checkpoint& checkpoint, const std::string& path) {
  auto text = read_text(path);
  if (!text) return text.status();
  auto tokenizer = checkpoint.tokenizer();
  if (!tokenizer) return tokenizer.status();
  return tokenizer->encode(*text, /*parse_special=*/false);
}

int loss(Options options) {
  const auto refuse = [&](const Status& status) { return report(status, options.json); };
  if (!options.losses.empty()) {
    auto text = read_text(options.losses);
    if (!text) return refuse(text.status());
    auto losses = runtime::head_config_from_json(*text);
    if (!losses) return refuse(losses.status());
    if (losses->terms.empty()) {
      return refuse({kHeadBadConfig, "losses is empty; accepted: one loss or more"});
    }
    options.request.losses = *std::move(losses);
  }
  const std::vector<lossk::LossTerm>& terms = options.request.losses.terms;
  auto checkpoint = model::Checkpoint::open(model_path(options.model));
  if (!checkpoint) return refuse(checkpoint.status());
  auto tokens = encode(*checkpoint, options.text);
  if (!tokens) return refuse(tokens.status());
  const auto n_tokens = static_cast<int64_t>(tokens->size());
  auto plan = runtime::plan_text_loss(*checkpoint, n_tokens, options.request);
  if (!plan) return refuse(plan.status());
  if (!options.json) print_plan(*plan);

  const auto start = std::chrono::steady_clock::now();
  auto result =
      runtime::run_text_loss(*checkpoint, *tokens, options.request, progress_bar(n_tokens));
  if (!result) return refuse(result.status());
  const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
  const Measured measured = {peak_resident_bytes(), elapsed.count()};
  if (options.json) {
    print_json(checkpoint->name(), *plan, *result, terms, measured);
  } else {
    print_result(*plan, *result, terms, measured);
  }
  if (result->n_verify_mismatches == 0) return 0;
  fmt::print(stderr, "ullage: {} of {} token losses have other bits {} tokens at a time than {}\n",
             result->n_verify_mismatches, result->n_scored, plan->verify_chunk, plan->chunk);
  return kExitError;
}

}  // namespace

void add_loss(CLI::App& program, int& exit_code) {
  const auto options = std::make_shared<Options>();
  runtime::TextLossRequest& request = options->request;
  CLI::App* verb = program.add_subcommand(
      "loss", "The mean loss and perplexity of a text, in a memory that is known before");
  verb->add_option("model", options->model, kModelHelp)->required();
  verb->add_option("--text", options->text, "The text, read as bytes")->required();
  verb->add_option("--losses", options->losses,
                   "A JSON file: {\"losses\": [{\"kind\": \"z_loss\", \"weight\": 1e-4}, ...]}");
  verb->add_option("--window", request.window,
                   "Tokens that see each other; a window scores all but its first")
      ->capture_default_str();
  CLI::Option* chunk =
      verb->add_option("--chunk", request.chunk, "Tokens whose logits exist at once");
  verb->add_option("--budget", options->budget,
                   "What the logits may take; the chunk is the power of two that fits")
      ->capture_default_str()
      ->excludes(chunk);
  verb->add_option("--threads", request.n_threads, "Default: as many as the machine has");
  verb->add_flag("--verify", request.verify,
                 "Compute every loss at a second chunk size too, and demand the same bits");
  verb->add_flag("--json", options->json, "One JSON document");
  verb->callback([options, chunk, &exit_code] {
    const auto budget = parse_bytes(options->budget);
    if (!budget) {
      exit_code = report({kLossBadChunk, "--budget '" + options->budget + "'; for instance 256MiB"},
                         options->json);
    } else if (chunk->count() > 0 && options->request.chunk < 1) {
      exit_code = report({kLossEmptyDimension, "--chunk is below 1"}, options->json);
    } else {
      options->request.budget_bytes = *budget;
      exit_code = loss(*options);
    }
  });
}

}  // namespace ullage::apps
