// The safetensors files of a model folder: model.safetensors, or shards with their index.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "model/mapped_file.h"
#include "model/stored_tensor.h"
#include "ullage/status.h"

namespace ullage::model {

struct StoredModel {
  std::vector<MappedFile> files;
  std::vector<StoredTensor> tensors;  // of all files; no name twice
  std::vector<std::string> warnings;
};

// Where there are shards, the index and their headers must name the same tensors: 641 for a shard
// that is not on disk, 657 for a tensor that only one of the two names, 649 for a tensor that two
// shards hold. A wrong total_size is a warning: the headers are what is read.
Result<StoredModel> open_safetensors_folder(const std::filesystem::path& folder);

}  // namespace ullage::model
