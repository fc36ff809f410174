#include "model/json_document.h"

#include <fmt/format.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "model/text.h"

namespace ullage::model {
namespace {

using Json = nlohmann::json;

// Receives the parser's events and builds the tree. Each callback returns false to stop.
class TreeBuilder {
 public:
  explicit TreeBuilder(const JsonLimits& limits) : limits_(limits) {}

  bool null() { return add({}); }
  bool boolean(bool value) { return add({value}); }
  bool number_integer(int64_t value) { return add({value}); }
  bool number_unsigned(uint64_t value) {
    if (std::in_range<int64_t>(value)) return add({static_cast<int64_t>(value)});
    return add({static_cast<double>(value)});
  }
  bool number_float(double value, const std::string& /*text*/) { return add({value}); }
  bool string(std::string& value) { return add({std::move(value)}); }
  bool binary(Json::binary_t& /*value*/) { return fail("binary data"); }
  bool key(std::string& key) {
    keys_.back() = std::move(key);
    return true;
  }
  bool start_object(size_t /*count*/) { return open({JsonValue::Object()}); }
  bool start_array(size_t /*count*/) { return open({JsonValue::Array()}); }
  bool end_object() {
    auto& members = std::get<JsonValue::Object>(open_.back().value);
    std::ranges::sort(members, {}, &JsonMember::key);
    const auto twice = std::ranges::adjacent_find(members, {}, &JsonMember::key);
    if (twice != members.end()) {
      return fail("key " + in_quotes(twice->key) + " appears twice", kModelDuplicate);
    }
    return close();
  }
  bool end_array() { return close(); }
  bool parse_error(size_t position, const std::string& /*token*/,
                   const nlohmann::detail::exception& error) {
    // "[json.exception.parse_error.101] parse error at line 1, column 2: syntax error ..."
    std::string_view what = error.what();
    if (const size_t at = what.find("] "); at != what.npos) what.remove_prefix(at + 2);
    return fail(fmt::format("byte {}: {}", position, printable(what)));
  }

  // Why a callback returned false.
  StatusCode code() const { return code_; }
  const std::string& error() const { return error_; }
  JsonValue& root() { return root_; }

 private:
  bool fail(std::string message, StatusCode code = kModelBadJson) {
    error_ = std::move(message);
    code_ = code;
    return false;
  }

  bool add(JsonValue value) {
    if (++n_values_ > limits_.max_values) {
      return fail(fmt::format("more than {} values", limits_.max_values));
    }
    place(std::move(value));
    return true;
  }

  // A container is built on the stack and placed when it closes.
  bool open(JsonValue container) {
    if (open_.size() >= static_cast<size_t>(limits_.max_depth)) {
      return fail(fmt::format("key {} is nested deeper than {}", in_quotes(nearest_key()),
                              limits_.max_depth));
    }
    open_.push_back(std::move(container));
    keys_.emplace_back();
    return true;
  }

  bool close() {
    JsonValue done = std::move(open_.back());
    open_.pop_back();
    keys_.pop_back();
    return add(std::move(done));
  }

  // Of the innermost open object; "" where there is none.
  std::string_view nearest_key() const {
    for (size_t i = open_.size(); i-- > 0;) {
      if (open_[i].get<JsonValue::Object>() != nullptr) return keys_[i];
    }
    return "";
  }

  void place(JsonValue value) {
    if (open_.empty()) {
      root_ = std::move(value);
    } else if (auto* array = std::get_if<JsonValue::Array>(&open_.back().value)) {
      array->push_back(std::move(value));
    } else {
      std::get<JsonValue::Object>(open_.back().value)
          .push_back({std::move(keys_.back()), std::move(value)});
    }
  }

  const JsonLimits limits_;
  int64_t n_values_ = 0;
  JsonValue root_;
  std::vector<JsonValue> open_;
  std::vector<std::string> keys_;  // of the member that each open object is about to receive
  StatusCode code_ = kModelBadJson;
  std::string error_;
};

// What the text is instead of UTF-8 JSON, or "".
std::string_view foreign_encoding(std::string_view text) {
  if (text.starts_with("\xef\xbb\xbf")) return "begins with a byte order mark";
  if (text.starts_with("\xff\xfe") || text.starts_with("\xfe\xff")) return "is UTF-16";
  const size_t nul = text.find('\0');
  if (nul < 4) return "is UTF-16 or UTF-32";
  if (nul != text.npos) return "holds a NUL byte";  // where the parser would stop, satisfied
  return "";
}

}  // namespace

const JsonValue* JsonValue::find(std::string_view key) const {
  const auto* members = get<Object>();
  if (members == nullptr) return nullptr;
  const auto at = std::ranges::lower_bound(
      *members, key, {}, [](const JsonMember& member) { return std::string_view(member.key); });
  return at != members->end() && at->key == key ? &at->value : nullptr;
}

std::string describe(const JsonValue& value) {
  if (const auto* flag = value.get<bool>()) return *flag ? "true" : "false";
  if (const auto* integer = value.get<int64_t>()) return fmt::format("number {}", *integer);
  if (const auto* real = value.get<double>()) return fmt::format("number {:#}", *real);
  if (const auto* text = value.get<std::string>()) return "string " + in_quotes(*text);
  if (const auto* array = value.get<JsonValue::Array>()) {
    return fmt::format("an array of {}", array->size());
  }
  return value.is_null() ? "null" : "an object";
}

Result<JsonValue> parse_json(std::string_view text, std::string_view origin,
                             const JsonLimits& limits) {
  const auto refuse = [&](std::string_view message, StatusCode code = kModelBadJson) {
    return Status(code, fmt::format("{}: {}", origin, message));
  };
  if (const auto foreign = foreign_encoding(text); !foreign.empty()) {
    return refuse(fmt::format("{}; JSON is read as UTF-8", foreign));
  }
  TreeBuilder builder(limits);
  try {
    if (!Json::sax_parse(text, &builder)) return refuse(builder.error(), builder.code());
  } catch (const std::exception& error) {
    return refuse(error.what());
  }
  return std::move(builder.root());
}

}  // namespace ullage::model
