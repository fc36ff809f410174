// Cases of the loss algebra as JSON documents: a configuration (head_config_json.h) and its inputs
// in one object,
//
//   {"logits": [[...], ...], "labels": [...], "losses": [...], ...}
//
// or {"cases": [...]}. Inputs have the names of lossk::Inputs, matrices are lists of rows; `hidden`
// and `weight` in place of `logits` are the fused door. Teachers: `teacher_logits`, or
// `teacher_hidden` and `teacher_weight`, or `teacher_ids` and `teacher_log_probs`, or a list
// `teachers` of objects with these fields less the prefix. Numbers may also be "inf", "-inf" and
// "nan". `name`, `note` and `expected` are skipped.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "reference/head_losses.h"

namespace ullage::runtime {

struct HeadCase {
  lossk::HeadConfig config;
  reference::HeadInputs inputs;
};

struct HeadCases {
  bool listed = false;  // the document was {"cases": [...]}
  std::vector<Result<HeadCase>> cases;
};

// Errors: 699 where the document as a whole is malformed; a case's own fault stays with the case.
Result<HeadCases> head_cases_from_json(std::string_view text);

}  // namespace ullage::runtime
