#include "model/tokenizer_json.h"

#include <fmt/format.h>

#include <span>
#include <string>
#include <utility>

#include "model/json_document.h"
#include "model/mapped_file.h"
#include "model/pretokenizer.h"
#include "model/text.h"

namespace ullage::model {
namespace {

using Array = JsonValue::Array;
using Object = JsonValue::Object;

const JsonValue kNull;

// The member, or null where it is absent or `value` is no object.
const JsonValue& member(const JsonValue& value, std::string_view key) {
  const JsonValue* found = value.find(key);
  return found != nullptr ? *found : kNull;
}

bool is_true(const JsonValue& value) {
  const bool* flag = value.get<bool>();
  return flag != nullptr && *flag;
}

bool is_text(const JsonValue& value, std::string_view expected) {
  const auto* text = value.get<std::string>();
  return text != nullptr && *text == expected;
}

std::string_view type_of(const JsonValue& component) {
  const auto* type = member(component, "type").get<std::string>();
  return type != nullptr ? std::string_view(*type) : std::string_view();
}

// The elements of an array; none where `value` is no array.
std::span<const JsonValue> elements_of(const JsonValue& value) {
  const auto* array = value.get<Array>();
  if (array == nullptr) return {};
  return *array;
}

// A Sequence's parts, under `key`; any other component is its own only part; null has none.
std::span<const JsonValue> parts_of(const JsonValue& component, std::string_view key) {
  if (component.is_null()) return {};
  if (type_of(component) != "Sequence") return {&component, 1};
  return elements_of(member(component, key));
}

class Reader {
 public:
  Reader(const JsonValue& document, std::string_view origin)
      : document_(document), model_(member(document, "model")), origin_(origin) {}

  Result<TokenizerData> read() {
    using Step = Status (Reader::*)();
    for (const Step step :
         {&Reader::read_model, &Reader::read_tokens, &Reader::read_merges, &Reader::read_normalizer,
          &Reader::read_pre_tokenizer, &Reader::read_post_processor, &Reader::read_decoder}) {
      if (Status status = (this->*step)(); !status.ok()) return status;
    }
    return std::move(data_);
  }

 private:
  Status refuse(StatusCode code, std::string_view what) const {
    return {code, fmt::format("{}: {}", origin_, what)};
  }
  Status not_read(std::string_view what) const { return refuse(kModelTokenizer, what); }
  Status bad_field(std::string_view what) const { return refuse(kModelBadField, what); }

  Status read_model() {
    if (model_.get<Object>() == nullptr) return not_read("there is no model");
    // Old files have no type; a vocabulary with merges is BPE.
    if (const JsonValue& type = member(model_, "type");
        !is_text(type, "BPE") && !(type.is_null() && model_.find("merges") != nullptr)) {
      return not_read(fmt::format("model.type is {}; BPE is read", describe(type)));
    }
    for (const char* key : {"dropout", "continuing_subword_prefix", "end_of_word_suffix"}) {
      const JsonValue& value = member(model_, key);
      const double* number = value.get<double>();
      if (!value.is_null() && !is_text(value, "") && !(number != nullptr && *number == 0)) {
        return not_read(fmt::format("model.{} is {}; null is read", key, describe(value)));
      }
    }
    if (is_true(member(model_, "byte_fallback"))) {
      return not_read("model.byte_fallback is true; false is read");
    }
    data_.ignore_merges = is_true(member(model_, "ignore_merges"));
    return kModelOk;
  }

  Status read_tokens() {
    const auto* vocab = member(model_, "vocab").get<Object>();
    if (vocab == nullptr) return bad_field("model.vocab is not an object");
    const JsonValue& added = member(document_, "added_tokens");
    if (!added.is_null() && added.get<Array>() == nullptr) {
      return bad_field("added_tokens is not an array");
    }
    const std::span<const JsonValue> added_tokens = elements_of(added);

    // An added token may repeat an entry of the vocabulary.
    size_t n_tokens = vocab->size();
    for (const JsonValue& token : added_tokens) {
      const auto* content = member(token, "content").get<std::string>();
      if (content == nullptr) return bad_field("an added token has no content");
      if (member(model_, "vocab").find(*content) == nullptr) ++n_tokens;
    }
    data_.tokens.resize(n_tokens);
    data_.token_types.assign(n_tokens, kUnusedToken);
    for (const auto& [text, id] : *vocab) {
      if (Status status = place(text, id, kNormalToken); !status.ok()) return status;
    }
    for (const JsonValue& token : added_tokens) {
      const auto& content = *member(token, "content").get<std::string>();
      for (const char* flag : {"lstrip", "rstrip", "single_word"}) {
        if (is_true(member(token, flag))) {
          return not_read(fmt::format("added token {} with {}", in_quotes(content), flag));
        }
      }
      const auto type = is_true(member(token, "special")) ? kControlToken : kUserDefinedToken;
      if (Status status = place(content, member(token, "id"), type); !status.ok()) return status;
    }
    // n_tokens texts in n_tokens places, none taken twice: every id has its text.
    return kModelOk;
  }

  Result<size_t> checked_id(std::string_view text, const JsonValue& value) const {
    const int64_t* id = value.get<int64_t>();
    if (id == nullptr || *id < 0 || std::cmp_greater_equal(*id, data_.tokens.size())) {
      return refuse(
          kModelBadValue,
          fmt::format("the id of token {} is {}; with {} tokens it is an integer below that",
                      in_quotes(text), describe(value), data_.tokens.size()));
    }
    return static_cast<size_t>(*id);
  }

  Status place(const std::string& text, const JsonValue& id_value, TokenType type) {
    const auto id = checked_id(text, id_value);
    if (!id) return id.status();
    const bool taken = data_.token_types[*id] != kUnusedToken;
    const bool repeats_vocabulary =
        data_.token_types[*id] == kNormalToken && data_.tokens[*id] == text;
    if (taken && !repeats_vocabulary) {
      return refuse(kModelDuplicate,
                    fmt::format("tokens {} and {} both have id {}", in_quotes(data_.tokens[*id]),
                                in_quotes(text), *id));
    }
    data_.tokens[*id] = text;
    data_.token_types[*id] = type;
    return kModelOk;
  }

  Status read_merges() {
    const auto* merges = member(model_, "merges").get<Array>();
    if (merges == nullptr) return bad_field("model.merges is not an array");
    data_.merges.reserve(merges->size());
    for (const JsonValue& merge : *merges) {
      const auto pair = elements_of(merge);
      if (const auto* line = merge.get<std::string>()) {
        data_.merges.push_back(*line);
      } else if (pair.size() == 2 && pair[0].get<std::string>() && pair[1].get<std::string>()) {
        data_.merges.push_back(*pair[0].get<std::string>() + " " + *pair[1].get<std::string>());
      } else {
        return bad_field(fmt::format("merge {} is {}, neither \"a b\" nor [\"a\", \"b\"]",
                                     data_.merges.size(), describe(merge)));
      }
    }
    return kModelOk;
  }

  Status read_normalizer() {
    for (const JsonValue& part : parts_of(member(document_, "normalizer"), "normalizers")) {
      if (type_of(part) != "NFC") {
        return not_read(
            fmt::format("normalizer {}; NFC and none are read", in_quotes(type_of(part))));
      }
    }
    return kModelOk;
  }

  Status read_pre_tokenizer() {
    auto& patterns = data_.patterns.emplace();
    bool byte_level = false;
    for (const JsonValue& part : parts_of(member(document_, "pre_tokenizer"), "pretokenizers")) {
      const std::string_view type = type_of(part);
      if (byte_level) return not_read("a pre-tokenizer after ByteLevel");
      if (type == "ByteLevel") {
        byte_level = true;
        if (is_true(member(part, "add_prefix_space"))) {
          return not_read("pre-tokenizer ByteLevel with add_prefix_space");
        }
        const JsonValue& use_regex = member(part, "use_regex");  // absent in old files: true
        if (use_regex.is_null() || is_true(use_regex)) patterns.emplace_back(kGpt2Pattern);
      } else if (type == "Digits") {
        const bool individual = is_true(member(part, "individual_digits"));
        patterns.emplace_back(individual ? R"(\p{N})" : R"(\p{N}+)");
      } else if (type == "Split") {
        const auto* regex = member(member(part, "pattern"), "Regex").get<std::string>();
        if (regex == nullptr) return not_read("pre-tokenizer Split by something else than a Regex");
        if (!is_text(member(part, "behavior"), "Isolated") || is_true(member(part, "invert"))) {
          return not_read(fmt::format("pre-tokenizer Split with behavior {}{}; 'Isolated' is read",
                                      describe(member(part, "behavior")),
                                      is_true(member(part, "invert")) ? ", inverted" : ""));
        }
        patterns.push_back(*regex);
      } else {
        return not_read(
            fmt::format("pre-tokenizer {}; Split, Digits and ByteLevel are read", in_quotes(type)));
      }
    }
    if (!byte_level) return not_read("a pre-tokenizer without ByteLevel");
    return kModelOk;
  }

  Status read_post_processor() {
    for (const JsonValue& part : parts_of(member(document_, "post_processor"), "processors")) {
      const std::string_view type = type_of(part);
      if (type == "ByteLevel") continue;  // it moves no token, only offsets
      if (type != "TemplateProcessing") {
        return not_read(fmt::format("post-processor {}; ByteLevel and TemplateProcessing are read",
                                    in_quotes(type)));
      }
      if (Status status = read_template(part); !status.ok()) return status;
    }
    return kModelOk;
  }

  // The template for one text: [bos] text [eos].
  Status read_template(const JsonValue& part) {
    bool text_seen = false;
    for (const JsonValue& item : elements_of(member(part, "single"))) {
      if (item.find("Sequence") != nullptr && !text_seen) {
        text_seen = true;
        continue;
      }
      const auto* name = member(member(item, "SpecialToken"), "id").get<std::string>();
      auto& add = text_seen ? data_.add_eos : data_.add_bos;
      if (name == nullptr || add.has_value()) {
        return not_read("a template of other than one text, a token before and a token after");
      }
      const JsonValue& ids = member(member(member(part, "special_tokens"), *name), "ids");
      if (elements_of(ids).size() != 1) {
        return not_read(fmt::format("the template's token {} without one id", in_quotes(*name)));
      }
      const auto id = checked_id(*name, elements_of(ids)[0]);
      if (!id) return id.status();
      add = true;
      (text_seen ? data_.eos_id : data_.bos_id) = static_cast<int64_t>(*id);
    }
    if (!text_seen) return not_read("a template without the text");
    return kModelOk;
  }

  Status read_decoder() {
    const JsonValue& decoder = member(document_, "decoder");
    if (decoder.is_null() || type_of(decoder) == "ByteLevel") return kModelOk;
    return not_read(fmt::format("decoder {}; ByteLevel is read", in_quotes(type_of(decoder))));
  }

  const JsonValue& document_;
  const JsonValue& model_;
  std::string_view origin_;
  TokenizerData data_;
};

}  // namespace

Result<TokenizerData> parse_tokenizer_json(std::string_view text, std::string_view origin) {
  const auto document = parse_json(text, origin);
  if (!document) return document.status();
  return Reader(*document, origin).read();
}

Result<TokenizerData> read_tokenizer_json(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  if (!file) return file.status();
  return parse_tokenizer_json(file->text(), path.string());
}

}  // namespace ullage::model
