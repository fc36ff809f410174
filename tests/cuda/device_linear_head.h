// Runs the losses from hidden states on the device over the oracle's inputs.
#pragma once

#include <optional>

#include "cuda/device_head.h"
#include "cuda/device_run.h"
#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::test {

struct LinearOptions {
  DType dtype = DType::kBF16;
  DType d_hidden_dtype = DType::kF64;  // kF64: dtype
  DType d_weight_dtype = DType::kF32;
  int64_t chunk = 0, budget_bytes = 0;
  std::string kernel = "linear_head_sm80_chunked_products";
  bool d_hidden = true, d_weight = true;  // and with the latter d_bias and the adapter's
  bool accumulate = false;                // over gradients of 0.5
  bool capture = false;                   // the plan's first run, into a CUDA graph
  bool statistics = false;  // of a shard: shift, log_sum, label_log_prob, distance and entropy
};

struct LinearResult {
  Status planned = kHeadOk, ran = kHeadOk, checked = kHeadOk;
  std::string kernel, mode;
  int64_t n_chunks = 0, n_valid = 0, workspace_bytes = 0;
  bool workspace_kept = true;  // nothing beyond the planned bytes was written
  std::vector<double> terms, total, token_loss, lse, label_log_prob, entropy;
  std::vector<double> shift, log_sum, distance;
  std::vector<int64_t> argmax;
  std::vector<uint8_t> correct;
  std::vector<lossk::PolicyMetrics> policy_metrics;
  std::vector<double> d_hidden, d_weight, d_bias, d_adapter_a, d_adapter_b;
};

// Rounds everything to the types a device stores it in.
inline void store_linear_inputs(reference::HeadInputs& in, DType dtype) {
  store_inputs(in, dtype);
  for (auto* matrix : {&in.hidden, &in.weight, &in.adapter_a, &in.adapter_b}) {
    for (double& x : *matrix) x = stored_value(x, dtype);
  }
  for (double& x : in.bias) x = static_cast<float>(x);
  for (reference::HeadTeacher& teacher : in.teachers) {
    for (auto* matrix : {&teacher.hidden, &teacher.weight}) {
      for (double& x : *matrix) x = stored_value(x, dtype);
    }
  }
}

inline LinearResult run_linear(const lossk::HeadConfig& given_config,
                               const reference::HeadInputs& in, LinearOptions options) {
  LinearResult result;
  const bool shard = given_config.options.group_vocab > 0;
  options.d_hidden &= !options.statistics;
  options.d_weight &= !options.statistics;
  const auto [n, d, v] = in.shape;
  lossk::HeadConfig config = given_config;
  for (lossk::Teacher& teacher : config.teachers) {
    teacher.dtype = teacher.weight_dtype = options.dtype;
  }
  const int64_t rank = config.options.adapter_rank;
  const DType d_hidden_dtype =
      options.d_hidden_dtype == DType::kF64 ? options.dtype : options.d_hidden_dtype;
  const bool chunked = options.kernel == "linear_head_sm80_chunked_products";
  const bool metrics_wanted = chunked && !options.statistics;
  const lossk::Request request = {.input_dtype = options.dtype,
                                  .weight_dtype = options.dtype,
                                  .grad_dtype = d_hidden_dtype,
                                  .d_weight_dtype = options.d_weight_dtype,
                                  .d_hidden = options.d_hidden,
                                  .d_weight = options.d_weight,
                                  .d_bias = options.d_weight && config.options.bias,
                                  .d_adapter = options.d_weight && rank > 0,
                                  .entropy = chunked,
                                  .policy_metrics = metrics_wanted};
  const auto plan = lossk::plan_cuda_linear(
      in.shape, config, request,
      {.budget_bytes = options.budget_bytes, .chunk = options.chunk, .kernel = options.kernel});
  result.planned = plan.status();
  if (!plan) return result;
  result.kernel = plan->kernel();
  result.mode = plan->mode();
  result.n_chunks = plan->n_chunks();
  result.workspace_bytes = plan->workspace_bytes();

  std::vector<DeviceMatrix> matrices;
  matrices.reserve(16);
  const auto input = [&](const std::vector<double>& values, int64_t rows,
                         int64_t cols) -> MatrixView {
    if (values.empty()) return {};
    matrices.emplace_back(values.data(), rows, cols, options.dtype, Placement{});
    return matrices.back().view;
  };
  DeviceInputs held;
  lossk::Inputs inputs = held.vectors(in, 0);
  inputs.hidden = input(in.hidden, n, d);
  inputs.weight = input(in.weight, v, d);
  if (config.options.bias) inputs.bias = held.floats(in.bias, 0);
  if (rank > 0) inputs.adapter_a = input(in.adapter_a, rank, d);
  if (rank > 0) inputs.adapter_b = input(in.adapter_b, v, rank);
  for (size_t t = 0; t < config.teachers.size(); ++t) {
    const lossk::Teacher& teacher = config.teachers[t];
    const reference::HeadTeacher& values = in.teachers[t];
    inputs.teachers.emplace_back();
    if (teacher.kind == lossk::TeacherKind::kLogits) {
      inputs.teachers[t].logits = input(values.logits, n, teacher.vocab);
    } else if (teacher.kind == lossk::TeacherKind::kHidden) {
      inputs.teachers[t].hidden = input(values.hidden, n, teacher.d_model);
      inputs.teachers[t].weight = input(values.weight, teacher.vocab, teacher.d_model);
    } else {
      inputs.teachers[t].ids = held.ids(values.ids, 0);
      inputs.teachers[t].log_probs = held.floats(values.log_probs, 0);
    }
  }

  const size_t n_terms = config.terms.size(), rows = static_cast<size_t>(n);
  const DeviceMemory terms(n_terms * 8), total(8), n_valid(8),
      metrics(n_terms * sizeof(lossk::PolicyMetrics));
  const DeviceMemory token_loss(rows * 4), lse(rows * 4), log_prob(rows * 4), entropy(rows * 4);
  const DeviceMemory argmax(rows * 8), correct(rows), shift(rows * 4), log_sum(rows * 4);
  const DeviceMemory distance(rows * 4);
  const auto vector = [&](const DeviceMemory& memory) {
    return MutableVectorView{memory.data(), DType::kF32, n, 1};
  };
  lossk::Outputs outputs;
  if (!options.statistics) {
    outputs.terms = {terms.data<double>(), n_terms};
    outputs.total = total.data<double>();
    outputs.token_loss = vector(token_loss);
  }
  outputs.n_valid = n_valid.data<int64_t>();
  outputs.lse = vector(lse);
  outputs.shift = vector(shift);
  outputs.log_sum = vector(log_sum);
  if (lossk::smooths_labels(config)) outputs.distance = vector(distance);
  if (!in.labels.empty()) outputs.label_log_prob = vector(log_prob);
  if (chunked) outputs.entropy = vector(entropy);
  if (metrics_wanted) outputs.policy_metrics = {metrics.data<lossk::PolicyMetrics>(), n_terms};
  if (chunked && !shard) {
    outputs.argmax = {argmax.data<int64_t>(), rows};
    if (!in.labels.empty()) outputs.correct = {correct.data<uint8_t>(), rows};
  }
  // Gradients: halves where they are accumulated in, else NaN, so that every element must be
  // written.
  std::vector<DeviceMatrix> gradients;
  gradients.reserve(5);
  const auto gradient = [&](int64_t g_rows, int64_t cols, DType dtype) {
    gradients.emplace_back(nullptr, g_rows, cols, dtype, Placement{});
    if (!options.accumulate) {
      expect_cuda(
          cudaMemset(gradients.back().memory.data(), 0xff, gradients.back().memory.bytes()));
    }
    return gradients.back().view;
  };
  if (request.d_hidden) outputs.d_hidden = gradient(n, d, d_hidden_dtype);
  if (request.d_weight) outputs.d_weight = gradient(v, d, options.d_weight_dtype);
  if (request.d_bias) {
    const MutableMatrixView column = gradient(v, 1, options.d_weight_dtype);
    outputs.d_bias = {column.data, column.dtype, v, 1};
  }
  if (request.d_adapter) outputs.d_adapter_a = gradient(rank, d, options.d_weight_dtype);
  if (request.d_adapter) outputs.d_adapter_b = gradient(v, rank, options.d_weight_dtype);
  outputs.accumulate = options.accumulate;

  constexpr size_t kGuard = 4096;
  const auto planned = static_cast<size_t>(plan->workspace_bytes());
  const DeviceMemory workspace(planned + kGuard);
  const std::span<std::byte> work{workspace.data<std::byte>(), planned};
  const PlanRun done = run_plan(*plan, inputs, outputs, work, options.capture);
  result.ran = done.ran;
  result.checked = done.checked;
  if (!options.capture && !result.ran.ok()) return result;
  if (result.checked.code() == kCudaLaunchFailed) return result;
  const std::vector<uint8_t> used = workspace.read<uint8_t>();
  for (size_t i = planned; i < used.size(); ++i) result.workspace_kept &= used[i] == 0xff;

  result.terms = terms.read<double>();
  result.total = total.read<double>();
  result.n_valid = n_valid.read<int64_t>()[0];
  result.token_loss = doubles_of(token_loss);
  result.lse = doubles_of(lse);
  result.shift = doubles_of(shift);
  result.log_sum = doubles_of(log_sum);
  result.distance = doubles_of(distance);
  if (!in.labels.empty()) result.label_log_prob = doubles_of(log_prob);
  if (chunked) {
    result.entropy = doubles_of(entropy);
    result.argmax = argmax.read<int64_t>();
    if (!in.labels.empty()) result.correct = correct.read<uint8_t>();
    result.policy_metrics = metrics.read<lossk::PolicyMetrics>();
  }
  size_t next = 0;
  const auto read = [&](bool wanted, std::vector<double>& to) {
    if (!wanted) return;
    const DeviceMatrix& matrix = gradients[next++];
    bool untouched = true;
    const std::vector<uint8_t> bytes = matrix.rows(untouched);
    const auto size = static_cast<size_t>(size_of(matrix.view.dtype));
    for (size_t at = 0; at < bytes.size(); at += size) {
      to.push_back(read_stored(bytes.data() + at, matrix.view.dtype));
    }
  };
  read(request.d_hidden, result.d_hidden);
  read(request.d_weight, result.d_weight);
  read(request.d_bias, result.d_bias);
  read(request.d_adapter, result.d_adapter_a);
  read(request.d_adapter, result.d_adapter_b);
  return result;
}

}  // namespace ullage::test
