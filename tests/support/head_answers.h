// Small configurations and inputs for tests whose answers were worked out independently of this
// code, to the digits given: inputs from the complaints of other libraries' users, numbered R1 to
// R23.
#pragma once

#include <limits>
#include <utility>
#include <vector>

#include "support/head_random.h"

namespace ullage::test {

inline constexpr double kInf = std::numeric_limits<double>::infinity();
inline constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
inline constexpr double kSixDigits = 6e-7;

using Values = std::vector<double>;

// Terms without a name get one.
inline HeadConfig config_of(std::vector<LossTerm> terms) {
  for (size_t t = 0; t < terms.size(); ++t) {
    if (terms[t].name.empty()) terms[t].name = "term" + std::to_string(t);
  }
  return {.terms = std::move(terms)};
}

inline HeadInputs logits_of(Values logits, int64_t vocab) {
  HeadInputs inputs;
  inputs.shape = {static_cast<int64_t>(logits.size()) / vocab, 0, vocab};
  inputs.logits = std::move(logits);
  return inputs;
}

// Cross-entropy, summed over the rows.
inline const LossTerm kSum = {.divisor = 1};

}  // namespace ullage::test
