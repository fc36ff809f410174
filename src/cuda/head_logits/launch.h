// From a plan and filled parameters to kernels on a stream. Without CUDA in the build every
// function answers 621.
#pragma once

#include <span>

#include "cuda/head_logits/config.h"
#include "cuda/head_logits/params.h"

struct CUstream_st;

namespace ullage::lossk::cuda {

struct RowLaunch {
  RowLayout layout;
  DType dtype = DType::kF32;
  Family family = Family::kLabels;
  int n_multiprocessors = 0;
};

// One pass over the rows (passes.h). The first that leaves a gradient says whether it is added to
// what is there; all later ones add.
struct RowPass {
  HeadParams params;
  RowLaunch launch;
  bool sequences = false;  // it has terms whose slopes wait for whole segments
  bool gradient = true;    // it has terms; else it is there for the outputs of rows
};

// The kernels around the rows, for whoever brings other rows: divisors and gains before them; the
// sequence terms' slopes between two passes over them; scalars, the total and token losses after.
Status launch_census(const HeadParams& params, CUstream_st* stream);
Status launch_sequences(const HeadParams& params, CUstream_st* stream);
Status launch_scalars(const HeadParams& params, CUstream_st* stream);

// The rows [first_row, first_row + n_rows) on their own, after the census (and, for their
// gradient under sequence terms, after the sequences with slopes_ready set).
Status launch_rows(const HeadParams& params, const RowLaunch& launch, CUstream_st* stream);

// Census, rows, with sequence terms their two kernels and the rows again, scalars.
Status launch_head(const HeadParams& params, std::span<const RowPass> passes, CUstream_st* stream);

// Waits for the stream and copies the census to the host.
Status read_census(const Census* device, Census& host, CUstream_st* stream);

}  // namespace ullage::lossk::cuda
