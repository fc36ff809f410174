// What rows bring besides their logits, by a warp that asks for them a row ahead: a lane a vector,
// so that one load brings them all, and nobody waits for it.
#pragma once

#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

template <class T>
class RowVectors {
 public:
  // `with_logit`: of the label, where nobody else reads it.
  __device__ RowVectors(const HeadParams& p, bool with_logit, int lane)
      : p_(p), with_logit_(with_logit), lane_(lane) {}

  // Asks for a row, which counts. `label`: its column_of_label.
  __device__ void ask(int64_t row, int64_t label) {
    RowFloats vector;
    if (lane_ == kUpstream) vector = p_.upstream_rows;
    if (lane_ == kTokenWeight) vector = p_.token_weights;
    if (lane_ == kClassWeight) vector = p_.class_weights;
    if (lane_ == kAdvantage) vector = p_.advantages;
    if (lane_ == kOldLogProb) vector = p_.old_log_probs;
    if (lane_ == kReferenceLogProb) vector = p_.reference_log_probs;
    label_ = label;
    value_ = lane_ <= kClassWeight ? 1 : 0;  // where there is none
    const bool has = vector.data != nullptr && (lane_ == kUpstream || label_ != kNoLabelHere) &&
                     (lane_ != kClassWeight || label_ >= 0);
    if (has) value_ = vector.data[(lane_ == kClassWeight ? label_ : row) * vector.stride];
    if (with_logit_) label_logit_ = label_logit<T>(p_, row, label_);
  }

  // Of the row asked for last.
  __device__ RowInputs inputs() const {
    const auto of = [&](Lane lane) { return __shfl_sync(~0u, value_, lane); };
    RowInputs in;
    in.label = label_;
    in.label_logit = to_float(label_logit_);
    in.upstream = of(kUpstream);
    in.token_weight = of(kTokenWeight);
    in.class_weight = of(kClassWeight);
    in.advantage = of(kAdvantage);
    in.old_log_prob = of(kOldLogProb);
    in.reference_log_prob = of(kReferenceLogProb);
    return in;
  }

 private:
  enum Lane {
    kUpstream,
    kTokenWeight,
    kClassWeight,
    kAdvantage,
    kOldLogProb,
    kReferenceLogProb,
  };

  const HeadParams& p_;
  bool with_logit_;
  int lane_;
  int64_t label_ = kNoLabelHere;
  float value_ = 0;
  T label_logit_{};
};

}  // namespace ullage::lossk::cuda
