#include "model/checkpoint.h"

#include <system_error>
#include <utility>

#include "model/config_gguf.h"
#include "model/config_json.h"
#include "model/gguf.h"
#include "model/mapped_file.h"
#include "model/model_weights.h"
#include "model/safetensors_folder.h"
#include "model/tensor_names.h"

namespace ullage::model {

struct Checkpoint::State {
  std::string name;
  Config config;
  StoredModel stored;
  ModelWeights weights;

  Status open_folder(const std::filesystem::path& folder);
  Status open_gguf(const std::filesystem::path& path);
  Status find(Config read, const TensorNames& names, std::string_view origin);
};

Status Checkpoint::State::open_folder(const std::filesystem::path& folder) {
  const auto config_path = folder / "config.json";
  const auto config_file = MappedFile::open(config_path);
  if (!config_file) return config_file.status();
  auto read = parse_config_json(config_file->text(), config_path.string());
  if (!read) return read.status();
  auto opened = open_safetensors_folder(folder);
  if (!opened) return opened.status();
  stored = *std::move(opened);
  return find(*std::move(read), kHuggingFaceNames, folder.string());
}

Status Checkpoint::State::open_gguf(const std::filesystem::path& path) {
  const std::string origin = path.string();
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  auto gguf = read_gguf(file->bytes(), origin);
  if (!gguf) return gguf.status();
  auto read = config_from_gguf(*gguf, origin);
  if (!read) return read.status();
  stored.files.push_back(*std::move(file));
  stored.tensors = std::move(gguf->tensors);
  return find(*std::move(read), kGgufNames, origin);
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
  // "folder/" is named as "folder" is.
  state->name = (path.has_filename() ? path : path.parent_path()).filename().string();
  std::error_code ignored;
  Status status = std::filesystem::is_directory(path, ignored) ? state->open_folder(path)
                                                               : state->open_gguf(path);
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
