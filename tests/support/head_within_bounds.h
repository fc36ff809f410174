// Holds a run of a plan to the float64 oracle within the derived bounds, and keeps count of how
// much of them was used.
#pragma once

#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "reference/error_bound.h"
#include "support/compare.h"
#include "support/head_plan_case.h"

namespace ullage::test {

// The largest fraction of its bound that each output used.
using Fractions = std::map<std::string, double>;

inline void print(const char* test, const Fractions& fractions) {
  std::printf("[ FRACTION ] %s:", test);
  for (const auto& [what, fraction] : fractions) std::printf(" %s %.2g", what.c_str(), fraction);
  std::printf("\n");
}

// The inputs after rounding to the types that the request stores them in.
inline reference::HeadInputs as_stored(reference::HeadInputs in, const lossk::Request& request) {
  const auto round = [](std::vector<double>& values, DType dtype) {
    values = Stored(values, dtype).values();
  };
  for (std::vector<double>* values : {&in.logits, &in.hidden}) round(*values, request.input_dtype);
  for (std::vector<double>* values : {&in.weight, &in.adapter_a, &in.adapter_b}) {
    round(*values, request.weight_dtype);
  }
  for (reference::HeadTeacher& teacher : in.teachers) {
    for (std::vector<double>* values : {&teacher.logits, &teacher.hidden, &teacher.weight}) {
      round(*values, request.input_dtype);
    }
  }
  return in;
}

// `c.inputs` are rounded as stored first. Gradients may be off by their bound and by the one
// rounding to their storage type.
inline void expect_within_bounds(PlanCase c, Fractions& fractions) {
  c.inputs = as_stored(c.inputs, c.request);
  const PlanOutcome outcome = run_plan(c);
  ASSERT_TRUE(outcome.status.ok()) << outcome.status.to_string();
  const reference::HeadResult& actual = outcome.result;
  const reference::HeadResult expected = reference::head_losses(c.config, c.inputs);
  const DType accumulate = c.request.input_dtype == DType::kF64 ? DType::kF64 : DType::kF32;
  const reference::HeadErrorBounds bounds =
      reference::head_error_bounds(c.config, c.inputs, expected, accumulate);

  const auto check = [&](const std::string& what, const std::vector<double>& is,
                         std::vector<double> right, const std::vector<double>& bound,
                         DType stored) {
    // Beyond f16's largest value, 65504 and half a unit, lies infinity.
    for (size_t i = 0; i < right.size() && stored == DType::kF16; ++i) {
      if (std::abs(right[i]) - bound[i] >= 65520) {
        right[i] = std::copysign(INFINITY, right[i]);
      } else if (std::abs(right[i]) + bound[i] >= 65520) {
        right[i] = is[i];
      }
    }
    const Comparison result = compare(is, right, [&](size_t i) {
      // A float64 oracle has roundings of its own.
      return bound[i] + 0x1p-48 * std::abs(right[i]) + 1e-300 +
             (stored == DType::kF64
                  ? 0
                  : reference::rounding_error(stored, std::abs(right[i]) + bound[i]));
    });
    // A single value may well be smaller than what it can be known to.
    EXPECT_TRUE(result.ok || result.message.starts_with("vacuous"))
        << what << ": " << result.message;
    fractions[what] = std::max(fractions[what], result.fraction);
  };
  check("terms", actual.terms, expected.terms, bounds.terms, DType::kF64);
  check("total", {actual.total}, std::vector<double>{expected.total}, {bounds.total}, DType::kF64);
  check("token_loss", actual.token_loss, expected.token_loss, bounds.token_loss, DType::kF64);
  check("lse", actual.lse, expected.lse, bounds.lse, DType::kF64);
  check("entropy", actual.entropy, expected.entropy, bounds.entropy, DType::kF64);
  if (!c.inputs.labels.empty()) {
    check("label_log_prob", actual.label_log_prob, expected.label_log_prob, bounds.label_log_prob,
          DType::kF64);
  }
  EXPECT_EQ(actual.n_valid, expected.n_valid);
  if (!c.gradient) return;
  if (c.inputs.shape.d_model == 0) {
    check("d_logits", actual.d_logits, expected.d_logits, bounds.d_logits, c.request.grad_dtype);
    return;
  }
  const DType dw = c.request.d_weight_dtype;
  check("d_hidden", actual.d_hidden, expected.d_hidden, bounds.d_hidden, c.request.grad_dtype);
  check("d_weight", actual.d_weight, expected.d_weight, bounds.d_weight, dw);
  if (c.config.options.bias) check("d_bias", actual.d_bias, expected.d_bias, bounds.d_bias, dw);
  if (c.config.options.adapter_rank > 0) {
    check("d_adapter_a", actual.d_adapter_a, expected.d_adapter_a, bounds.d_adapter_a, dw);
    check("d_adapter_b", actual.d_adapter_b, expected.d_adapter_b, bounds.d_adapter_b, dw);
  }
}

}  // namespace ullage::test
