#include "model/model_weights.h"

#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "model/text.h"
#include "model/weight_finder.h"

namespace ullage::model {
namespace {

std::string join(std::string_view a, std::string_view b) { return std::string(a).append(b); }

bool is_zero(const StoredTensor& tensor) {
  if (tensor.elements == 0) return true;  // whatever its other dimensions say
  if (!tensor.type.element) return false;
  const Weight weight = weight_of(tensor);
  std::vector<float> row(static_cast<size_t>(weight.cols));
  for (int64_t r = 0; r < weight.rows; ++r) {
    dequantize(weight, r, 0, weight.cols, row.data());
    if (std::ranges::any_of(row, [](float x) { return x != 0; })) return false;
  }
  return true;
}

// Left out of the forward pass, it leaves the result as it is: a bias of zeros, or a table that
// follows from the configuration or is a part of it.
bool changes_nothing(const StoredTensor& tensor) {
  return tensor.name.ends_with("rotary_emb.inv_freq") || tensor.name == kGgufRopeFactors ||
         (tensor.name.ends_with(".bias") && is_zero(tensor));
}

LayerWeights find_layer(WeightFinder& finder, const TensorNames& names, const std::string& prefix,
                        const Config& c) {
  const auto find = [&](std::string_view role, int64_t rows, int64_t cols) {
    return finder.find(join(prefix, role), rows, cols);
  };
  const int64_t q_rows = c.h_q * c.d_head;
  const int64_t kv_rows = c.h_kv * c.d_head;
  LayerWeights layer;
  layer.attn_norm = find(names.attn_norm, 1, c.d_model);
  layer.q = find(names.q, q_rows, c.d_model);
  layer.k = find(names.k, kv_rows, c.d_model);
  layer.v = find(names.v, kv_rows, c.d_model);
  if (c.qkv_bias) {
    layer.q_bias = find(names.q_bias, 1, q_rows);
    layer.k_bias = find(names.k_bias, 1, kv_rows);
    layer.v_bias = find(names.v_bias, 1, kv_rows);
  }
  if (c.qk_norm) {
    layer.q_norm = find(names.q_norm, 1, c.d_head);
    layer.k_norm = find(names.k_norm, 1, c.d_head);
  }
  layer.o = find(names.o, c.d_model, q_rows);
  layer.ffn_norm = find(names.ffn_norm, 1, c.d_model);
  layer.gate = find(names.gate, c.d_ff, c.d_model);
  layer.up = find(names.up, c.d_ff, c.d_model);
  layer.down = find(names.down, c.d_model, c.d_ff);
  return layer;
}

// The candidate under which `name` is stored; the first where none is.
std::string_view stored_prefix(const WeightFinder& finder, std::string_view name,
                               std::span<const std::string_view> candidates) {
  for (const std::string_view candidate : candidates) {
    if (finder.stored(join(candidate, name)) != nullptr) return candidate;
  }
  return candidates.front();
}

}  // namespace

Result<ModelWeights> find_weights(const Config& config, const TensorNames& names,
                                  StoredModel& stored, std::string_view origin) {
  WeightFinder finder(origin, stored.tensors);
  const auto prefix = stored_prefix(finder, names.embedding, names.prefixes);
  const auto head = join(stored_prefix(finder, names.head, names.head_prefixes), names.head);
  ModelWeights weights;
  weights.embedding = finder.find(join(prefix, names.embedding), config.vocab, config.d_model);
  weights.final_norm = finder.find(join(prefix, names.final_norm), 1, config.d_model);
  if (!config.tied_head) {
    weights.head = finder.find(head, config.vocab, config.d_model);
  } else {
    weights.head = weights.embedding;
    if (finder.stored(head) != nullptr) {
      stored.warnings.push_back(head + " is stored although the head is tied: it is not used");
      finder.ignore(head);
    }
  }
  const std::string layers = join(prefix, names.layers);
  for (int64_t i = 0; i < config.n_layers && finder.ok(); ++i) {
    weights.layers.push_back(find_layer(finder, names, fmt::format("{}{}.", layers, i), config));
  }
  if (!finder.ok()) return finder.status();

  std::vector<const StoredTensor*> beside;
  for (const StoredTensor* tensor : finder.unused()) {
    if (changes_nothing(*tensor)) continue;
    if (tensor->name.starts_with(layers)) {
      return {kModelArchitecture,
              fmt::format("{}: tensor {} has no place in a {} model of {} layers", origin,
                          in_quotes(tensor->name), name_of(config.family), config.n_layers)};
    }
    beside.push_back(tensor);
  }
  if (!beside.empty()) {
    stored.warnings.push_back(fmt::format("{} stored tensors are not the decoder's, {} among them",
                                          beside.size(), in_quotes(beside.front()->name)));
  }
  return weights;
}

}  // namespace ullage::model
