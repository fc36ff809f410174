// The losses at the head on an NVIDIA GPU, from hidden states: the projection, the losses and the
// gradients, a chunk of rows at a time, so that the logits never exist at once. Plan on any host,
// run on a stream.
//
// Two kernels. The plan takes the first that takes the problem and says why where it is not the
// first.
//
// linear_head_sm90_scaled_exponentials: Hopper, bf16 or f16, label and policy terms. Per chunk
// three
//   matrix products and two small kernels. The first product's epilogue reduces the logits where
//   they are born and stores e^(a - c) in that type; the logit gradient never exists on its own:
//   the products for d_hidden and d_weight take the stored exponentials with a factor per row, and
//   the label's column is added apart in float32.
// linear_head_sm80_chunked_products: everything that the row kernels of cuda_head.h take, in bf16,
//   f16 and f32, on sm_80 and newer, also with a bias, an adapter, or a teacher given by its hidden
//   states. Per chunk the logits by cuBLASLt in the input's type, those row kernels (in place
//   where one pass leaves all of the gradient), and the gradients by cuBLASLt from the logit
//   gradient, summed in float32. f32 products are "pedantic": float32 throughout, no TF32. An f16
//   logit gradient is held times a power of two, so that a mean over many rows stays in range.
//   cuBLASLt is loaded when it is first needed.
//
// The terms, inputs and outputs are those of head.h; here every pointer in `Inputs` and `Outputs`
// is device memory, and vectors are f32 (ids: 4 or 8 bytes).
//
// Grades. `bitwise` for a row's loss, log-sum-exp, log-probability and d_hidden: they depend on the
// row, the weight and the terms alone; not on the chunk, the number of rows beside, or the run.
// (chunked products: also on the device's kind and cuBLASLt's version, which choose the products'
// algorithm; once for the shape, at 1023 rows, without split-K.) d_weight, d_bias and the adapter's
// gradients: scaled exponentials `bitwise` over chunks; chunked products `run_to_run`, for a chunk
// is one link of their float32 sum (d_bias: bitwise).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ullage/export.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::lossk {

struct CudaLinearHeadOptions {
  CudaDevice device = {};
  // Of workspace; 0: 512 MiB, and in chunked products the f32 sum of a 16-bit d_weight on top.
  int64_t budget_bytes = 0;
  // Rows: n_tok or more, or a multiple of 256 (scaled exponentials) or 8 (chunked products); 0:
  // what the budget allows.
  int64_t chunk = 0;
  std::string_view kernel = {};  // forced by name; empty: chosen
  // The run will add to d_weight, or write one whose rows are not adjacent: its memory then cannot
  // serve as workspace. A run that does so under a plan that was not told is slower, or refused
  // (695).
  bool accumulate = false;
  // Leave out of d_hidden and d_weight what is small: tiles of 256 rows by 192 columns in which no
  // row has more than its even part of this share of its softmax, so that no row loses more than
  // the share in all. 0: nothing; less than 1. The losses stay exact, and so does each label's own
  // column. What a row loses depends on its group, rows 256 g to 256 g + 255. With scaled
  // exponentials only, and not by strips. See filter_report.
  double filter_tolerance = 0;
};

// What a run with a filter left out. A row's gradient without its label's column is P times its
// softmax, P being what its terms and upstream make of it; so a row of d_hidden is off by at most
// largest_gradient times the largest norm among the rows of the weight, and d_weight, in the
// Frobenius norm, by at most total_gradient times the largest among the rows of hidden.
struct FilterReport {
  double largest_share = 0;     // of a row's softmax, the most over the rows: <= filter_tolerance
  double largest_gradient = 0;  // |P| times the share, the most over the rows
  double total_gradient = 0;    // |P| times the share, summed over the rows
  double kept = 1;              // share of the tiles that d_hidden took
};

class ULLAGE_API CudaLinearHeadPlan {
 public:
  const std::string& kernel() const;
  // "chunk": 6 n_tok d_model vocab operations. "chunk_two_pass": 8, for sequence terms over several
  // chunks. "strip": up to 8 (10 with sequence terms), where the budget holds no long chunk or, for
  // a 16-bit d_weight, no f32 sum of it: losses and d_hidden first, then d_weight range by range of
  // the vocabulary, for which the exponentials of all rows but the last lodged_rows() are made
  // again. The bits are those of chunks.
  const std::string& mode() const;
  int64_t chunk() const;     // rows that one d_weight product sums, at most
  int64_t n_chunks() const;  // passes over d_weight
  // Rows whose exponentials lie in the memory of d_weight until it is written and need no workspace
  // of their own: up to 2 d_model rows in an f32 one, up to d_model in one of 16 bits. 0: none.
  int64_t lodged_rows() const;
  const std::vector<Booking>& bookings() const;  // of the workspace; they add up to it
  int64_t workspace_bytes() const;
  int64_t materialized_bytes() const;  // what [n_tok][vocab] logits in the input's type would take
  double operations() const;           // floating-point operations of the products
  // Kernels that a run with every output puts on the stream. Where no term takes the head's own
  // softmax, a run without outputs of rows has one fewer for each chunk.
  int launches() const;
  const std::vector<Rejection>& rejections() const;

  // What the first run on a device does before it launches: loads cuBLASLt and chooses the
  // products' algorithms. Errors: 621 where the library is missing, 622 where it has no algorithm.
  Status prepare() const;

  // Puts the whole computation on `stream` and returns; capturable in a CUDA graph. `workspace`:
  // device memory, workspace_bytes() or more, 256-byte aligned. Errors: 582, 585, 683, 695, 696 for
  // inputs that do not match the plan, 621 to 623 of the device, naming the launch.
  Status run(CUstream_st* stream, const Inputs& inputs, const Outputs& outputs,
             std::span<std::byte> workspace) const;

  // Waits for `stream` and reports what the last run with this workspace met, as
  // CudaHeadPlan::check does.
  Status check(CUstream_st* stream, std::span<const std::byte> workspace) const;

  // Waits for `stream` and reports what the last run with this workspace left out. Errors: those
  // of `check`; 681 where the plan has no filter.
  Result<FilterReport> filter_report(CUstream_st* stream, std::span<std::byte> workspace) const;

  struct State;
  explicit CudaLinearHeadPlan(std::shared_ptr<const State> state) : state_(std::move(state)) {}

 private:
  std::shared_ptr<const State> state_;
};

// hidden, weight and the adapter have one type of bf16, f16, f32 (scaled exponentials: bf16, f16);
// d_hidden that type or f32 (scaled exponentials: that type), d_weight and with it d_bias and the
// adapter's gradients that type, summed in f32 and rounded once, or f32. Hidden-state teachers have
// the input's type (or any of the three where that is f32). Base pointers lie at multiples of 16
// bytes, and so do rows where those of a dense matrix would. Errors: those of `plan`, 587 where the
// smallest chunk does not fit the budget or the chunk asked for does not, 622, 698 for a kernel
// that is none, and 681, 695, 696 for what neither kernel takes: see plan_cuda, and two teachers
// given by hidden states.
ULLAGE_API Result<CudaLinearHeadPlan> plan_cuda_linear(const Shape& shape, const HeadConfig& config,
                                                       const Request& request,
                                                       const CudaLinearHeadOptions& options);

}  // namespace ullage::lossk
