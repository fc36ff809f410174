// config.json of a Hugging Face model folder.
#pragma once

#include <string_view>

#include "model/config.h"
#include "ullage/status.h"

namespace ullage::model {

// Reads llama, qwen2 and qwen3, also as the `text_config` inside a multimodal model's config; the
// rope parameters in the spelling of transformers 5 (`rope_parameters`) and before (`rope_theta`,
// `rope_scaling`). 655 for malformed JSON, 658 for another model_type, 656 for a field that is
// missing, out of range or set to what is not implemented. `origin` names the file.
Result<Config> parse_config_json(std::string_view text, std::string_view origin);

}  // namespace ullage::model
