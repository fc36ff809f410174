// A tensor as a file stores it, before anyone asked whether it can be read.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "model/weight.h"
#include "ullage/status.h"

namespace ullage::model {

// An element type that a format defines: its size is known, so that layouts can be checked, whether
// or not it can be widened to float.
struct StoredType {
  std::string_view name;
  int64_t block_elements = 1;
  int64_t block_bytes = 0;
  std::optional<ElementType> element;  // empty: not read
};

struct StoredTensor {
  std::string name;
  StoredType type;
  std::vector<int64_t> shape;  // outermost dimension first; the last one is contiguous
  int64_t elements = 0;        // the product of shape; 1 where it is empty
  int64_t bytes = 0;
  const std::byte* data = nullptr;  // inside the mapping
};

// Sets elements and bytes from type and shape. 646 where a product leaves int64_t, 652 where the
// elements are not a whole number of blocks. `origin` names the file.
Status measure(StoredTensor& tensor, std::string_view origin);

// "[2, 3]".
std::string describe_shape(const std::vector<int64_t>& shape);

}  // namespace ullage::model
