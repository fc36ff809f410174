// What one launch of the fused head's kernels works on.
#pragma once

#include "cuda/linear_head/params.h"

namespace ullage::lossk::cuda {

// A part of the [n_tok][vocab] logits: rows [first, first + rows), columns [first_column,
// first_column + columns); its exponentials are the rows of `e` from e_row on.
struct Part {
  int64_t first, rows, first_column, columns;
  product::BlockedMatrix e;
  int64_t e_row;
  int64_t group_row;  // of the first, in its group
};

// What one product adds to d_weight: e^T scaled_hidden over `rows` rows, which e has from e_row on,
// and `more` from the row more_from of them. Both hold the vocabulary's columns [first_column,
// first_column + columns).
struct WeightPart {
  product::BlockedMatrix e, more;
  int64_t e_row, rows, more_from;
  int64_t scaled_row;  // scaled_hidden's row of the first
  int64_t first_column, columns;
  float* sum;  // f32 [columns][d_model], row stride that of d_weight_sum; unused where it rounds
  bool keeps_old;
};

}  // namespace ullage::lossk::cuda
