// Weights by name out of a file's tensors, with the shape that the model needs.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "model/stored_tensor.h"
#include "model/weight.h"
#include "ullage/status.h"

namespace ullage::model {

// The first weight that is absent, of another shape (657) or of a type that is not read (651) is
// kept; it and all later finds give empty weights.
class WeightFinder {
 public:
  // `origin` names the model; `tensors` outlives the finder.
  WeightFinder(std::string_view origin, const std::vector<StoredTensor>& tensors);

  const StoredTensor* stored(std::string_view name) const;  // nullptr where there is none

  // A matrix stored as [rows][cols], or a vector stored as [cols] with rows = 1.
  Weight find(const std::string& name, int64_t rows, int64_t cols);

  // Marks a tensor that needs no weight.
  void ignore(std::string_view name) { unused_.erase(name); }
  // Tensors that were neither found nor ignored, by name.
  std::vector<const StoredTensor*> unused() const;

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

 private:
  void refuse(StatusCode code, std::string_view name, std::string_view why);

  std::string origin_;
  std::map<std::string_view, const StoredTensor*> by_name_;
  std::map<std::string_view, const StoredTensor*> unused_;
  Status status_ = kModelOk;
};

// The whole of a tensor as a matrix, its last dimension being the row. The type must be read.
Weight weight_of(const StoredTensor& tensor);

}  // namespace ullage::model
