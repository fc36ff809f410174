#include "model/pretokenizer.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>

#include <algorithm>
#include <array>
#include <new>
#include <utility>

#include "model/text.h"
#include "model/utf8.h"

namespace ullage::model {

namespace {

// As the tokenizer.json of SmolLM, Qwen2 and Llama 3 have them.
constexpr std::string_view kDigitPattern = R"(\p{N})";
constexpr std::string_view kQwen2Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
constexpr std::string_view kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

constexpr size_t kMaxPatterns = 16;
constexpr size_t kMaxPatternBytes = 1 << 16;
constexpr uint32_t kHeapLimitKiB = 64 << 10;  // of one match

// \s and \S as properties, which mean the same inside a character class and outside.
std::string with_unicode_white_space(std::string_view pattern) {
  std::string result;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const bool escape = pattern[i] == '\\' && i + 1 < pattern.size();
    const std::string_view unit = pattern.substr(i, escape ? 2 : 1);
    if (unit == R"(\s)") {
      result += R"(\p{White_Space})";
    } else if (unit == R"(\S)") {
      result += R"(\P{White_Space})";
    } else {
      result += unit;
    }
    i += unit.size() - 1;
  }
  return result;
}

std::string pcre2_message(int code) {
  std::array<PCRE2_UCHAR, 256> buffer{};
  pcre2_get_error_message(code, buffer.data(), buffer.size());
  return reinterpret_cast<const char*>(buffer.data());
}

}  // namespace

Result<PreTokenizerKind> pre_tokenizer_named(std::string_view name) {
  const auto is_one_of = [name](std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), name) != names.end();
  };
  if (is_one_of({"smollm"})) {
    return PreTokenizerKind{{std::string(kDigitPattern), std::string(kGpt2Pattern)}, false, false};
  }
  if (is_one_of({"qwen2", "deepseek-r1-qwen"})) {
    return PreTokenizerKind{{std::string(kQwen2Pattern)}, false, false};
  }
  if (is_one_of({"llama-bpe", "llama-v3", "llama3"})) {
    return PreTokenizerKind{{std::string(kLlama3Pattern)}, true, true};
  }
  if (is_one_of({"gpt-2", "gpt2", "default", ""})) {
    return PreTokenizerKind{{std::string(kGpt2Pattern)}, false, false};
  }
  return {kModelTokenizer, "pre-tokenizer " + in_quotes(name) +
                               " is not read; read are smollm, qwen2, llama-bpe and gpt-2"};
}

struct PreTokenizer::Pattern {
  std::string source;
  std::unique_ptr<pcre2_code, decltype(&pcre2_code_free)> code{nullptr, pcre2_code_free};
};

Result<PreTokenizer> PreTokenizer::create(std::span<const std::string> patterns) {
  if (patterns.size() > kMaxPatterns) {
    return {kModelTokenizer, std::to_string(patterns.size()) + " pre-tokenizer patterns; at most " +
                                 std::to_string(kMaxPatterns) + " are read"};
  }
  PreTokenizer result;
  for (const std::string& source : patterns) {
    if (source.size() > kMaxPatternBytes) {
      return {kModelTokenizer, "a pre-tokenizer pattern of " + std::to_string(source.size()) +
                                   " bytes; at most " + std::to_string(kMaxPatternBytes)};
    }
    const std::string pattern = with_unicode_white_space(source);
    auto compiled = std::make_shared<Pattern>();
    compiled->source = source;
    int error = 0;
    size_t offset = 0;
    // \C would match one byte of a character, and leave the rest as ill-formed text.
    compiled->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                                       PCRE2_UTF | PCRE2_UCP | PCRE2_NEVER_BACKSLASH_C, &error,
                                       &offset, nullptr));
    if (!compiled->code) {
      return {kModelTokenizer,
              "pre-tokenizer pattern " + in_quotes(source) + ": " + pcre2_message(error)};
    }
    // Where there is no JIT the interpreter runs; both find the same matches.
    static_cast<void>(pcre2_jit_compile(compiled->code.get(), PCRE2_JIT_COMPLETE));
    result.patterns_.push_back(std::move(compiled));
  }
  return result;
}

class PreTokenizer::Cut {
 public:
  Cut(const PreTokenizer& pre_tokenizer, const Sink& sink)
      : patterns_(pre_tokenizer.patterns_), sink_(sink) {
    if (!data_ || !context_) throw std::bad_alloc();
    pcre2_set_heap_limit(context_.get(), kHeapLimitKiB);
  }

  // Cuts `text`, well-formed UTF-8, by the patterns from `stage` on (at most kMaxPatterns deep).
  Status apply(size_t stage, std::string_view text) {
    if (text.empty()) return kModelOk;
    if (stage == patterns_.size()) return sink_(text);
    size_t done = 0;  // everything before has been handed on
    for (size_t from = 0; from <= text.size();) {
      const int rc = find(*patterns_[stage], text, from);
      if (rc == PCRE2_ERROR_NOMATCH) break;
      const size_t* range = pcre2_get_ovector_pointer(data_.get());
      const size_t begin = range[0];
      const size_t end = range[1];
      if (rc < 0 || begin < done || end < begin) {
        return {kModelTokenizer, "pre-tokenizer pattern " + in_quotes(patterns_[stage]->source) +
                                     " on a text of " + std::to_string(text.size()) + " bytes: " +
                                     (rc < 0 ? pcre2_message(rc) : "matches run backwards")};
      }
      if (Status status = apply(stage + 1, text.substr(done, begin - done)); !status.ok())
        return status;
      if (Status status = apply(stage + 1, text.substr(begin, end - begin)); !status.ok())
        return status;
      done = end;
      // After an empty match, which cuts without a piece of its own, look from the next character
      // on.
      from = end > begin ? end : end + std::max<size_t>(1, utf8_sequence_bytes(text.substr(end)));
    }
    return apply(stage + 1, text.substr(done));
  }

 private:
  // Finds the first match that starts at `from` or later.
  int find(const Pattern& pattern, std::string_view text, size_t from) {
    // The longest honest match walks its text once forward and once back.
    const size_t steps = 4096 + 8 * (text.size() - from);
    pcre2_set_match_limit(context_.get(),
                          static_cast<uint32_t>(std::min<size_t>(steps, UINT32_MAX)));
    const int rc = match(pattern, text, from, PCRE2_NO_UTF_CHECK);
    if (rc != PCRE2_ERROR_JIT_STACKLIMIT) return rc;
    return match(pattern, text, from,
                 PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT);  // its stack is on the heap
  }
  int match(const Pattern& pattern, std::string_view text, size_t from, uint32_t options) {
    return pcre2_match(pattern.code.get(), reinterpret_cast<PCRE2_SPTR>(text.data()), text.size(),
                       from, options, data_.get(), context_.get());
  }

  const std::vector<std::shared_ptr<const Pattern>>& patterns_;
  const Sink& sink_;
  // One pair of offsets: the whole match.
  std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data_{
      pcre2_match_data_create(1, nullptr), pcre2_match_data_free};
  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context_{
      pcre2_match_context_create(nullptr), pcre2_match_context_free};
};

Status PreTokenizer::split(std::string_view text, const Sink& sink) const {
  Cut cut(*this, sink);
  while (!text.empty()) {
    const size_t valid = utf8_valid_prefix_bytes(text);
    if (Status status = cut.apply(0, text.substr(0, valid)); !status.ok()) return status;
    text.remove_prefix(valid);
    size_t invalid = 0;
    while (invalid < text.size() && utf8_sequence_bytes(text.substr(invalid)) == 0) ++invalid;
    if (invalid == 0) continue;
    if (Status status = sink(text.substr(0, invalid)); !status.ok()) return status;
    text.remove_prefix(invalid);
  }
  return kModelOk;
}

}  // namespace ullage::model
