// Cuts text into the pieces that byte-pair encoding never merges across.
#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ullage/status.h"

namespace ullage::model {

// What the name in tokenizer.ggml.pre stands for.
struct PreTokenizerKind {
  std::vector<std::string> patterns;
  bool ignore_merges = false;
  bool add_bos = false;
};

// "smollm", "qwen2", "llama-bpe", "gpt-2" and their synonyms, "default" (and no name at all)
// meaning gpt-2. Error 659.
Result<PreTokenizerKind> pre_tokenizer_named(std::string_view name);

// GPT-2's pattern, which the ByteLevel pre-tokenizer of a tokenizer.json has built in.
inline constexpr std::string_view kGpt2Pattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

// A sequence of regular expressions. The first cuts the text: every match is a piece, and so is
// every stretch between two matches. Each next one cuts the pieces of the one before, and sees of
// the text only the piece. Patterns are PCRE2's in UTF and UCP mode, but for \s, which is Unicode's
// White_Space as in the engine these patterns are written for (PCRE2's own also has U+180E).
//
// Bytes that are not well-formed UTF-8: each maximal run of them is one piece, and the text on
// either side is cut as if it were a text of its own.
class PreTokenizer {
 public:
  // Error 659: a pattern that does not compile, or more than 16 patterns.
  static Result<PreTokenizer> create(std::span<const std::string> patterns);

  // Hands the pieces of `text`, none empty, to `sink` in order, until it refuses.
  // Error 659: a pattern needs more steps or memory than the text justifies.
  using Sink = std::function<Status(std::string_view piece)>;
  Status split(std::string_view text, const Sink& sink) const;

 private:
  struct Pattern;  // compiled
  class Cut;       // one split under way
  std::vector<std::shared_ptr<const Pattern>> patterns_;
};

}  // namespace ullage::model
