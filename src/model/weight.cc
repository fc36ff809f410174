#include "model/weight.h"

namespace ullage::model {
namespace {

struct Layout {
  std::string_view name;
  int64_t elements;
  int64_t bytes;
};

// Bytes as the sum of a block's fields, in their order in the file.
constexpr Layout layout_of(ElementType type) {
  switch (type) {
    case ElementType::kF64:
      return {"F64", 1, 8};
    case ElementType::kF32:
      return {"F32", 1, 4};
    case ElementType::kF16:
      return {"F16", 1, 2};
    case ElementType::kBF16:
      return {"BF16", 1, 2};
    case ElementType::kQ4_0:
      return {"Q4_0", 32, 2 + 16};
    case ElementType::kQ4_1:
      return {"Q4_1", 32, 2 + 2 + 16};
    case ElementType::kQ5_0:
      return {"Q5_0", 32, 2 + 4 + 16};
    case ElementType::kQ5_1:
      return {"Q5_1", 32, 2 + 2 + 4 + 16};
    case ElementType::kQ8_0:
      return {"Q8_0", 32, 2 + 32};
    case ElementType::kQ2_K:
      return {"Q2_K", 256, 16 + 64 + 2 + 2};
    case ElementType::kQ3_K:
      return {"Q3_K", 256, 32 + 64 + 12 + 2};
    case ElementType::kQ4_K:
      return {"Q4_K", 256, 2 + 2 + 12 + 128};
    case ElementType::kQ5_K:
      return {"Q5_K", 256, 2 + 2 + 12 + 32 + 128};
    case ElementType::kQ6_K:
      return {"Q6_K", 256, 128 + 64 + 16 + 2};
    case ElementType::kQ8_K:
      return {"Q8_K", 256, 4 + 256 + 32};
  }
  return {"", 1, 0};
}

}  // namespace

std::string_view name_of(ElementType type) { return layout_of(type).name; }
int64_t block_elements(ElementType type) { return layout_of(type).elements; }
int64_t block_bytes(ElementType type) { return layout_of(type).bytes; }

}  // namespace ullage::model
