// Reads every element that a file's tensors say they have, so that a wrong bound is a crash.
#pragma once

#include <vector>

#include "model/stored_tensor.h"
#include "model/weight_finder.h"

namespace ullage::model {

inline void read_all(const std::vector<StoredTensor>& tensors) {
  for (const StoredTensor& tensor : tensors) {
    if (!tensor.type.element || tensor.elements == 0) continue;
    const Weight weight = weight_of(tensor);
    std::vector<float> row(static_cast<size_t>(weight.cols));
    for (int64_t r = 0; r < weight.rows; ++r) dequantize(weight, r, 0, weight.cols, row.data());
  }
}

}  // namespace ullage::model
