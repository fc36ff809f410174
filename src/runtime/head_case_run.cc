#include "runtime/head_case_run.h"

#include <cmath>
#include <cstddef>
#include <deque>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>

#include "contract/head_validate.h"
#include "cpu/storage.h"

namespace ullage::runtime {
namespace {

using lossk::HeadConfig;
using nlohmann::ordered_json;
using reference::HeadInputs;
using reference::HeadResult;

// Arrays in a storage type that outlive the views of them.
class Storage {
 public:
  explicit Storage(DType dtype) : dtype_(dtype) {}

  // An empty vector is not given: no data.
  MutableMatrixView matrix(const std::vector<double>& values, int64_t cols) {
    if (values.empty()) return {nullptr, dtype_, 0, cols, cols};
    const auto size = static_cast<int64_t>(values.size());
    auto& bytes = arrays_.emplace_back(values.size() * static_cast<size_t>(size_of(dtype_)));
    for (int64_t i = 0; i < size; ++i) {
      cpu::store_double(values[static_cast<size_t>(i)], bytes.data(), dtype_, i);
    }
    return {bytes.data(), dtype_, cols > 0 ? size / cols : 0, cols, cols};
  }
  MutableMatrixView zeros(int64_t rows, int64_t cols) {
    MutableMatrixView view =
        matrix(std::vector<double>(static_cast<size_t>(rows * cols), 0.0), cols);
    view.rows = rows;
    return view;
  }

 private:
  DType dtype_;
  std::deque<std::vector<std::byte>> arrays_;
};

std::vector<double> values_of(const MatrixView& view) {
  std::vector<double> values(static_cast<size_t>(view.data ? view.rows * view.cols : 0));
  for (size_t i = 0; i < values.size(); ++i) {
    values[i] = cpu::load_double(view.data, view.dtype, static_cast<int64_t>(i));
  }
  return values;
}

VectorView vector(const std::vector<double>& values) {
  return {values.empty() ? nullptr : values.data(), DType::kF64,
          static_cast<int64_t>(values.size())};
}

MutableVectorView output(std::vector<double>& values, int64_t size) {
  values.assign(static_cast<size_t>(size), 0);
  return {values.data(), DType::kF64, size};
}

IndexView ids(const std::vector<int64_t>& values) {
  return {values.empty() ? nullptr : values.data(), 8, static_cast<int64_t>(values.size())};
}

lossk::Inputs stored_inputs(const HeadConfig& config, const HeadInputs& in, Storage& storage) {
  const auto [n_tok, d_model, vocab] = in.shape;
  lossk::Inputs views;
  if (d_model == 0) views.logits = storage.matrix(in.logits, vocab);
  if (d_model > 0) {
    views.hidden = storage.matrix(in.hidden, d_model);
    views.weight = storage.matrix(in.weight, d_model);
    views.adapter_a = storage.matrix(in.adapter_a, d_model);
    views.adapter_b = storage.matrix(in.adapter_b, config.options.adapter_rank);
  }
  views.bias = vector(in.bias);
  views.labels = ids(in.labels);
  views.token_weights = vector(in.token_weights);
  views.class_weights = vector(in.class_weights);
  views.mask = in.mask;
  views.advantages = vector(in.advantages);
  views.old_log_probs = vector(in.old_log_probs);
  views.reference_log_probs = vector(in.reference_log_probs);
  views.group_shift = vector(in.group_shift);
  views.group_log_sum = vector(in.group_log_sum);
  views.group_label_log_prob = vector(in.group_label_log_prob);
  views.group_distance = vector(in.group_distance);
  views.group_entropy = vector(in.group_entropy);
  views.segments = ids(in.segments);
  views.n_segments = in.n_segments;
  views.pairs = ids(in.pairs);
  for (size_t t = 0; t < in.teachers.size(); ++t) {
    const lossk::Teacher& teacher = config.teachers[t];
    const reference::HeadTeacher& given = in.teachers[t];
    views.teachers.push_back({.logits = storage.matrix(given.logits, teacher.vocab),
                              .hidden = storage.matrix(given.hidden, teacher.d_model),
                              .weight = storage.matrix(given.weight, teacher.d_model),
                              .ids = ids(given.ids),
                              .log_probs = vector(given.log_probs)});
  }
  views.upstream = in.upstream;
  views.upstream_rows = vector(in.upstream_rows);
  return views;
}

// The oracle's inputs with its matrices as they are stored.
HeadInputs rounded(HeadInputs in, const lossk::Inputs& stored) {
  in.logits = values_of(stored.logits);
  in.hidden = values_of(stored.hidden);
  in.weight = values_of(stored.weight);
  in.adapter_a = values_of(stored.adapter_a);
  in.adapter_b = values_of(stored.adapter_b);
  for (size_t t = 0; t < in.teachers.size(); ++t) {
    in.teachers[t].logits = values_of(stored.teachers[t].logits);
    in.teachers[t].hidden = values_of(stored.teachers[t].hidden);
    in.teachers[t].weight = values_of(stored.teachers[t].weight);
  }
  return in;
}

bool is_shard(const HeadCase& head) { return head.config.options.group_vocab > 0; }
// A shard has losses and gradients once its group's statistics are given.
bool has_losses(const HeadCase& head) {
  return !is_shard(head) || !head.inputs.group_shift.empty();
}

// A shard's own entropy, and once in a group the group's where that is given.
bool has_metrics(const HeadCase& head) {
  return !is_shard(head) || !head.inputs.group_entropy.empty();
}
bool has_entropy(const HeadCase& head) { return !has_losses(head) || has_metrics(head); }

lossk::Request full_request(const HeadCase& head, DType dtype) {
  if (!has_losses(head)) return {.input_dtype = dtype, .weight_dtype = dtype, .entropy = true};
  const bool from_hidden = head.inputs.shape.d_model > 0;
  return {.input_dtype = dtype,
          .weight_dtype = dtype,
          .grad_dtype = dtype,
          .d_weight_dtype = dtype,
          .d_logits = !from_hidden,
          .d_hidden = from_hidden,
          .d_weight = from_hidden,
          .d_bias = from_hidden && head.config.options.bias,
          .d_adapter = from_hidden && head.config.options.adapter_rank > 0,
          .entropy = has_entropy(head),
          .policy_metrics = has_metrics(head)};
}

struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t{64}); }
};

// Everything a plan can report, in memory of this function's own.
Result<HeadResult> run_plan(const lossk::HeadPlan& plan, const HeadCase& head,
                            const lossk::Request& request, const lossk::Inputs& inputs,
                            Storage& storage) {
  const auto [n_tok, d_model, vocab] = head.inputs.shape;
  const int64_t rank = head.config.options.adapter_rank;
  HeadResult result;
  lossk::Outputs out;
  result.terms.resize(head.config.terms.size());
  result.policy_metrics.resize(head.config.terms.size());
  result.argmax.resize(static_cast<size_t>(n_tok));
  result.correct.resize(static_cast<size_t>(n_tok));
  const MutableVectorView token_loss = output(result.token_loss, n_tok);
  const MutableVectorView entropy = output(result.entropy, n_tok);
  const MutableVectorView label_log_prob = output(result.label_log_prob, n_tok);
  if (has_losses(head)) {
    out.terms = result.terms;
    out.total = &result.total;
    out.token_loss = token_loss;
  }
  out.n_valid = &result.n_valid;
  out.lse = output(result.lse, n_tok);
  out.shift = output(result.shift, n_tok);
  out.log_sum = output(result.log_sum, n_tok);
  const MutableVectorView distance = output(result.distance, n_tok);
  if (lossk::smooths_labels(head.config)) out.distance = distance;
  if (inputs.labels) out.label_log_prob = label_log_prob;
  if (has_entropy(head)) out.entropy = entropy;
  if (has_metrics(head)) out.policy_metrics = result.policy_metrics;
  if (!is_shard(head)) {
    out.argmax = result.argmax;
    if (inputs.labels) out.correct = result.correct;
  }
  if (request.d_logits) out.d_logits = storage.zeros(n_tok, vocab);
  if (request.d_hidden) out.d_hidden = storage.zeros(n_tok, d_model);
  if (request.d_weight) out.d_weight = storage.zeros(vocab, d_model);
  if (request.d_adapter) {
    out.d_adapter_a = storage.zeros(rank, d_model);
    out.d_adapter_b = storage.zeros(vocab, rank);
  }
  MutableMatrixView d_bias;
  if (request.d_bias) {
    d_bias = storage.zeros(1, vocab);
    out.d_bias = {d_bias.data, d_bias.dtype, vocab};
  }

  const auto bytes = static_cast<size_t>(plan.workspace_bytes());
  const std::unique_ptr<std::byte, AlignedDelete> workspace(
      static_cast<std::byte*>(::operator new(bytes, std::align_val_t{64})));
  if (Status status = plan.run(inputs, out, {workspace.get(), bytes}); !status.ok()) return status;
  result.d_logits = values_of(out.d_logits);
  result.d_hidden = values_of(out.d_hidden);
  result.d_weight = values_of(out.d_weight);
  result.d_bias = values_of(d_bias);
  result.d_adapter_a = values_of(out.d_adapter_a);
  result.d_adapter_b = values_of(out.d_adapter_b);
  return result;
}

ordered_json number(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

ordered_json numbers(const double* values, int64_t n) {
  ordered_json list = ordered_json::array();
  for (int64_t i = 0; i < n; ++i) list.push_back(number(values[i]));
  return list;
}

ordered_json numbers(const std::vector<double>& values) {
  return numbers(values.data(), static_cast<int64_t>(values.size()));
}

ordered_json rows(const std::vector<double>& values, int64_t n_rows, int64_t n_cols) {
  ordered_json list = ordered_json::array();
  for (int64_t i = 0; i < n_rows; ++i) list.push_back(numbers(values.data() + i * n_cols, n_cols));
  return list;
}

ordered_json metrics_json(const lossk::PolicyMetrics& m) {
  return {{"old_log_probs", number(m.old_log_probs)},
          {"new_log_probs", number(m.new_log_probs)},
          {"ratio", number(m.ratio)},
          {"kl", number(m.kl)},
          {"clipped", number(m.clipped)},
          {"advantage", number(m.advantage)},
          {"entropy", number(m.entropy)},
          {"ratio_sum", number(m.ratio_sum)},
          {"ratio_squared_sum", number(m.ratio_squared_sum)},
          {"max_advantage", number(m.max_advantage)},
          {"min_advantage", number(m.min_advantage)},
          {"n_tokens", m.n_tokens},
          {"n_segments", m.n_segments}};
}

void put_gradients(ordered_json& out, const HeadCase& head, const HeadResult& result) {
  const auto [n_tok, d_model, vocab] = head.inputs.shape;
  const lossk::HeadOptions& options = head.config.options;
  if (d_model == 0) {
    out["grad_logits"] = rows(result.d_logits, n_tok, vocab);
    return;
  }
  out["d_hidden"] = rows(result.d_hidden, n_tok, d_model);
  out["d_weight"] = rows(result.d_weight, vocab, d_model);
  if (options.bias) out["d_bias"] = numbers(result.d_bias);
  if (options.adapter_rank > 0) {
    out["d_adapter_a"] = rows(result.d_adapter_a, options.adapter_rank, d_model);
    out["d_adapter_b"] = rows(result.d_adapter_b, vocab, options.adapter_rank);
  }
}

}  // namespace

Result<HeadResult> run_head_case(const HeadCase& head, const HeadCaseOptions& options) {
  HeadConfig config = head.config;
  for (lossk::Teacher& teacher : config.teachers) {
    teacher.dtype = teacher.weight_dtype = options.dtype;
  }
  const lossk::Request request = full_request(head, options.dtype);
  // Planned in either case: its refusals are those of the configuration and the shape.
  const Result<lossk::HeadPlan> plan =
      lossk::plan(head.inputs.shape, config, request, options.limits);
  if (!plan) return plan.status();
  Storage storage(options.dtype);
  const lossk::Inputs inputs = stored_inputs(config, head.inputs, storage);
  if (!options.reference) return run_plan(*plan, head, request, inputs, storage);
  if (Status status = lossk::check_inputs(head.inputs.shape, config, request, inputs, {});
      !status.ok()) {
    return status;
  }
  return reference::head_losses(config, rounded(head.inputs, inputs));
}

std::string head_result_to_json(const Result<HeadCase>& head, const Result<HeadResult>& result,
                                const HeadCaseOutputs& outputs) {
  ordered_json out;
  if (!head || !result) {
    const Status& status = head ? result.status() : head.status();
    out = {{"status", static_cast<int>(status.code())},
           {"name", status_name(status.code())},
           {"message", status.message()}};
    return out.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
  }
  const HeadConfig& config = head->config;
  out["status"] = static_cast<int>(kHeadOk);
  if (has_losses(*head)) {
    out["losses"] = ordered_json::object();
    for (size_t t = 0; t < config.terms.size(); ++t) {
      out["losses"][config.terms[t].name] = number(result->terms[t]);
    }
    out["total"] = number(result->total);
    out["n_valid"] = result->n_valid;
    put_gradients(out, *head, *result);
  }
  if (outputs.rows || !has_losses(*head)) {
    if (has_losses(*head)) out["token_loss"] = numbers(result->token_loss);
    out["lse"] = numbers(result->lse);
    out["label_log_prob"] = numbers(result->label_log_prob);
    out["shift"] = numbers(result->shift);
    out["log_sum"] = numbers(result->log_sum);
    if (is_shard(*head) && lossk::smooths_labels(config)) {
      out["distance"] = numbers(result->distance);
    }
  }
  if (has_entropy(*head) && (outputs.rows || !has_losses(*head))) {
    out["entropy"] = numbers(result->entropy);
  }
  if (outputs.rows && !is_shard(*head)) {
    out["argmax"] = result->argmax;
    out["correct"] = result->correct;
  }
  if (outputs.metrics && has_metrics(*head)) {
    out["metrics"] = ordered_json::object();
    for (size_t t = 0; t < config.terms.size(); ++t) {
      const lossk::LossKind kind = config.terms[t].kind;
      if (kind != lossk::LossKind::kGrpo && kind != lossk::LossKind::kGspo) continue;
      out["metrics"][config.terms[t].name] = metrics_json(result->policy_metrics[t]);
    }
  }
  return out.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

}  // namespace ullage::runtime
