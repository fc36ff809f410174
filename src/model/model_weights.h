// Every weight that a configuration calls for, out of a file's tensors.
#pragma once

#include <string>
#include <vector>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/safetensors_folder.h"
#include "model/tensor_names.h"
#include "ullage/status.h"

namespace ullage::model {

struct ModelWeights {
  Weight embedding, head, final_norm;
  std::vector<LayerWeights> layers;
};

// 657 for a tensor that is absent or has another shape, 651 for one whose type is not read, 658 for
// a tensor among the layers that the forward pass of this family would leave out. Adds a warning
// for tensors beside the decoder, and for a stored head that a tied model does not use.
Result<ModelWeights> find_weights(const Config& config, const TensorNames& names,
                                  StoredModel& stored, std::string_view origin);

}  // namespace ullage::model
