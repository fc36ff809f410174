// The tokens of a byte-level vocabulary: what each is, and the bytes it stands for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "model/tokenizer_data.h"
#include "ullage/status.h"

namespace ullage::model {

class Vocabulary {
 public:
  // `texts` and `types` as in TokenizerData. Errors: 650 a type that GGUF does not have, or not one
  // type a token; 659 no tokens, or a byte token.
  static Result<Vocabulary> create(const std::vector<std::string>& texts,
                                   const std::vector<int32_t>& types);

  size_t size() const { return types_.size(); }
  TokenType type_of(size_t id) const { return types_[id]; }
  bool is_control(size_t id) const {
    return types_[id] == kControlToken || types_[id] == kUnknownToken;
  }
  bool is_special(size_t id) const { return is_control(id) || types_[id] == kUserDefinedToken; }
  // Neither special nor outside the byte alphabet: what encoding a text without special tokens
  // gives.
  bool is_plain(size_t id) const { return plain_[id]; }

  // A special token's text, and any text outside the byte alphabet, stands for itself. The view
  // stays valid as long as the vocabulary does not move.
  std::string_view bytes_of(size_t id) const {
    return std::string_view(bytes_).substr(offsets_[id], offsets_[id + 1] - offsets_[id]);
  }

 private:
  std::vector<TokenType> types_;
  std::vector<bool> plain_;
  std::string bytes_;  // of all tokens, end to end
  std::vector<size_t> offsets_ = {
      0};  // id -> where its bytes start; one more than there are tokens
};

}  // namespace ullage::model
