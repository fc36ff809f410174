// The safetensors container: an 8-byte header length, a JSON header, and one buffer of tensors
// without holes (https://github.com/huggingface/safetensors).
#pragma once

#include <cstddef>
#include <span>
#include <string_view>
#include <vector>

#include "model/stored_tensor.h"
#include "ullage/status.h"

namespace ullage::model {

// The tensors of a whole file, in the order of the buffer; their data points into `file`. Every
// shape, type and offset is checked against the others and against the file's size.
Result<std::vector<StoredTensor>> read_safetensors(std::span<const std::byte> file,
                                                   std::string_view origin);

}  // namespace ullage::model
