// Runs a loss configuration on the device over the oracle's inputs.
#pragma once

#include <map>
#include <optional>

#include "contract/head_validate.h"
#include "cuda/device_memory.h"
#include "cuda/head_logits/config.h"
#include "support/head_random.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::test {

// Rows lie `pad` elements further apart than they are long, the first `shift` elements into its
// allocation.
struct Placement {
  int64_t pad = 0;
  int64_t shift = 0;
};

struct DeviceOptions {
  DType dtype = DType::kF32;
  std::string kernel = {};
  lossk::cuda::Tuning tuning = {};
  bool gradient = true;
  bool in_place = false;
  bool accumulate = false;  // over a gradient of halves
  bool row_outputs = true;
  bool entropy = true, argmax = true;  // among them; policy metrics need the entropy
  bool statistics = false;  // of a shard: shift, log_sum, label_log_prob, distance and entropy
  int64_t first_row = 0, n_rows = -1;  // -1: all
  Placement logits = {}, teacher = {}, gradient_at = {};
};

struct DeviceResult {
  Status planned = kHeadOk, ran = kHeadOk, checked = kHeadOk;
  std::string kernel;
  int64_t n_valid = 0;
  std::vector<double> terms, total, token_loss, lse, label_log_prob, entropy, gradient;
  std::vector<double> shift, log_sum, distance;
  std::vector<int64_t> argmax;
  std::vector<uint8_t> correct;
  std::vector<lossk::PolicyMetrics> policy_metrics;
  std::vector<uint8_t> gradient_bits;  // as stored, rows without their padding
  bool padding_untouched = true;
};

inline double stored_value(double value, DType dtype) {
  const auto f = static_cast<float>(value);
  if (dtype == DType::kBF16) return BF16::from_float(f).to_float();
  if (dtype == DType::kF16) return F16::from_float(f).to_float();
  return f;
}

// Rounds everything a device would store in a narrower type, so that both sides see the same
// numbers.
inline void store_inputs(reference::HeadInputs& in, DType dtype) {
  for (double& x : in.logits) x = stored_value(x, dtype);
  for (reference::HeadTeacher& teacher : in.teachers) {
    for (double& x : teacher.logits) x = stored_value(x, dtype);
    for (double& x : teacher.log_probs) x = static_cast<float>(x);
  }
  for (auto* vector : {&in.token_weights, &in.class_weights, &in.advantages, &in.old_log_probs,
                       &in.reference_log_probs, &in.upstream_rows}) {
    for (double& x : *vector) x = static_cast<float>(x);
  }
}

inline void append_stored(std::vector<uint8_t>& bytes, double value, DType dtype) {
  const auto f = static_cast<float>(value);
  uint32_t word = std::bit_cast<uint32_t>(f);
  if (dtype == DType::kBF16) word = BF16::from_float(f).bits;
  if (dtype == DType::kF16) word = F16::from_float(f).bits;
  for (int i = 0; i < size_of(dtype); ++i) bytes.push_back(static_cast<uint8_t>(word >> 8 * i));
}

inline double read_stored(const uint8_t* bytes, DType dtype) {
  uint32_t word = 0;
  std::memcpy(&word, bytes, static_cast<size_t>(size_of(dtype)));
  if (dtype == DType::kBF16) return BF16{static_cast<uint16_t>(word)}.to_float();
  if (dtype == DType::kF16) return F16{static_cast<uint16_t>(word)}.to_float();
  return std::bit_cast<float>(word);
}

// A matrix on the device, padding filled with 0xff bytes.
struct DeviceMatrix {
  DeviceMemory memory;
  MutableMatrixView view;

  DeviceMatrix(const double* values, int64_t rows, int64_t cols, DType dtype, Placement at) {
    const int64_t stride = cols + at.pad, size = size_of(dtype);
    std::vector<uint8_t> bytes;
    bytes.reserve(static_cast<size_t>((rows * stride + at.shift) * size));
    bytes.assign(static_cast<size_t>(at.shift * size), 0xff);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < cols; ++j) {
        append_stored(bytes, values == nullptr ? 0.5 : values[i * cols + j], dtype);
      }
      // The last row ends its allocation: a read past it is one past the memory.
      if (i + 1 < rows) bytes.insert(bytes.end(), static_cast<size_t>(at.pad * size), 0xff);
    }
    memory = DeviceMemory(bytes);
    view = {memory.data<uint8_t>() + at.shift * size, dtype, rows, cols, stride};
  }

  // The rows' bytes, and whether everything around them is still 0xff.
  std::vector<uint8_t> rows(bool& padding_untouched) const {
    const std::vector<uint8_t> all = memory.read<uint8_t>();
    const int64_t size = size_of(view.dtype);
    const int64_t start = static_cast<const uint8_t*>(view.data) - memory.data<uint8_t>();
    std::vector<bool> inside(all.size(), false);
    std::vector<uint8_t> result;
    for (int64_t i = 0; i < view.rows; ++i) {
      for (int64_t b = 0; b < view.cols * size; ++b) {
        const int64_t at = start + i * view.row_stride * size + b;
        inside[at] = true;
        result.push_back(all[at]);
      }
    }
    for (size_t b = 0; b < all.size(); ++b) {
      if (!inside[b] && all[b] != 0xff) padding_untouched = false;
    }
    return result;
  }
};

// Vectors of the oracle's inputs on the device, from row `first` on.
class DeviceInputs {
 public:
  VectorView floats(const std::vector<double>& values, int64_t first) {
    if (values.empty()) return {};
    std::vector<float> copy(values.begin() + first, values.end());
    held_.emplace_back(copy);
    return {held_.back().data(), DType::kF32, static_cast<int64_t>(copy.size()), 1};
  }
  IndexView ids(const std::vector<int64_t>& values, int64_t first) {
    if (values.empty()) return {};
    std::vector<int64_t> copy(values.begin() + first, values.end());
    held_.emplace_back(copy);
    return {held_.back().data(), 8, static_cast<int64_t>(copy.size()), 1};
  }
  std::span<const uint8_t> bytes(const std::vector<uint8_t>& values, int64_t first) {
    if (values.empty()) return {};
    std::vector<uint8_t> copy(values.begin() + first, values.end());
    held_.emplace_back(copy);
    return {held_.back().data<uint8_t>(), copy.size()};
  }
  // Everything but logits, hidden states, weights and teachers.
  lossk::Inputs vectors(const reference::HeadInputs& in, int64_t first) {
    lossk::Inputs inputs;
    inputs.labels = ids(in.labels, first);
    inputs.token_weights = floats(in.token_weights, first);
    inputs.class_weights = floats(in.class_weights, 0);
    inputs.mask = bytes(in.mask, first);
    inputs.advantages = floats(in.advantages, first);
    inputs.old_log_probs = floats(in.old_log_probs, first);
    inputs.reference_log_probs = floats(in.reference_log_probs, first);
    inputs.segments = ids(in.segments, first);
    inputs.n_segments = in.n_segments;
    inputs.pairs = ids(in.pairs, 0);
    inputs.group_shift = floats(in.group_shift, first);
    inputs.group_log_sum = floats(in.group_log_sum, first);
    inputs.group_label_log_prob = floats(in.group_label_log_prob, first);
    inputs.group_distance = floats(in.group_distance, first);
    inputs.group_entropy = floats(in.group_entropy, first);
    inputs.upstream = in.upstream;
    inputs.upstream_rows = floats(in.upstream_rows, first);
    return inputs;
  }

 private:
  std::vector<DeviceMemory> held_;
};

inline DeviceResult run_on_device(const lossk::HeadConfig& given_config,
                                  const reference::HeadInputs& in, DeviceOptions options) {
  DeviceResult result;
  const bool shard = given_config.options.group_vocab > 0;
  const bool metrics_wanted = !options.statistics && options.entropy;
  options.gradient &= !options.statistics;
  lossk::HeadConfig config = given_config;
  for (lossk::Teacher& teacher : config.teachers) teacher.dtype = options.dtype;
  const int64_t first = options.first_row, vocab = in.shape.vocab;
  const int64_t n = options.n_rows < 0 ? in.shape.n_tok - first : options.n_rows;
  const lossk::Request request = {.input_dtype = options.dtype,
                                  .grad_dtype = options.dtype,
                                  .d_logits = options.gradient,
                                  .entropy = true,
                                  .policy_metrics = metrics_wanted};
  const auto plan = lossk::cuda::plan_with_tuning({n, 0, vocab}, config, request,
                                                  {.kernel = options.kernel}, options.tuning);
  result.planned = plan.status();
  if (!plan) return result;
  result.kernel = plan->kernel();

  DeviceMatrix logits(in.logits.data() + first * vocab, n, vocab, options.dtype, options.logits);
  std::optional<DeviceMatrix> gradient;
  if (options.gradient && !options.in_place) {
    gradient.emplace(nullptr, n, vocab, options.dtype, options.gradient_at);
    if (!options.accumulate) {
      // Poison: every element must be written.
      for (int64_t i = 0; i < n; ++i) {
        expect_cuda(cudaMemset(static_cast<uint8_t*>(gradient->view.data) +
                                   i * gradient->view.row_stride * size_of(options.dtype),
                               0xff, static_cast<size_t>(vocab * size_of(options.dtype))));
      }
    }
  }
  std::vector<DeviceMatrix> teachers;
  teachers.reserve(config.teachers.size());

  DeviceInputs held;
  lossk::Inputs inputs = held.vectors(in, first);
  inputs.logits = logits.view;
  for (size_t t = 0; t < config.teachers.size(); ++t) {
    inputs.teachers.emplace_back();
    if (config.teachers[t].kind == lossk::TeacherKind::kTopK) {
      const int64_t k = config.teachers[t].k;
      inputs.teachers.back().ids = held.ids(in.teachers[t].ids, first * k);
      inputs.teachers.back().log_probs = held.floats(in.teachers[t].log_probs, first * k);
    }
    if (config.teachers[t].kind != lossk::TeacherKind::kLogits) continue;
    const int64_t width = config.teachers[t].vocab;
    teachers.emplace_back(in.teachers[t].logits.data() + first * width, n, width, options.dtype,
                          options.teacher);
    inputs.teachers.back().logits = teachers.back().view;
  }

  const size_t n_terms = config.terms.size(), rows = static_cast<size_t>(n);
  DeviceMemory terms(n_terms * 8), total(8), n_valid(8),
      metrics(n_terms * sizeof(lossk::PolicyMetrics));
  DeviceMemory token_loss(rows * 4), lse(rows * 4), log_prob(rows * 4), entropy(rows * 4);
  DeviceMemory argmax(rows * 8), correct(rows), shift(rows * 4), log_sum(rows * 4);
  DeviceMemory distance(rows * 4);
  const auto vector = [&](const DeviceMemory& memory) {
    return MutableVectorView{memory.data(), DType::kF32, n, 1};
  };
  lossk::Outputs outputs;
  outputs.n_valid = n_valid.data<int64_t>();
  if (!options.statistics) {
    outputs.terms = {terms.data<double>(), n_terms};
    outputs.total = total.data<double>();
    if (options.row_outputs) outputs.token_loss = vector(token_loss);
  }
  if (options.row_outputs) {
    outputs.lse = vector(lse);
    outputs.shift = vector(shift);
    outputs.log_sum = vector(log_sum);
    if (lossk::smooths_labels(config)) outputs.distance = vector(distance);
    if (!in.labels.empty()) outputs.label_log_prob = vector(log_prob);
  }
  if (options.row_outputs && options.entropy) outputs.entropy = vector(entropy);
  if (options.row_outputs && metrics_wanted) {
    outputs.policy_metrics = {metrics.data<lossk::PolicyMetrics>(), n_terms};
  }
  if (options.row_outputs && options.argmax && !shard) {
    outputs.argmax = {argmax.data<int64_t>(), rows};
    if (!in.labels.empty()) outputs.correct = {correct.data<uint8_t>(), rows};
  }
  if (options.gradient) outputs.d_logits = options.in_place ? logits.view : gradient->view;
  outputs.accumulate = options.accumulate;

  DeviceMemory workspace(static_cast<size_t>(plan->workspace_bytes()));
  const std::span<std::byte> work{workspace.data<std::byte>(), workspace.bytes()};
  result.ran = plan->run(nullptr, inputs, outputs, work);
  if (!result.ran.ok()) return result;
  result.checked = plan->check(nullptr, work);
  if (result.checked.code() == kCudaLaunchFailed) return result;

  result.terms = terms.read<double>();
  result.total = total.read<double>();
  result.n_valid = n_valid.read<int64_t>()[0];
  if (options.row_outputs) {
    result.token_loss = doubles_of(token_loss);
    result.lse = doubles_of(lse);
    result.shift = doubles_of(shift);
    result.log_sum = doubles_of(log_sum);
    result.distance = doubles_of(distance);
    result.label_log_prob = doubles_of(log_prob);
    if (options.entropy) result.entropy = doubles_of(entropy);
    if (options.argmax) {
      result.argmax = argmax.read<int64_t>();
      result.correct = correct.read<uint8_t>();
    }
    result.policy_metrics = metrics.read<lossk::PolicyMetrics>();
  }
  if (options.gradient) {
    const DeviceMatrix& matrix = options.in_place ? logits : *gradient;
    result.gradient_bits = matrix.rows(result.padding_untouched);
    const auto size = static_cast<size_t>(size_of(options.dtype));
    for (size_t at = 0; at < result.gradient_bits.size(); at += size) {
      result.gradient.push_back(read_stored(result.gradient_bits.data() + at, options.dtype));
    }
  }
  return result;
}

}  // namespace ullage::test
