// The float64 oracle of the loss algebra (ullage/lossk/head.h): every term by itself, over logits
// that all exist at once, as plain loops to be checked against docs/losses.md. Callers have checked
// the configuration and the inputs.
#pragma once

#include <cstdint>
#include <vector>

#include "ullage/lossk/head.h"

namespace ullage::reference {

struct HeadTeacher {
  std::vector<double> logits = {};     // [n_tok][teacher vocab]
  std::vector<double> hidden = {};     // [n_tok][teacher d_model]
  std::vector<double> weight = {};     // [teacher vocab][teacher d_model]
  std::vector<int64_t> ids = {};       // [n_tok][k]
  std::vector<double> log_probs = {};  // [n_tok][k]
};

// lossk::Inputs as dense row-major vectors; an empty one is not given.
struct HeadInputs {
  lossk::Shape shape;
  std::vector<double> logits;                // [n_tok][vocab], where d_model is 0
  std::vector<double> hidden, weight, bias;  // [n_tok][d_model], [vocab][d_model], [vocab]
  std::vector<double> adapter_a, adapter_b;  // [r][d_model], [vocab][r]

  std::vector<int64_t> labels;                                         // [n_tok]
  std::vector<double> token_weights;                                   // [n_tok]
  std::vector<double> class_weights;                                   // [vocab]
  std::vector<uint8_t> mask;                                           // [n_tok]
  std::vector<double> advantages, old_log_probs, reference_log_probs;  // [n_tok]
  std::vector<int64_t> segments;                                       // [n_tok]
  int64_t n_segments = 0;
  std::vector<int64_t> pairs;  // [n_pairs][2]
  std::vector<HeadTeacher> teachers;
  std::vector<double> group_shift, group_log_sum, group_label_log_prob;  // [n_tok]
  std::vector<double> group_distance, group_entropy;                     // [n_tok]

  double upstream = 1;
  std::vector<double> upstream_rows;  // [n_tok]
};

struct HeadResult {
  std::vector<double> terms;     // [n_terms] unweighted scalars
  std::vector<double> divisors;  // [n_terms] what each was divided by
  double total = 0;
  int64_t n_valid = 0;

  std::vector<double> token_loss, lse, label_log_prob, entropy;  // [n_tok]
  std::vector<double> shift, log_sum, distance;                  // [n_tok]
  std::vector<int64_t> argmax;                                   // [n_tok]
  std::vector<uint8_t> correct;                                  // [n_tok]
  std::vector<lossk::PolicyMetrics> policy_metrics;              // [n_terms]

  // Gradients of upstream * total. d_logits [n_tok][vocab] is with respect to the given logits, or
  // to hidden W^T (softcap and bias come after).
  std::vector<double> d_logits;
  std::vector<double> d_hidden, d_weight, d_bias, d_adapter_a, d_adapter_b;

  // Each term's own: row losses [n_terms][n_tok], and the gradient of its scalar
  // [n_terms][n_tok][vocab]. No weight, no upstream.
  std::vector<std::vector<double>> term_row_loss, term_d_logits;
};

HeadResult head_losses(const lossk::HeadConfig& config, const HeadInputs& inputs);

}  // namespace ullage::reference
