// Runs a plan of the losses on the inputs of the oracle, stored in any types: what lies between
// reference::HeadInputs and lossk::Inputs.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <span>
#include <vector>

#include "contract/head_validate.h"
#include "cpu/storage.h"
#include "reference/head_losses.h"
#include "support/head_random.h"
#include "ullage/lossk/head.h"

namespace ullage::test {

// Values rounded to a storage type.
struct Stored {
  DType dtype = DType::kF64;
  std::vector<std::byte> bytes;

  Stored() = default;
  Stored(const std::vector<double>& values, DType type) : dtype(type) {
    bytes.resize(values.size() * static_cast<size_t>(size_of(type)));
    for (size_t i = 0; i < values.size(); ++i) {
      cpu::store_double(values[i], bytes.data(), type, static_cast<int64_t>(i));
    }
  }
  std::vector<double> values() const {
    std::vector<double> out(bytes.size() / static_cast<size_t>(size_of(dtype)));
    for (size_t i = 0; i < out.size(); ++i) {
      out[i] = cpu::load_double(bytes.data(), dtype, static_cast<int64_t>(i));
    }
    return out;
  }
  void* data() { return bytes.empty() ? nullptr : bytes.data(); }
  MatrixView matrix(int64_t cols) {
    const auto rows =
        static_cast<int64_t>(bytes.size()) / size_of(dtype) / std::max<int64_t>(cols, 1);
    return {data(), dtype, rows, cols, cols};
  }
  VectorView vector() {
    return {data(), dtype, static_cast<int64_t>(bytes.size()) / size_of(dtype), 1};
  }
};

struct PlanCase {
  lossk::HeadConfig config;
  reference::HeadInputs inputs;
  lossk::Request request;  // the gradients are filled in by run()
  lossk::PlanLimits limits;
  bool gradient = true;
  bool accumulate = false;
  double initial = 0;  // what gradient buffers hold before
  bool policy_metrics = false;
  bool entropy = true;
  bool statistics = false;  // of a shard: shift, log_sum, label_log_prob, distance and entropy
};

// A drawn head with everything stored in one type.
inline PlanCase case_of(const RandomHead& head, DType dtype = DType::kF64) {
  PlanCase c;
  c.config = head.config;
  c.inputs = head.inputs;
  c.request.input_dtype = c.request.weight_dtype = c.request.grad_dtype = c.request.d_weight_dtype =
      dtype;
  return c;
}

struct PlanOutcome {
  Status status = kHeadOk;
  reference::HeadResult result;
  std::vector<std::byte> bits;  // of everything that was written, for comparisons to the bit
  int64_t workspace_bytes = 0;
  std::string mode;
  int64_t n_chunks = 0;
};

inline IndexView ids_of(const std::vector<int64_t>& ids) {
  return {ids.empty() ? nullptr : ids.data(), 8, static_cast<int64_t>(ids.size()), 1};
}

inline PlanOutcome run_plan(PlanCase c) {
  const auto [n_tok, d_model, vocab] = c.inputs.shape;
  const int64_t rank = c.config.options.adapter_rank;
  const bool from_hidden = d_model > 0;
  lossk::Request& request = c.request;
  const bool shard = c.config.options.group_vocab > 0;
  c.policy_metrics &= !c.statistics;
  c.gradient &= !c.statistics;
  request.entropy = c.entropy;
  request.policy_metrics = c.policy_metrics;
  if (c.gradient) {
    request.d_logits = !from_hidden;
    request.d_hidden = request.d_weight = from_hidden;
    request.d_bias = from_hidden && c.config.options.bias;
    request.d_adapter = from_hidden && rank > 0;
  }
  for (lossk::Teacher& teacher : c.config.teachers) {
    if (teacher.kind == lossk::TeacherKind::kTopK) continue;
    teacher.dtype = teacher.weight_dtype = request.input_dtype;
  }

  PlanOutcome outcome;
  Result<lossk::HeadPlan> plan = lossk::plan(c.inputs.shape, c.config, request, c.limits);
  if (!plan) {
    outcome.status = plan.status();
    return outcome;
  }
  outcome.workspace_bytes = plan->workspace_bytes();
  outcome.mode = plan->mode();
  outcome.n_chunks = plan->n_chunks();
  int64_t booked = 0;
  for (const Booking& booking : plan->bookings()) booked += booking.bytes;
  EXPECT_EQ(booked, plan->workspace_bytes());

  const auto type = request.input_dtype;
  Stored logits(c.inputs.logits, type), hidden(c.inputs.hidden, type);
  Stored weight(c.inputs.weight, request.weight_dtype), bias(c.inputs.bias, DType::kF64);
  Stored adapter_a(c.inputs.adapter_a, request.weight_dtype);
  Stored adapter_b(c.inputs.adapter_b, request.weight_dtype);
  const auto f64 = [](std::vector<double>& values) {
    return VectorView{values.empty() ? nullptr : values.data(), DType::kF64,
                      static_cast<int64_t>(values.size()), 1};
  };
  lossk::Inputs in;
  if (!from_hidden) in.logits = logits.matrix(vocab);
  if (from_hidden) {
    in.hidden = hidden.matrix(d_model);
    in.weight = weight.matrix(d_model);
    if (c.config.options.bias) in.bias = bias.vector();
    if (rank > 0) in.adapter_a = adapter_a.matrix(d_model);
    if (rank > 0) in.adapter_b = adapter_b.matrix(rank);
  }
  in.labels = ids_of(c.inputs.labels);
  in.token_weights = f64(c.inputs.token_weights);
  in.class_weights = f64(c.inputs.class_weights);
  in.mask = c.inputs.mask;
  in.advantages = f64(c.inputs.advantages);
  in.old_log_probs = f64(c.inputs.old_log_probs);
  in.reference_log_probs = f64(c.inputs.reference_log_probs);
  in.segments = ids_of(c.inputs.segments);
  in.n_segments = c.inputs.n_segments;
  in.pairs = ids_of(c.inputs.pairs);
  in.group_shift = f64(c.inputs.group_shift);
  in.group_log_sum = f64(c.inputs.group_log_sum);
  in.group_label_log_prob = f64(c.inputs.group_label_log_prob);
  in.group_distance = f64(c.inputs.group_distance);
  in.group_entropy = f64(c.inputs.group_entropy);
  in.upstream = c.inputs.upstream;
  in.upstream_rows = f64(c.inputs.upstream_rows);
  std::vector<Stored> kept;
  kept.reserve(3 * c.inputs.teachers.size());
  for (size_t t = 0; t < c.inputs.teachers.size(); ++t) {
    reference::HeadTeacher& given = c.inputs.teachers[t];
    const lossk::Teacher& teacher = c.config.teachers[t];
    lossk::TeacherInputs views;
    if (!given.logits.empty()) {
      views.logits = kept.emplace_back(given.logits, teacher.dtype).matrix(teacher.vocab);
    }
    if (!given.hidden.empty()) {
      views.hidden = kept.emplace_back(given.hidden, teacher.dtype).matrix(teacher.d_model);
      views.weight = kept.emplace_back(given.weight, teacher.weight_dtype).matrix(teacher.d_model);
    }
    views.ids = ids_of(given.ids);
    views.log_probs = f64(given.log_probs);
    in.teachers.push_back(views);
  }

  reference::HeadResult& r = outcome.result;
  const auto n_terms = c.config.terms.size();
  const auto rows = static_cast<size_t>(n_tok);
  r.terms.assign(n_terms, -1);
  r.policy_metrics.resize(n_terms);
  for (auto* v :
       {&r.token_loss, &r.lse, &r.label_log_prob, &r.entropy, &r.shift, &r.log_sum, &r.distance}) {
    v->assign(rows, -7);
  }
  r.argmax.assign(rows, -7);
  r.correct.assign(rows, 7);
  const auto gradient = [&](bool wanted, int64_t count, DType dtype) {
    return wanted ? Stored(std::vector<double>(static_cast<size_t>(count), c.initial), dtype)
                  : Stored();
  };
  Stored d_logits = gradient(request.d_logits, n_tok * vocab, request.grad_dtype);
  Stored d_hidden = gradient(request.d_hidden, n_tok * d_model, request.grad_dtype);
  Stored d_weight = gradient(request.d_weight, vocab * d_model, request.d_weight_dtype);
  Stored d_bias = gradient(request.d_bias, vocab, request.d_weight_dtype);
  Stored d_a = gradient(request.d_adapter, rank * d_model, request.d_weight_dtype);
  Stored d_b = gradient(request.d_adapter, vocab * rank, request.d_weight_dtype);
  const auto writable = [](Stored& s, int64_t cols) {
    const MatrixView m = s.matrix(cols);
    return MutableMatrixView{s.data(), m.dtype, m.rows, m.cols, m.row_stride};
  };
  const auto f64_out = [](std::vector<double>& v) {
    return MutableVectorView{v.data(), DType::kF64, static_cast<int64_t>(v.size()), 1};
  };
  lossk::Outputs out;
  if (!c.statistics) {
    out.terms = r.terms;
    out.total = &r.total;
    out.token_loss = f64_out(r.token_loss);
  }
  out.n_valid = &r.n_valid;
  out.lse = f64_out(r.lse);
  out.shift = f64_out(r.shift);
  out.log_sum = f64_out(r.log_sum);
  if (lossk::smooths_labels(c.config)) out.distance = f64_out(r.distance);
  if (!c.inputs.labels.empty()) out.label_log_prob = f64_out(r.label_log_prob);
  if (c.entropy) out.entropy = f64_out(r.entropy);
  if (!shard) out.argmax = r.argmax;
  if (!shard && !c.inputs.labels.empty()) out.correct = r.correct;
  if (c.policy_metrics) out.policy_metrics = r.policy_metrics;
  if (request.d_logits) out.d_logits = writable(d_logits, vocab);
  if (request.d_hidden) out.d_hidden = writable(d_hidden, d_model);
  if (request.d_weight) out.d_weight = writable(d_weight, d_model);
  if (request.d_bias) out.d_bias = {d_bias.data(), d_bias.dtype, vocab, 1};
  if (request.d_adapter) out.d_adapter_a = writable(d_a, d_model);
  if (request.d_adapter) out.d_adapter_b = writable(d_b, rank);
  out.accumulate = c.accumulate;

  // Garbage, and a fence behind it.
  constexpr size_t kFence = 64;
  const auto size = static_cast<size_t>(plan->workspace_bytes());
  auto* const workspace =
      static_cast<std::byte*>(::operator new(size + kFence, std::align_val_t{64}));
  std::memset(workspace, 0xff, size + kFence);
  outcome.status = plan->run(in, out, {workspace, size});
  for (size_t i = size; i < size + kFence; ++i) EXPECT_EQ(workspace[i], std::byte{0xff});
  ::operator delete(workspace, std::align_val_t{64});

  r.d_logits = d_logits.values();
  r.d_hidden = d_hidden.values();
  r.d_weight = d_weight.values();
  r.d_bias = d_bias.values();
  r.d_adapter_a = d_a.values();
  r.d_adapter_b = d_b.values();
  const auto append = [&](const void* data, size_t count) {
    const auto* const bytes = static_cast<const std::byte*>(data);
    outcome.bits.insert(outcome.bits.end(), bytes, bytes + count);
  };
  for (const Stored* s : {&d_logits, &d_hidden, &d_weight, &d_bias, &d_a, &d_b}) {
    append(s->bytes.data(), s->bytes.size());
  }
  for (const auto* v : {&r.terms, &r.token_loss, &r.lse, &r.label_log_prob, &r.entropy}) {
    append(v->data(), v->size() * sizeof(double));
  }
  append(&r.total, sizeof r.total);
  append(r.argmax.data(), r.argmax.size() * sizeof(int64_t));
  return outcome;
}

}  // namespace ullage::test
