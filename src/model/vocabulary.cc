#include "model/vocabulary.h"

#include <fmt/format.h>

#include "model/byte_alphabet.h"
#include "model/text.h"

namespace ullage::model {

Result<Vocabulary> Vocabulary::create(const std::vector<std::string>& texts,
                                      const std::vector<int32_t>& types) {
  if (texts.empty()) return {kModelTokenizer, "a vocabulary without tokens"};
  if (texts.size() > INT32_MAX) {
    return {kModelBadValue, fmt::format("{} tokens; at most 2^31 - 1", texts.size())};
  }
  if (!types.empty() && types.size() != texts.size()) {
    return {kModelBadValue,
            fmt::format("{} token types for {} tokens", types.size(), texts.size())};
  }
  Vocabulary vocabulary;
  for (size_t id = 0; id < texts.size(); ++id) {
    const int32_t type = types.empty() ? kNormalToken : types[id];
    if (type < kNormalToken || type > kByteToken) {
      return {kModelBadValue, fmt::format("token {} has type {}; types are 1 to 6", id, type)};
    }
    if (type == kByteToken) {
      return {kModelTokenizer, fmt::format("token {} {} is a byte token, as SentencePiece has them",
                                           id, in_quotes(texts[id]))};
    }
    vocabulary.types_.push_back(static_cast<TokenType>(type));
    const auto decoded = vocabulary.is_special(id) ? std::nullopt : bytes_of_alphabet(texts[id]);
    vocabulary.plain_.push_back(decoded.has_value());
    vocabulary.bytes_ += decoded ? *decoded : texts[id];
    vocabulary.offsets_.push_back(vocabulary.bytes_.size());
  }
  return vocabulary;
}

}  // namespace ullage::model
