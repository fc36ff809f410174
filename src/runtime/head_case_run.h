// Runs a case of the loss algebra and writes its results as JSON.
#pragma once

#include <string>

#include "runtime/head_case.h"

namespace ullage::runtime {

struct HeadCaseOptions {
  bool reference = false;     // by the float64 oracle instead of a plan
  DType dtype = DType::kF64;  // of matrices, inputs as outputs; rounded to before anything else
  lossk::PlanLimits limits = {};
};

// Validation, planning and the run of one case. Errors: those of lossk::plan and HeadPlan::run.
Result<reference::HeadResult> run_head_case(const HeadCase& head, const HeadCaseOptions& options);

struct HeadCaseOutputs {
  bool rows = false;     // token_loss, lse and its parts, label_log_prob, entropy, argmax, correct
  bool metrics = false;  // of grpo and gspo terms
};

// {"status": 680, "losses": {name: scalar}, "total": ..., "n_valid": ..., then "grad_logits", or
// "d_hidden", "d_weight", "d_bias", "d_adapter_a", "d_adapter_b"}; a refusal is {"status": 586,
// "name": ..., "message": ...}. Non-finite numbers are "inf", "-inf" and "nan".
std::string head_result_to_json(const Result<HeadCase>& head,
                                const Result<reference::HeadResult>& result,
                                const HeadCaseOutputs& outputs);

}  // namespace ullage::runtime
