#include "model/stored_tensor.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "model/text.h"

namespace ullage::model {

Status measure(StoredTensor& tensor, std::string_view origin) {
  const auto refuse = [&](StatusCode code, std::string_view why) {
    return Status(code, fmt::format("{}: tensor {} {} {}", origin, in_quotes(tensor.name),
                                    describe_shape(tensor.shape), why));
  };
  tensor.elements = 1;
  for (const int64_t dimension : tensor.shape) {
    if (__builtin_mul_overflow(tensor.elements, dimension, &tensor.elements)) {
      return refuse(kModelProductOverflow, "has more than 2^63 - 1 elements");
    }
  }
  if (tensor.elements % tensor.type.block_elements != 0) {
    return refuse(kModelBlockMisaligned,
                  fmt::format("is no whole number of the {}-element blocks of {}",
                              tensor.type.block_elements, tensor.type.name));
  }
  if (__builtin_mul_overflow(tensor.elements / tensor.type.block_elements, tensor.type.block_bytes,
                             &tensor.bytes)) {
    return refuse(kModelProductOverflow, "has more than 2^63 - 1 bytes");
  }
  return kModelOk;
}

std::string describe_shape(const std::vector<int64_t>& shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

}  // namespace ullage::model
