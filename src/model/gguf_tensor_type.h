// The element types that GGUF tensors may have.
#pragma once

#include <cstdint>
#include <optional>

#include "model/stored_tensor.h"

namespace ullage::model {

// By ggml's number (ggml_type in ggml.h), or nothing where that means nothing today.
std::optional<StoredType> gguf_tensor_type(uint32_t number);

}  // namespace ullage::model
