#include "model/gguf_tensor_type.h"

#include <algorithm>
#include <array>

namespace ullage::model {
namespace {

struct Numbered {
  uint32_t number;
  StoredType type;
};

Numbered read_as(uint32_t number, ElementType element) {
  return {number, {name_of(element), block_elements(element), block_bytes(element), element}};
}

// Not read, but with a known size: {elements, bytes} of a block.
Numbered not_read(uint32_t number, std::string_view name, int64_t elements, int64_t bytes) {
  return {number, {name, elements, bytes, {}}};
}

}  // namespace

std::optional<StoredType> gguf_tensor_type(uint32_t number) {
  static const auto types = std::to_array<Numbered>({
      read_as(0, ElementType::kF32),    read_as(1, ElementType::kF16),
      read_as(2, ElementType::kQ4_0),   read_as(3, ElementType::kQ4_1),
      read_as(6, ElementType::kQ5_0),   read_as(7, ElementType::kQ5_1),
      read_as(8, ElementType::kQ8_0),   not_read(9, "Q8_1", 32, 36),
      read_as(10, ElementType::kQ2_K),  read_as(11, ElementType::kQ3_K),
      read_as(12, ElementType::kQ4_K),  read_as(13, ElementType::kQ5_K),
      read_as(14, ElementType::kQ6_K),  read_as(15, ElementType::kQ8_K),
      not_read(16, "IQ2_XXS", 256, 66), not_read(17, "IQ2_XS", 256, 74),
      not_read(18, "IQ3_XXS", 256, 98), not_read(19, "IQ1_S", 256, 50),
      not_read(20, "IQ4_NL", 32, 18),   not_read(21, "IQ3_S", 256, 110),
      not_read(22, "IQ2_S", 256, 82),   not_read(23, "IQ4_XS", 256, 136),
      not_read(24, "I8", 1, 1),         not_read(25, "I16", 1, 2),
      not_read(26, "I32", 1, 4),        not_read(27, "I64", 1, 8),
      read_as(28, ElementType::kF64),   not_read(29, "IQ1_M", 256, 56),
      read_as(30, ElementType::kBF16),  not_read(34, "TQ1_0", 256, 54),
      not_read(35, "TQ2_0", 256, 66),   not_read(39, "MXFP4", 32, 17),
      not_read(40, "NVFP4", 64, 36),
  });
  const auto* found = std::ranges::find(types, number, &Numbered::number);
  if (found == types.end()) return {};
  return found->type;
}

}  // namespace ullage::model
