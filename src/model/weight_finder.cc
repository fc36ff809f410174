#include "model/weight_finder.h"

#include <fmt/format.h>

#include "model/text.h"

namespace ullage::model {

WeightFinder::WeightFinder(std::string_view origin, const std::vector<StoredTensor>& tensors)
    : origin_(origin) {
  for (const StoredTensor& tensor : tensors) by_name_.emplace(tensor.name, &tensor);
  unused_ = by_name_;
}

const StoredTensor* WeightFinder::stored(std::string_view name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : found->second;
}

Weight WeightFinder::find(const std::string& name, int64_t rows, int64_t cols) {
  if (!ok()) return {};
  const StoredTensor* tensor = stored(name);
  const auto needed = rows == 1 ? std::vector{cols} : std::vector{rows, cols};
  if (tensor == nullptr) {
    refuse(kModelTensorMissing, name,
           fmt::format("is missing; {} is needed", describe_shape(needed)));
    return {};
  }
  if (tensor->shape != needed && tensor->shape != std::vector{rows, cols}) {
    refuse(kModelTensorMissing, name,
           fmt::format("is {}, where {} is needed", describe_shape(tensor->shape),
                       describe_shape(needed)));
    return {};
  }
  if (!tensor->type.element) {
    refuse(kModelTypeUnsupported, name, fmt::format("is {}, which is not read", tensor->type.name));
    return {};
  }
  unused_.erase(name);
  return weight_of(*tensor);
}

std::vector<const StoredTensor*> WeightFinder::unused() const {
  std::vector<const StoredTensor*> tensors;
  tensors.reserve(unused_.size());
  for (const auto& [name, tensor] : unused_) tensors.push_back(tensor);
  return tensors;
}

void WeightFinder::refuse(StatusCode code, std::string_view name, std::string_view why) {
  status_ = {code, fmt::format("{}: tensor {} {}", origin_, in_quotes(name), why)};
}

Weight weight_of(const StoredTensor& tensor) {
  const int64_t cols = tensor.shape.empty() ? 1 : tensor.shape.back();
  const int64_t rows = cols == 0 ? 0 : tensor.elements / cols;
  return {.data = tensor.data,
          .type = *tensor.type.element,
          .rows = rows,
          .cols = cols,
          .row_bytes = cols / tensor.type.block_elements * tensor.type.block_bytes};
}

}  // namespace ullage::model
