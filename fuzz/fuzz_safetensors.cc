// Any bytes as a safetensors file: refused, or every tensor lies inside.
#include <cstddef>
#include <cstdint>
#include <span>

#include "model/safetensors.h"
#include "read_all.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const auto file = std::as_bytes(std::span(data, size));
  const auto tensors = ullage::model::read_safetensors(file, "x.safetensors");
  if (tensors) ullage::model::read_all(*tensors);
  return 0;
}
