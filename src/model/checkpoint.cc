#include "model/checkpoint.h"

#include <fmt/format.h>

#include <optional>
#include <system_error>
#include <utility>

#include "model/config_gguf.h"
#include "model/config_json.h"
#include "model/gguf.h"
#include "model/mapped_file.h"
#include "model/model_weights.h"
#include "model/safetensors_folder.h"
#include "model/tensor_names.h"
#include "model/text.h"
#include "model/tokenizer_gguf.h"
#include "model/tokenizer_json.h"

namespace ullage::model {

struct Checkpoint::State {
  std::string name;
  std::filesystem::path path;
  std::optional<GgufFile> gguf;  // its metadata; empty where the model is a folder
  Config config;
  StoredModel stored;
  ModelWeights weights;

  Status open_folder();
  Status open_gguf();
  Result<TokenizerData> tokenizer_data() const;
  Status find(Config read, const TensorNames& names, std::string_view origin);
};

Status Checkpoint::State::open_folder() {
  const auto config_path = path / "config.json";
  const auto config_file = MappedFile::open(config_path);
  if (!config_file) return config_file.status();
  auto read = parse_config_json(config_file->text(), config_path.string());
  if (!read) return read.status();
  auto opened = open_safetensors_folder(path);
  if (!opened) return opened.status();
  stored = *std::move(opened);
  return find(*std::move(read), kHuggingFaceNames, path.string());
}

Status Checkpoint::State::open_gguf() {
  const std::string origin = path.string();
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  auto contents = read_gguf(file->bytes(), origin);
  if (!contents) return contents.status();
  auto read = config_from_gguf(*contents, origin);
  if (!read) return read.status();
  stored.files.push_back(*std::move(file));
  stored.tensors = std::move(contents->tensors);
  gguf = *std::move(contents);
  return find(*std::move(read), kGgufNames, origin);
}

Result<TokenizerData> Checkpoint::State::tokenizer_data() const {
  if (gguf) return tokenizer_data_from_gguf(*gguf, path.string());
  const auto json = path / "tokenizer.json";
  std::error_code ignored;
  if (!std::filesystem::exists(json, ignored)) {
    return {kModelTokenizer, in_quotes(path.string()) + " has no tokenizer.json"};
  }
  auto data = read_tokenizer_json(json);
  if (!data) return data.status();
  if (data->bos_id < 0) data->bos_id = config.bos_id;
  if (data->eos_id < 0) data->eos_id = config.eos_id;
  return data;
}

Status Checkpoint::State::find(Config read, const TensorNames& names, std::string_view origin) {
  config = std::move(read);
  auto found = find_weights(config, names, stored, origin);
  if (!found) return found.status();
  weights = *std::move(found);
  return kModelOk;
}

Result<Checkpoint> Checkpoint::open(const std::filesystem::path& path) {
  auto state = std::make_unique<State>();
  state->path = path;
  // "folder/" is named as "folder" is.
  state->name = (path.has_filename() ? path : path.parent_path()).filename().string();
  std::error_code ignored;
  Status status =
      std::filesystem::is_directory(path, ignored) ? state->open_folder() : state->open_gguf();
  if (!status.ok()) return status;
  return Checkpoint(std::move(state));
}

Checkpoint::Checkpoint(std::unique_ptr<State> state) : state_(std::move(state)) {}
Checkpoint::Checkpoint(Checkpoint&&) noexcept = default;
Checkpoint& Checkpoint::operator=(Checkpoint&&) noexcept = default;
Checkpoint::~Checkpoint() = default;

const Config& Checkpoint::config() const { return state_->config; }
const std::string& Checkpoint::name() const { return state_->name; }
const Weight& Checkpoint::embedding() const { return state_->weights.embedding; }
const Weight& Checkpoint::head() const { return state_->weights.head; }
const Weight& Checkpoint::final_norm() const { return state_->weights.final_norm; }
const std::vector<LayerWeights>& Checkpoint::layers() const { return state_->weights.layers; }
const std::vector<std::string>& Checkpoint::warnings() const { return state_->stored.warnings; }

Result<Tokenizer> Checkpoint::tokenizer() const {
  auto data = state_->tokenizer_data();
  if (!data) return data.status();
  const auto n_tokens = static_cast<int64_t>(data->tokens.size());
  if (n_tokens > state_->config.vocab) {
    return {kModelTokenizer, fmt::format("{}: {} tokens, where the embedding has {} rows",
                                         state_->path.string(), n_tokens, state_->config.vocab)};
  }
  return Tokenizer::create(*std::move(data));
}

int64_t Checkpoint::stored_elements() const {
  int64_t elements = 0;
  for (const StoredTensor& tensor : state_->stored.tensors) elements += tensor.elements;
  return elements;
}

int64_t Checkpoint::stored_bytes() const {
  int64_t bytes = 0;
  for (const StoredTensor& tensor : state_->stored.tensors) bytes += tensor.bytes;
  return bytes;
}

}  // namespace ullage::model
