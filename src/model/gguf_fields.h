// The metadata of a GGUF file as named scalars.
#pragma once

#include <string_view>

#include "model/field_reader.h"
#include "model/gguf.h"

namespace ullage::model {

// Reads `file`, which outlives it. An array of integers that are all the same, as some files have
// one for each layer, reads as that integer.
FieldReader gguf_fields(const GgufFile& file, std::string_view origin);

}  // namespace ullage::model
