#include "model/tokenizer_gguf.h"

#include <fmt/format.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "model/gguf_fields.h"

namespace ullage::model {
namespace {

// A list of strings with whatever bytes they have; empty where the key is absent.
std::vector<std::string> strings_at(const GgufFile& file, FieldReader& fields,
                                    std::string_view key) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return {};
  const auto list = value->strings();
  fields.require(list.has_value(), key, "a list of strings is read");
  if (!list) return {};
  return {list->begin(), list->end()};
}

std::vector<int32_t> types_at(const GgufFile& file, FieldReader& fields, std::string_view key) {
  const GgufValue* value = file.find(key);
  if (value == nullptr) return {};
  const auto list = value->integers();
  fields.require(list.has_value(), key, "a list of integers is read");
  std::vector<int32_t> types;
  for (const int64_t type : list.value_or(std::vector<int64_t>())) {
    fields.require(std::in_range<int32_t>(type), key, "a list of token types is read");
    types.push_back(static_cast<int32_t>(type));
  }
  return types;
}

std::optional<bool> flag_at(FieldReader& fields, std::string_view key) {
  if (!fields.has(key)) return {};
  return fields.flag(key, false);
}

}  // namespace

Result<TokenizerData> tokenizer_data_from_gguf(const GgufFile& file, std::string_view origin) {
  FieldReader fields = gguf_fields(file, origin);
  if (!fields.has("tokenizer.ggml.model")) {
    return {kModelTokenizer, fmt::format("{}: there is no tokenizer.ggml.model", origin)};
  }
  TokenizerData data;
  data.model = fields.text("tokenizer.ggml.model");
  data.pre = fields.text("tokenizer.ggml.pre", "default");
  data.tokens = strings_at(file, fields, "tokenizer.ggml.tokens");
  data.merges = strings_at(file, fields, "tokenizer.ggml.merges");
  data.token_types = types_at(file, fields, "tokenizer.ggml.token_type");
  data.bos_id = fields.integer("tokenizer.ggml.bos_token_id", 0, UINT32_MAX, -1);
  data.eos_id = fields.integer("tokenizer.ggml.eos_token_id", 0, UINT32_MAX, -1);
  data.add_bos = flag_at(fields, "tokenizer.ggml.add_bos_token");
  data.add_eos = flag_at(fields, "tokenizer.ggml.add_eos_token");
  if (!fields.ok()) return fields.status();
  return data;
}

}  // namespace ullage::model
