// Text to token ids and back, by byte-level byte-pair encoding.
//
// decode(encode(text)) is `text`, whatever bytes it holds: UTF-8 is never required. No Unicode
// normalisation is applied, also where a tokenizer.json asks for NFC (Qwen's does): text already in
// NFC gets the same ids, other text keeps its bytes.
#pragma once

#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer_data.h"
#include "ullage/status.h"

namespace ullage::model {

// Immutable; copies share one vocabulary, and any number of threads may use one.
class Tokenizer {
 public:
  // Errors: 649 a token or a merge twice; 650 a merge of tokens that do not exist or do not join to
  // its result, an id or a token type out of range; 659 a kind of tokenizer that is not read.
  static Result<Tokenizer> create(TokenizerData data);

  // Reads Hugging Face's tokenizer.json; errors as create and read_tokenizer_json.
  static Result<Tokenizer> from_json_file(const std::filesystem::path& path);

  // The ids of `text` alone: neither bos nor eos is added. User-defined tokens are found in the
  // text first, leftmost then longest, and with `parse_special` control tokens too; without it
  // "<|im_end|>" is seven characters and more of plain text. Errors: 650 a byte the vocabulary has
  // no token for (SmolLM2 lacks 21, the control character 0x04 among them), with its offset, or a
  // text over 2 GiB; 659 a pattern of the file that gives up.
  Result<std::vector<int32_t>> encode(std::string_view text, bool parse_special) const;

  // The texts of `ids`, special tokens included. An id outside 0..size()-1 has no text: models
  // often have more rows than their tokenizer has tokens.
  std::string decode(std::span<const int32_t> ids) const;
  std::string_view bytes_of(int32_t id) const;

  int64_t size() const;
  std::optional<int32_t> bos_id() const;
  std::optional<int32_t> eos_id() const;
  bool add_bos() const;  // the model expects bos before a text; false where there is no bos
  bool add_eos() const;
  bool is_control(int32_t id) const;
  // The id of a control or user-defined token by its text.
  std::optional<int32_t> special_id(std::string_view text) const;

 private:
  struct State;
  explicit Tokenizer(std::shared_ptr<const State> state);
  std::shared_ptr<const State> state_;
};

// Decodes ids one at a time and never hands out part of a UTF-8 sequence: its bytes are held back
// until the token that ends it. Bytes that begin no sequence pass at once.
class StreamDecoder {
 public:
  explicit StreamDecoder(Tokenizer tokenizer);

  std::string push(int32_t id);
  std::string flush();  // at the end: what was held back

 private:
  Tokenizer tokenizer_;
  std::string held_;  // at most 3 bytes between calls
};

}  // namespace ullage::model
