// The tokenizer in the metadata of a GGUF file.
#pragma once

#include <string_view>

#include "model/gguf.h"
#include "model/tokenizer_data.h"
#include "ullage/status.h"

namespace ullage::model {

// Reads the keys under tokenizer.ggml. 659 where there are none, 656 for a key that is missing, of
// another type or out of range.
Result<TokenizerData> tokenizer_data_from_gguf(const GgufFile& file, std::string_view origin);

}  // namespace ullage::model
