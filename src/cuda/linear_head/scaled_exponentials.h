// The plan of the scaled exponentials, shared by its making and its runs.
#pragma once

#include "cuda/linear_head/params.h"
#include "cuda/linear_plan.h"
#include "cuda/workspace_slices.h"

namespace ullage::lossk::cuda {

struct ScaledExponentials final : CudaLinearHeadPlan::State {
  LinearLayout layout;
  int n_sequence_terms = 0;
  double filter_tolerance = 0;

  bool filters() const { return filter_tolerance > 0; }
  // d_weight is rounded to 16 bits once it is summed.
  bool rounds() const { return request.d_weight && request.d_weight_dtype != DType::kF32; }

  Status prepare() const override { return kHeadOk; }
  Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
             std::byte* workspace) const override;
  Result<FilterReport> filter_report(CUstream_st* stream, std::byte* workspace) const override;
};

// Hands out the workspace; the one walk of the plan and the run.
void take_workspace(const ScaledExponentials& state, WorkspaceSlices& slices, HeadParams& p,
                    LinearParams& r);

int64_t n_groups(const LinearLayout& layout, int64_t n_tok);

// How the rows and the vocabulary are cut, within the budget. Errors: 587.
Status choose_layout(ScaledExponentials& state, const CudaLinearHeadOptions& options);

}  // namespace ullage::lossk::cuda
