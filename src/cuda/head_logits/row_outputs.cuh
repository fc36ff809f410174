// What a row reports, by a warp: a lane an output, so that one store writes them all.
#pragma once

#include "cuda/head_logits/row_terms.cuh"

namespace ullage::lossk::cuda {

// The same in every lane. As it is, of a row that no term counts and that has no label.
struct RowReport {
  float lse = 0, log_prob = 0, entropy = 0;
  float shift = 0, log_sum = 0;  // lse in two numbers: log_sum is relative to shift
  float distance = 0;
  int argmax = -1;
  bool correct = false;
};

// All but shift, log_sum and distance. `reported`: the row has a label, or there are no labels.
__device__ inline RowReport row_report(const HeadParams& p, int64_t row, bool reported,
                                       const RowInputs& in, const RowSums& sums, float log_prob) {
  RowReport report;
  report.log_prob = log_prob;
  report.correct = in.label >= 0 && sums.argmax == in.label;
  if (!reported) return report;
  report.lse = log_sum_exp(sums);
  report.entropy = p.group_entropy.data != nullptr
                       ? float_at(p.group_entropy, row, 0)
                       : kLn2 * (sums.log2_sum - sums.entropy / sums.sum);
  report.argmax = sums.argmax;
  return report;
}

class RowOutputs {
 public:
  __device__ RowOutputs(const HeadParams& p, int lane) : p_(p), lane_(lane) {
    if (lane == kLse) output_ = p.lse;
    if (lane == kLogProb) output_ = p.label_log_prob;
    if (lane == kEntropy) output_ = p.entropy;
    if (lane == kShift) output_ = p.shift;
    if (lane == kLogSum) output_ = p.log_sum;
    if (lane == kDistance) output_ = p.distance;
    if (lane == kRowLogProb) output_ = {p.row_log_prob, 1};
    if (lane == kRowEntropy) output_ = {p.row_entropy, 1};
  }

  __device__ void write(int64_t row, const RowReport& report) const {
    float value = report.lse;
    if (lane_ == kLogProb || lane_ == kRowLogProb) value = report.log_prob;
    if (lane_ == kEntropy || lane_ == kRowEntropy) value = report.entropy;
    if (lane_ == kShift) value = report.shift;
    if (lane_ == kLogSum) value = report.log_sum;
    if (lane_ == kDistance) value = report.distance;
    if (output_.data != nullptr) output_.data[row * output_.stride] = value;
    if (p_.argmax != nullptr && lane_ == 0) p_.argmax[row] = report.argmax;
    if (p_.correct != nullptr && lane_ == 0) p_.correct[row] = report.correct;
  }

 private:
  // The last two are the workspace's.
  enum Lane {
    kLse,
    kLogProb,
    kEntropy,
    kShift,
    kLogSum,
    kDistance,
    kRowLogProb,
    kRowEntropy,
  };

  const HeadParams& p_;
  int lane_;
  RowOutput output_;  // this lane's
};

}  // namespace ullage::lossk::cuda
