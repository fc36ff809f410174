#include "capi/head_views.h"

#include <cstddef>
#include <span>
#include <string>

#include "ullage/dtype.h"
#include "ullage/tensor.h"

namespace ullage::capi {
namespace {

static_assert(ULLAGE_F64 == static_cast<int>(DType::kF64));
static_assert(ULLAGE_F32 == static_cast<int>(DType::kF32));
static_assert(ULLAGE_BF16 == static_cast<int>(DType::kBF16));
static_assert(ULLAGE_F16 == static_cast<int>(DType::kF16));
static_assert(sizeof(ullage_policy_metrics) == sizeof(lossk::PolicyMetrics));
static_assert(offsetof(ullage_policy_metrics, min_advantage) ==
              offsetof(lossk::PolicyMetrics, min_advantage));
static_assert(offsetof(ullage_policy_metrics, n_segments) ==
              offsetof(lossk::PolicyMetrics, n_segments));

// Converts fields one by one and keeps the first fault. A field that is not given stays empty.
class Reader {
 public:
  Status status() const { return status_; }

  void matrix(const char* name, const ullage_matrix& from, MatrixView& to) {
    if (from.data && floating(name, from.dtype)) {
      to = {from.data, static_cast<DType>(from.dtype), from.rows, from.cols, from.row_stride};
    }
  }
  void matrix(const char* name, const ullage_matrix& from, MutableMatrixView& to) {
    if (from.data && floating(name, from.dtype)) {
      to = {from.data, static_cast<DType>(from.dtype), from.rows, from.cols, from.row_stride};
    }
  }
  void vector(const char* name, const ullage_vector& from, VectorView& to) {
    if (from.data && floating(name, from.dtype)) {
      to = {from.data, static_cast<DType>(from.dtype), from.size, from.stride};
    }
  }
  void vector(const char* name, const ullage_vector& from, MutableVectorView& to) {
    if (from.data && floating(name, from.dtype)) {
      to = {from.data, static_cast<DType>(from.dtype), from.size, from.stride};
    }
  }
  void ids(const char* name, const ullage_vector& from, IndexView& to) {
    if (!from.data) return;
    if (from.dtype != ULLAGE_I32 && from.dtype != ULLAGE_I64) {
      return refuse(name, from.dtype, "ULLAGE_I32 (4) or ULLAGE_I64 (5)");
    }
    to = {from.data, from.dtype == ULLAGE_I64 ? 8 : 4, from.size, from.stride};
  }
  // Adjacent values of one type.
  template <class T>
  void values(const char* name, const ullage_vector& from, int32_t dtype, std::span<T>& to) {
    if (!from.data) return;
    if (from.dtype != dtype) return refuse(name, from.dtype, std::to_string(dtype));
    if (from.size < 0 || (from.stride != 1 && from.size > 1)) {
      return note({kHeadShapeMismatch,
                   std::string(name) + " has size " + std::to_string(from.size) + " and stride " +
                       std::to_string(from.stride) + "; accepted: adjacent values, stride 1"});
    }
    to = {static_cast<T*>(from.data), static_cast<size_t>(from.size)};
  }
  template <class T>
  void value(const char* name, const ullage_vector& from, int32_t dtype, T*& to) {
    std::span<T> one;
    values(name, from, dtype, one);
    if (from.data && one.size() != 1) {
      return note({kHeadShapeMismatch,
                   std::string(name) + " has size " + std::to_string(from.size) + "; accepted: 1"});
    }
    to = one.data();
  }
  void note(Status status) {
    if (status_.ok()) status_ = std::move(status);
  }

 private:
  bool floating(const char* name, int32_t dtype) {
    if (dtype >= ULLAGE_F64 && dtype <= ULLAGE_F16) return true;
    refuse(name, dtype, "ULLAGE_F64 (0), ULLAGE_F32 (1), ULLAGE_BF16 (2), ULLAGE_F16 (3)");
    return false;
  }
  void refuse(const char* name, int32_t dtype, const std::string& accepted) {
    note({kHeadBadDtype,
          std::string(name) + ".dtype is " + std::to_string(dtype) + "; accepted: " + accepted});
  }

  Status status_ = kHeadOk;
};

Status check_struct_size(const char* name, size_t size, size_t expected) {
  if (size == expected) return kHeadOk;
  return {kHeadShapeMismatch, std::string(name) + ".struct_size is " + std::to_string(size) +
                                  "; accepted: " + std::to_string(expected)};
}

}  // namespace

Status read_inputs(const ullage_head_inputs& from, lossk::Inputs& inputs) {
  if (Status status = check_struct_size("inputs", from.struct_size, sizeof from); !status.ok()) {
    return status;
  }
  Reader read;
  read.matrix("logits", from.logits, inputs.logits);
  read.matrix("hidden", from.hidden, inputs.hidden);
  read.matrix("weight", from.weight, inputs.weight);
  read.vector("bias", from.bias, inputs.bias);
  read.matrix("adapter_a", from.adapter_a, inputs.adapter_a);
  read.matrix("adapter_b", from.adapter_b, inputs.adapter_b);
  read.ids("labels", from.labels, inputs.labels);
  read.vector("token_weights", from.token_weights, inputs.token_weights);
  read.vector("class_weights", from.class_weights, inputs.class_weights);
  read.values("mask", from.mask, ULLAGE_U8, inputs.mask);
  read.vector("advantages", from.advantages, inputs.advantages);
  read.vector("old_log_probs", from.old_log_probs, inputs.old_log_probs);
  read.vector("reference_log_probs", from.reference_log_probs, inputs.reference_log_probs);
  read.ids("segments", from.segments, inputs.segments);
  inputs.n_segments = from.n_segments;
  read.ids("pairs", from.pairs, inputs.pairs);
  if (from.n_teachers < 0 || (from.n_teachers > 0 && !from.teachers)) {
    return {kHeadMissingInput, "n_teachers is " + std::to_string(from.n_teachers) +
                                   (from.teachers ? "" : " and teachers is null") +
                                   "; accepted: as many as the configuration has"};
  }
  inputs.teachers.assign(static_cast<size_t>(from.n_teachers), {});
  for (size_t i = 0; i < inputs.teachers.size(); ++i) {
    const ullage_head_teacher& teacher = from.teachers[i];
    read.matrix("teacher.logits", teacher.logits, inputs.teachers[i].logits);
    read.matrix("teacher.hidden", teacher.hidden, inputs.teachers[i].hidden);
    read.matrix("teacher.weight", teacher.weight, inputs.teachers[i].weight);
    read.ids("teacher.ids", teacher.ids, inputs.teachers[i].ids);
    read.vector("teacher.log_probs", teacher.log_probs, inputs.teachers[i].log_probs);
  }
  inputs.upstream = from.upstream;
  read.vector("upstream_rows", from.upstream_rows, inputs.upstream_rows);
  read.vector("group_shift", from.group_shift, inputs.group_shift);
  read.vector("group_log_sum", from.group_log_sum, inputs.group_log_sum);
  read.vector("group_label_log_prob", from.group_label_log_prob, inputs.group_label_log_prob);
  read.vector("group_distance", from.group_distance, inputs.group_distance);
  read.vector("group_entropy", from.group_entropy, inputs.group_entropy);
  return read.status();
}

Status read_outputs(const ullage_head_outputs& from, lossk::Outputs& outputs) {
  if (Status status = check_struct_size("outputs", from.struct_size, sizeof from); !status.ok()) {
    return status;
  }
  Reader read;
  read.values("terms", from.terms, ULLAGE_F64, outputs.terms);
  read.value("total", from.total, ULLAGE_F64, outputs.total);
  read.value("n_valid", from.n_valid, ULLAGE_I64, outputs.n_valid);
  read.vector("token_loss", from.token_loss, outputs.token_loss);
  read.vector("lse", from.lse, outputs.lse);
  read.vector("label_log_prob", from.label_log_prob, outputs.label_log_prob);
  read.vector("entropy", from.entropy, outputs.entropy);
  read.values("argmax", from.argmax, ULLAGE_I64, outputs.argmax);
  read.values("correct", from.correct, ULLAGE_U8, outputs.correct);
  read.matrix("d_logits", from.d_logits, outputs.d_logits);
  read.matrix("d_hidden", from.d_hidden, outputs.d_hidden);
  read.matrix("d_weight", from.d_weight, outputs.d_weight);
  read.vector("d_bias", from.d_bias, outputs.d_bias);
  read.matrix("d_adapter_a", from.d_adapter_a, outputs.d_adapter_a);
  read.matrix("d_adapter_b", from.d_adapter_b, outputs.d_adapter_b);
  if (from.policy_metrics && from.n_policy_metrics >= 0) {
    outputs.policy_metrics = {reinterpret_cast<lossk::PolicyMetrics*>(from.policy_metrics),
                              static_cast<size_t>(from.n_policy_metrics)};
  }
  outputs.accumulate = from.accumulate != 0;
  read.vector("shift", from.shift, outputs.shift);
  read.vector("log_sum", from.log_sum, outputs.log_sum);
  read.vector("distance", from.distance, outputs.distance);
  return read.status();
}

Status read_values(const ullage_vector& from, MutableVectorView& values) {
  if (from.size < 0 || (from.stride != 1 && from.size > 1) || (from.size > 0 && !from.data)) {
    return {kHeadShapeMismatch, "values has size " + std::to_string(from.size) + " and stride " +
                                    std::to_string(from.stride) +
                                    "; accepted: adjacent values, stride 1"};
  }
  Reader read;
  read.vector("values", from, values);
  return read.status();
}

}  // namespace ullage::capi
