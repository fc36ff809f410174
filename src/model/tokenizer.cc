#include "model/tokenizer.h"

#include <fmt/format.h>

#include <array>
#include <unordered_map>
#include <utility>

#include "model/bpe.h"
#include "model/pretokenizer.h"
#include "model/special_tokens.h"
#include "model/text.h"
#include "model/tokenizer_json.h"
#include "model/utf8.h"
#include "model/vocabulary.h"

namespace ullage::model {
namespace {

constexpr size_t kMaxTextBytes = size_t{1} << 31;  // so that a piece's positions fit 32 bits

using IdOfText = std::unordered_map<std::string_view, int32_t>;

Result<IdOfText> index_of(const std::vector<std::string>& tokens) {
  IdOfText ids;
  ids.reserve(tokens.size());
  for (size_t id = 0; id < tokens.size(); ++id) {
    const auto [other, is_new] = ids.emplace(tokens[id], static_cast<int32_t>(id));
    if (!is_new) {
      return {kModelDuplicate, fmt::format("tokens {} and {} are both {}", other->second, id,
                                           in_quotes(tokens[id]))};
    }
  }
  return ids;
}

// Byte -> the token that is that byte alone.
std::array<int32_t, 256> byte_ids_of(const Vocabulary& vocabulary) {
  std::array<int32_t, 256> ids;
  ids.fill(Bpe::kNoToken);
  for (size_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view bytes = vocabulary.bytes_of(id);
    if (bytes.size() != 1 || !vocabulary.is_plain(id)) continue;
    ids[static_cast<uint8_t>(bytes[0])] = static_cast<int32_t>(id);
  }
  return ids;
}

Result<Bpe::Merge> merge_of(std::string_view line, const IdOfText& ids,
                            const Vocabulary& vocabulary) {
  const auto refuse = [line](std::string_view why) {
    return Status(kModelBadValue, fmt::format("merge {} {}", in_quotes(line), why));
  };
  const size_t space = line.find(' ');
  if (space == line.npos || line.find(' ', space + 1) != line.npos) {
    return refuse("is not two tokens with one space between");
  }
  const std::string left(line.substr(0, space));
  const std::string right(line.substr(space + 1));
  const auto id_of = [&](std::string_view text) {
    const auto at = ids.find(text);
    return at != ids.end() ? at->second : Bpe::kNoToken;
  };
  const Bpe::Merge merge{id_of(left), id_of(right), id_of(left + right)};
  if (merge.left < 0 || merge.right < 0 || merge.result < 0) {
    return refuse("names or makes a token that is not in the vocabulary");
  }
  // With this, and with a byte's token holding that byte, whatever is encoded decodes to itself.
  std::string joined(vocabulary.bytes_of(static_cast<size_t>(merge.left)));
  joined += vocabulary.bytes_of(static_cast<size_t>(merge.right));
  if (joined != vocabulary.bytes_of(static_cast<size_t>(merge.result))) {
    return refuse("does not join bytes: its tokens are outside the byte alphabet");
  }
  return merge;
}

Result<Bpe> bpe_of(const TokenizerData& data, const Vocabulary& vocabulary) {
  const auto ids = index_of(data.tokens);
  if (!ids) return ids.status();
  std::vector<Bpe::Merge> merges;
  merges.reserve(data.merges.size());
  for (const std::string& line : data.merges) {
    const auto merge = merge_of(line, *ids, vocabulary);
    if (!merge) return merge.status();
    merges.push_back(*merge);
  }
  return Bpe::create(byte_ids_of(vocabulary), merges);
}

SpecialTokens special_tokens_of(const Vocabulary& vocabulary) {
  std::vector<SpecialTokens::Entry> entries;
  for (size_t id = 0; id < vocabulary.size(); ++id) {
    const std::string_view text = vocabulary.bytes_of(id);
    if (!vocabulary.is_special(id) || text.empty()) continue;
    entries.push_back({text, static_cast<int32_t>(id), vocabulary.is_control(id)});
  }
  return SpecialTokens(std::move(entries));
}

// An id, or nothing for -1 and for 2^32 - 1, by which writers of GGUF mean none.
Result<std::optional<int32_t>> checked_id(int64_t id, std::string_view what, size_t n_tokens) {
  if (id == -1 || id == int64_t{UINT32_MAX}) return std::optional<int32_t>();
  if (id < 0 || std::cmp_greater_equal(id, n_tokens)) {
    return {kModelBadValue, fmt::format("{} id {}; ids are 0 to {}, and -1 or 4294967295 for none",
                                        what, id, n_tokens - 1)};
  }
  return std::optional(static_cast<int32_t>(id));
}

}  // namespace

struct Tokenizer::State {
  Vocabulary vocabulary;
  SpecialTokens special_tokens;  // views of the vocabulary
  IdOfText whole_pieces;         // views of the vocabulary; empty where merges are not ignored
  Bpe bpe;
  PreTokenizer pre_tokenizer;
  std::optional<int32_t> bos_id;
  std::optional<int32_t> eos_id;
  bool add_bos = false;
  bool add_eos = false;

  // Appends the ids of `part`, a stretch of `text` without special tokens.
  Status encode(std::string_view part, std::string_view text, std::vector<int32_t>& ids) const;
};

Result<Tokenizer> Tokenizer::create(TokenizerData data) {
  if (data.model != "gpt2") {
    return {kModelTokenizer, fmt::format("tokenizer model {} is not read; gpt2 (byte-level BPE) is",
                                         in_quotes(data.model))};
  }
  PreTokenizerKind kind;
  if (data.patterns) {
    kind.patterns = *std::move(data.patterns);
  } else {
    auto named = pre_tokenizer_named(data.pre);
    if (!named) return named.status();
    kind = *std::move(named);
  }
  auto pre_tokenizer = PreTokenizer::create(kind.patterns);
  if (!pre_tokenizer) return pre_tokenizer.status();
  auto vocabulary = Vocabulary::create(data.tokens, data.token_types);
  if (!vocabulary) return vocabulary.status();
  auto bpe = bpe_of(data, *vocabulary);
  if (!bpe) return bpe.status();
  const auto bos_id = checked_id(data.bos_id, "bos", data.tokens.size());
  if (!bos_id) return bos_id.status();
  const auto eos_id = checked_id(data.eos_id, "eos", data.tokens.size());
  if (!eos_id) return eos_id.status();

  auto state = std::make_shared<State>();
  state->vocabulary = *std::move(vocabulary);
  state->special_tokens = special_tokens_of(state->vocabulary);
  if (data.ignore_merges.value_or(kind.ignore_merges)) {
    for (size_t id = 0; id < state->vocabulary.size(); ++id) {
      if (!state->vocabulary.is_plain(id)) continue;
      state->whole_pieces.emplace(state->vocabulary.bytes_of(id), static_cast<int32_t>(id));
    }
  }
  state->bpe = *std::move(bpe);
  state->pre_tokenizer = *std::move(pre_tokenizer);
  state->bos_id = *bos_id;
  state->eos_id = *eos_id;
  state->add_bos = bos_id->has_value() && data.add_bos.value_or(kind.add_bos);
  state->add_eos = eos_id->has_value() && data.add_eos.value_or(false);
  return Tokenizer(std::move(state));
}

Result<Tokenizer> Tokenizer::from_json_file(const std::filesystem::path& path) {
  auto data = read_tokenizer_json(path);
  if (!data) return data.status();
  auto tokenizer = create(*std::move(data));
  if (tokenizer) return tokenizer;
  return {tokenizer.status().code(),
          fmt::format("{}: {}", path.string(), tokenizer.status().message())};
}

Tokenizer::Tokenizer(std::shared_ptr<const State> state) : state_(std::move(state)) {}

Status Tokenizer::State::encode(std::string_view part, std::string_view text,
                                std::vector<int32_t>& ids) const {
  Bpe::Scratch scratch;
  return pre_tokenizer.split(part, [&](std::string_view piece) -> Status {
    if (const auto whole = whole_pieces.find(piece); whole != whole_pieces.end()) {
      ids.push_back(whole->second);
      return kModelOk;
    }
    const size_t encoded = bpe.encode(piece, scratch, ids);
    if (encoded == piece.size()) return kModelOk;
    return {
        kModelBadValue,
        fmt::format("byte {:#04x} at offset {} of the text has no token in this "
                    "vocabulary",
                    static_cast<uint8_t>(piece[encoded]), piece.data() + encoded - text.data())};
  });
}

Result<std::vector<int32_t>> Tokenizer::encode(std::string_view text, bool parse_special) const {
  if (text.size() > kMaxTextBytes) {
    return {kModelBadValue, fmt::format("a text of {} bytes; at most {} are encoded at once",
                                        text.size(), kMaxTextBytes)};
  }
  std::vector<int32_t> ids;
  for (size_t at = 0; at < text.size();) {
    const auto special = state_->special_tokens.find(text, at, parse_special);
    if (Status status = state_->encode(text.substr(at, special.begin - at), text, ids);
        !status.ok()) {
      return status;
    }
    if (special.entry != nullptr) ids.push_back(special.entry->id);
    at = special.end;
  }
  return ids;
}

std::string Tokenizer::decode(std::span<const int32_t> ids) const {
  std::string text;
  for (const int32_t id : ids) text += bytes_of(id);
  return text;
}

std::string_view Tokenizer::bytes_of(int32_t id) const {
  if (id < 0 || id >= size()) return {};
  return state_->vocabulary.bytes_of(static_cast<size_t>(id));
}

int64_t Tokenizer::size() const { return static_cast<int64_t>(state_->vocabulary.size()); }
std::optional<int32_t> Tokenizer::bos_id() const { return state_->bos_id; }
std::optional<int32_t> Tokenizer::eos_id() const { return state_->eos_id; }
bool Tokenizer::add_bos() const { return state_->add_bos; }
bool Tokenizer::add_eos() const { return state_->add_eos; }

bool Tokenizer::is_control(int32_t id) const {
  return id >= 0 && id < size() && state_->vocabulary.is_control(static_cast<size_t>(id));
}

std::optional<int32_t> Tokenizer::special_id(std::string_view text) const {
  const auto* entry = state_->special_tokens.named(text);
  return entry != nullptr ? std::optional(entry->id) : std::nullopt;
}

StreamDecoder::StreamDecoder(Tokenizer tokenizer) : tokenizer_(std::move(tokenizer)) {}

std::string StreamDecoder::push(int32_t id) {
  std::string text = std::exchange(held_, {});
  text += tokenizer_.bytes_of(id);
  const size_t complete = text.size() - utf8_unfinished_tail_bytes(text);
  held_ = text.substr(complete);
  text.resize(complete);
  return text;
}

std::string StreamDecoder::flush() { return std::exchange(held_, {}); }

}  // namespace ullage::model
