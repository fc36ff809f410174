#include "model/safetensors_folder.h"

#include <fmt/format.h>

#include <iterator>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string_view>
#include <utility>

#include "model/json_document.h"
#include "model/safetensors.h"
#include "model/text.h"

namespace ullage::model {
namespace {

constexpr std::string_view kSingleFile = "model.safetensors";
constexpr std::string_view kIndexFile = "model.safetensors.index.json";

Status add_file(const std::filesystem::path& path, StoredModel& model) {
  auto file = MappedFile::open(path);
  if (!file) return file.status();
  auto tensors = read_safetensors(file->bytes(), path.string());
  if (!tensors) return tensors.status();
  model.tensors.insert(model.tensors.end(), std::make_move_iterator(tensors->begin()),
                       std::make_move_iterator(tensors->end()));
  model.files.push_back(*std::move(file));
  return kModelOk;
}

struct Index {
  std::map<std::string, std::set<std::string, std::less<>>> shards;  // file -> its tensors
  std::optional<int64_t> total_bytes;
};

Result<Index> read_index(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  if (!file) return file.status();
  const std::string origin = path.string();
  const auto document = parse_json(file->text(), origin);
  if (!document) return document.status();
  const JsonValue* weight_map = document->find("weight_map");
  const auto* entries = weight_map ? weight_map->get<JsonValue::Object>() : nullptr;
  if (entries == nullptr) return {kModelBadField, origin + ": 'weight_map' is not an object"};

  Index index;
  for (const auto& [tensor, value] : *entries) {
    const auto* shard = value.get<std::string>();
    // A plain file name: an index does not choose what else on this machine is opened.
    if (shard == nullptr || shard->empty() || shard->find('/') != shard->npos) {
      return {kModelBadField,
              fmt::format("{}: tensor {} is in {}; the name of a file of this folder is read",
                          origin, in_quotes(tensor), describe(value))};
    }
    index.shards[*shard].insert(tensor);
  }
  if (const JsonValue* metadata = document->find("metadata")) {
    if (const JsonValue* total = metadata->find("total_size")) {
      if (const auto* bytes = total->get<int64_t>()) index.total_bytes = *bytes;
    }
  }
  return index;
}

// Finds every tensor of the shard in the index, and every tensor of the index in the shard.
Status compare(const Index& index, const std::string& shard, std::span<const StoredTensor> stored) {
  auto missing = index.shards.at(shard);
  for (const StoredTensor& tensor : stored) {
    if (missing.erase(tensor.name) != 0) continue;
    for (const auto& [other, tensors] : index.shards) {
      if (tensors.contains(tensor.name)) {
        return {kModelDuplicate,
                fmt::format("tensor {} is in {}, and the index has it in {}",
                            in_quotes(tensor.name), in_quotes(shard), in_quotes(other))};
      }
    }
    return {kModelTensorMissing, fmt::format("tensor {} of {} is not in the index",
                                             in_quotes(tensor.name), in_quotes(shard))};
  }
  if (!missing.empty()) {
    return {kModelTensorMissing, fmt::format("tensor {} is not in {}, where the index has it",
                                             in_quotes(*missing.begin()), in_quotes(shard))};
  }
  return kModelOk;
}

}  // namespace

Result<StoredModel> open_safetensors_folder(const std::filesystem::path& folder) {
  StoredModel model;
  std::error_code ignored;
  if (std::filesystem::exists(folder / kSingleFile, ignored)) {
    if (Status status = add_file(folder / kSingleFile, model); !status.ok()) return status;
    return model;
  }
  if (!std::filesystem::exists(folder / kIndexFile, ignored)) {
    return {kModelUnreadable, fmt::format("{} has neither {} nor {}", in_quotes(folder.string()),
                                          kSingleFile, kIndexFile)};
  }
  const auto index = read_index(folder / kIndexFile);
  if (!index) return index.status();
  int64_t stored_bytes = 0;
  for (const auto& [shard, names] : index->shards) {
    const size_t first = model.tensors.size();
    if (Status status = add_file(folder / shard, model); !status.ok()) return status;
    const auto stored = std::span(model.tensors).subspan(first);
    if (Status status = compare(*index, shard, stored); !status.ok()) return status;
    for (const StoredTensor& tensor : stored) stored_bytes += tensor.bytes;
  }
  if (index->total_bytes && *index->total_bytes != stored_bytes) {
    model.warnings.push_back(fmt::format("{}: total_size is {}, the shards hold {} bytes",
                                         kIndexFile, *index->total_bytes, stored_bytes));
  }
  return model;
}

}  // namespace ullage::model
