// What a row reports, by one lane, or by a warp: a lane an output, so that one store writes them
// all.
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
  if (p.group_entropy.data != nullptr) {
    report.entropy = float_at(p.group_entropy, row, 0);
  } else if (p.wants_entropy) {
    report.entropy = kLn2 * (sums.log2_sum - sums.entropy / sums.sum);
  }
  report.argmax = sums.argmax;
  return report;
}

// By one lane.
__device__ inline void write_outputs_alone(const HeadParams& p, int64_t row,
                                           const RowReport& said) {
  const auto put = [&](const RowOutput& to, float what) {
    if (to.data != nullptr) to.data[row * to.stride] = what;
  };
  put(p.lse, said.lse);
  put(p.label_log_prob, said.log_prob);
  put(p.entropy, said.entropy);
  put(p.shift, said.shift);
  put(p.log_sum, said.log_sum);
  put(p.distance, said.distance);
  put({p.row_log_prob, 1}, said.log_prob);
  put({p.row_entropy, 1}, said.entropy);
  if (p.argmax != nullptr) p.argmax[row] = said.argmax;
  if (p.correct != nullptr) p.correct[row] = said.correct;
}

__device__ inline void write_outputs(const HeadParams& p, int64_t row, const RowReport& said,
                                     int lane) {
  // The last two are the workspace's.
  enum Lane { kLse, kLogProb, kEntropy, kShift, kLogSum, kDistance, kRowLogProb, kRowEntropy };
  RowOutput output;
  float value = 0;
  const auto put = [&](Lane its, const RowOutput& to, float what) {
    if (lane == its) output = to, value = what;
  };
  put(kLse, p.lse, said.lse);
  put(kLogProb, p.label_log_prob, said.log_prob);
  put(kEntropy, p.entropy, said.entropy);
  put(kShift, p.shift, said.shift);
  put(kLogSum, p.log_sum, said.log_sum);
  put(kDistance, p.distance, said.distance);
  put(kRowLogProb, {p.row_log_prob, 1}, said.log_prob);
  put(kRowEntropy, {p.row_entropy, 1}, said.entropy);
  if (output.data != nullptr) output.data[row * output.stride] = value;
  if (p.argmax != nullptr && lane == 0) p.argmax[row] = said.argmax;
  if (p.correct != nullptr && lane == 0) p.correct[row] = said.correct;
}

}  // namespace ullage::lossk::cuda
