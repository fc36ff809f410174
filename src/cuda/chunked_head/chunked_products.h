// The plan of the chunked products, shared by its making and its runs.
#pragma once

#include <initializer_list>
#include <string_view>
#include <utility>

#include "cuda/chunked_head/launch.h"
#include "cuda/linear_plan.h"
#include "cuda/workspace_slices.h"

namespace ullage::lossk::cuda {

struct ChunkedProducts final : CudaLinearHeadPlan::State {
  explicit ChunkedProducts(CudaHeadPlan rows_plan) : rows(std::move(rows_plan)) {}

  CudaHeadPlan rows;  // over all rows, as if their logits were given
  ChunkedLayout layout;
  int teacher = -1;  // the one given by its hidden states
  int n_sequence_terms = 0;
  int64_t n_gradients = 0;  // passes over a chunk that leave one
  mutable ChunkedAlgorithms algorithms;

  Status prepare() const override {
    const ullage::cuda::Cublas* blas = nullptr;
    const ChunkedAlgorithms::Set* set = nullptr;
    return algorithms.choose(layout, blas, set);
  }
  Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
             std::byte* workspace) const override;
};

// Hands out the workspace; the one walk of the plan and the run. `rows`: the rows' own plan's.
void take_workspace(const ChunkedProducts& state, WorkspaceSlices& slices, std::byte*& rows,
                    ChunkedParams& p);

Status check_product_dtype(std::string_view field, DType dtype,
                           std::initializer_list<DType> accepted);

}  // namespace ullage::lossk::cuda
