// The GGUF container, versions 2 and 3, little-endian: typed metadata, tensor descriptions, and one
// aligned data section (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/gguf_value.h"
#include "model/stored_tensor.h"
#include "ullage/status.h"

namespace ullage::model {

struct GgufFile {
  struct Entry {
    std::string key;
    GgufValue value;
  };
  uint32_t version = 0;
  std::vector<Entry> metadata;        // ordered by key
  std::vector<StoredTensor> tensors;  // in the order of the data section; shapes outermost first

  const GgufValue* find(std::string_view key) const;
};

// Reads a whole file; what it returns points into `file`. Every count is held against the bytes
// left before anything is allocated for it, every offset against the running padded size. Errors:
// 642-654, with the offset of the field at fault.
Result<GgufFile> read_gguf(std::span<const std::byte> file, std::string_view origin);

}  // namespace ullage::model
