// The configuration of a model in a GGUF file.
#pragma once

#include <string_view>

#include "model/config.h"
#include "model/gguf.h"
#include "ullage/status.h"

namespace ullage::model {

// Reads general.architecture llama, qwen2 and qwen3. The vocabulary is the rows of the embedding,
// the head is tied where there is no output.weight, and rope_freqs.weight gives rope_factors. 658
// for another architecture or a mixture of experts, 656 for a key that is missing, out of range or
// set to what is not implemented, 657 for a tensor of another shape.
Result<Config> config_from_gguf(const GgufFile& file, std::string_view origin);

}  // namespace ullage::model
