// What the metadata of a GGUF file or a tokenizer.json boils down to.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace ullage::model {

// The kinds of tokens, as GGUF numbers them (tokenizer.ggml.token_type).
enum TokenType : int32_t {
  kNormalToken = 1,
  kUnknownToken = 2,
  kControlToken = 3,      // "<|im_end|>": found in text only where special tokens are parsed
  kUserDefinedToken = 4,  // "<tool_call>": found in text always, before the text is cut up
  kUnusedToken = 5,
  kByteToken = 6,  // SentencePiece's "<0x0A>": not of a byte-level vocabulary
};

struct TokenizerData {
  std::string model = "gpt2";        // tokenizer.ggml.model; "gpt2" means byte-level BPE
  std::vector<std::string> tokens;   // id -> text in the byte alphabet; special tokens as they are
  std::vector<std::string> merges;   // "left right", by rank
  std::vector<int32_t> token_types;  // id -> TokenType; empty: all normal
  std::string pre;                   // tokenizer.ggml.pre, names the pre-tokenizer: pretokenizer.h
  std::optional<std::vector<std::string>> patterns;  // the pre-tokenizer itself; absent: see `pre`
  std::optional<bool>
      ignore_merges;    // a piece that is a token is that token; absent: as `pre` has it
  int64_t bos_id = -1;  // -1 and 4294967295: none
  int64_t eos_id = -1;
  std::optional<bool> add_bos;  // absent: as `pre` has it
  std::optional<bool> add_eos;  // absent: no
};

}  // namespace ullage::model
