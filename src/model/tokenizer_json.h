// Hugging Face's tokenizer.json, as far as it describes byte-level BPE.
#pragma once

#include <filesystem>
#include <string_view>

#include "model/tokenizer_data.h"
#include "ullage/status.h"

namespace ullage::model {

// Read are: model BPE without dropout, prefix or suffix; merges as "a b" or ["a", "b"]; added
// tokens that take no white space with them; a pre-tokenizer that is ByteLevel or a Sequence of
// Split (by Regex, Isolated), Digits and at the end ByteLevel; no normaliser, or NFC, which is not
// applied (tokenizer.h); a post-processor that adds at most a bos before and an eos after. The eos
// that ends a generation is not in this file: config.json has it.
//
// Errors: 655 malformed JSON; 649 a key or an id twice; 650 an id out of range; 656 a field missing
// or of another type; 659 what is not read, named. `origin` names the document in messages.
Result<TokenizerData> parse_tokenizer_json(std::string_view json, std::string_view origin);

// Also 641: the file is missing, not regular or unreadable.
Result<TokenizerData> read_tokenizer_json(const std::filesystem::path& path);

}  // namespace ullage::model
