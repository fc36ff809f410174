#include "model/config_gguf.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>

#include "model/gguf_fields.h"
#include "model/tensor_names.h"

namespace ullage::model {
namespace {

constexpr int64_t kNoToken = 0xffffffff;  // how an id that is none is written in 32 bits

const StoredTensor* find_tensor(const GgufFile& file, std::string_view name) {
  const auto found = std::ranges::find(file.tensors, name, &StoredTensor::name);
  return found == file.tensors.end() ? nullptr : &*found;
}

int64_t token_id(FieldReader& fields, std::string_view key) {
  const int64_t id = fields.integer(key, 0, kNoToken, kNoToken);
  return id == kNoToken ? -1 : id;
}

// Llama 3's factors, and refusals of the scalings that are not read.
Status read_rope(const GgufFile& file, FieldReader& fields, std::string_view arch,
                 std::string_view origin, Config& config) {
  const auto key = [&](std::string_view name) { return fmt::format("{}.{}", arch, name); };
  config.rope_theta = fields.positive(key("rope.freq_base"), 10000);
  const std::string scaling = key("rope.scaling.type");
  const bool scaled = fields.text(scaling, "none") != "none";
  fields.require(!scaled, scaling, "none is read, and Llama 3's as the tensor rope_freqs.weight");
  // Without a type, a factor means linear scaling.
  for (const std::string_view name : {"rope.scaling.factor", "rope.scale_linear"}) {
    const bool unscaled = fields.has(scaling) || fields.positive(key(name), 1) == 1;
    fields.require(unscaled, key(name), "1 is read");
  }
  const StoredTensor* factors = find_tensor(file, kGgufRopeFactors);
  if (factors == nullptr) return kModelOk;
  if (factors->type.element != ElementType::kF32 ||
      factors->shape != std::vector{config.d_head / 2}) {
    return {kModelTensorMissing,
            fmt::format("{}: tensor '{}' is {} {}; F32 [{}], half of a head, is read", origin,
                        kGgufRopeFactors, factors->type.name, describe_shape(factors->shape),
                        config.d_head / 2)};
  }
  config.rope_factors.resize(static_cast<size_t>(factors->elements));
  std::memcpy(config.rope_factors.data(), factors->data, static_cast<size_t>(factors->bytes));
  for (const float factor : config.rope_factors) {
    if (!std::isfinite(factor) || factor <= 0) {
      return {kModelBadField,
              fmt::format("{}: tensor '{}' holds {}; finite numbers above 0 are read", origin,
                          kGgufRopeFactors, factor)};
    }
  }
  return kModelOk;
}

}  // namespace

Result<Config> config_from_gguf(const GgufFile& file, std::string_view origin) {
  FieldReader fields = gguf_fields(file, origin);
  fields.require(fields.integer("split.count", 0, kMaxLayers, 1) <= 1, "split.count",
                 "a model in one file is read");
  Config config;
  const std::string arch = fields.text("general.architecture");
  const auto family = family_named(arch);
  fields.require(family.has_value(), "general.architecture", "llama, qwen2 and qwen3 are read",
                 kModelArchitecture);
  if (!fields.ok()) return fields.status();
  config.family = *family;
  const auto key = [&](std::string_view name) { return fmt::format("{}.{}", arch, name); };
  const std::string experts = key("expert_count");
  fields.require(fields.integer(experts, 0, kMaxFeedForward, 0) == 0, experts,
                 "models without experts are read", kModelArchitecture);

  config.n_layers = fields.integer(key("block_count"), 1, kMaxLayers);
  config.d_model = fields.integer(key("embedding_length"), 1, kMaxModelWidth);
  config.d_ff = fields.integer(key("feed_forward_length"), 1, kMaxFeedForward);
  config.h_q = fields.integer(key("attention.head_count"), 1, kMaxModelWidth);
  config.h_kv = fields.integer(key("attention.head_count_kv"), 1, kMaxModelWidth, config.h_q);
  config.max_position = fields.integer(key("context_length"), 1, kMaxPosition);
  config.rms_eps = fields.positive(key("attention.layer_norm_rms_epsilon"));
  if (!fields.has(key("attention.key_length"))) {
    fields.require(config.h_q > 0 && config.d_model % config.h_q == 0, key("attention.key_length"),
                   fmt::format("{} elements are not a whole number for each of {} heads",
                               config.d_model, config.h_q));
  }
  if (!fields.ok()) return fields.status();
  config.d_head =
      fields.integer(key("attention.key_length"), 1, kMaxModelWidth, config.d_model / config.h_q);
  for (const std::string_view name : {"attention.value_length", "rope.dimension_count"}) {
    const int64_t length = fields.integer(key(name), 1, kMaxModelWidth, config.d_head);
    fields.require(length == config.d_head, key(name),
                   fmt::format("the {} of a head is read", config.d_head));
  }
  const std::string window = key("attention.sliding_window");
  const int64_t window_length = fields.integer(window, 0, kMaxPosition, 0);
  fields.require(window_length == 0 || window_length >= config.max_position, window,
                 "full attention is read (0, or a window that never binds)");
  fields.require(fields.flag(key("attention.causal"), true), key("attention.causal"),
                 "causal attention is read");

  const StoredTensor* embedding = find_tensor(file, kGgufNames.embedding);
  if (embedding == nullptr || embedding->shape.size() != 2) {
    return {kModelTensorMissing,
            fmt::format("{}: tensor '{}' is {}; a matrix is needed", origin, kGgufNames.embedding,
                        embedding ? describe_shape(embedding->shape) : "missing")};
  }
  config.vocab = embedding->shape[0];
  const int64_t declared_vocab = fields.integer(key("vocab_size"), 1, kMaxVocab, config.vocab);
  const bool usable = config.vocab >= 1 && config.vocab <= kMaxVocab;
  fields.require(usable && declared_vocab == config.vocab, key("vocab_size"),
                 fmt::format("the {} rows of '{}' are read, 1 to {}", config.vocab,
                             kGgufNames.embedding, kMaxVocab));
  config.tied_head = find_tensor(file, kGgufNames.head) == nullptr;
  config.qkv_bias = config.family == Family::kQwen2 || find_tensor(file, "blk.0.attn_q.bias");
  config.qk_norm = config.family == Family::kQwen3;
  // The converter reorders q and k of this family alone, for ggml's rotation of adjacent pairs.
  config.rope_pairs_adjacent = config.family == Family::kLlama;
  config.bos_id = token_id(fields, "tokenizer.ggml.bos_token_id");
  config.eos_id = token_id(fields, "tokenizer.ggml.eos_token_id");
  if (config.eos_id >= 0) config.eos_ids = {config.eos_id};

  Status rope_status = read_rope(file, fields, arch, origin, config);
  if (!fields.ok()) return fields.status();
  if (!rope_status.ok()) return rope_status;
  if (Status status = check_consistency(config, origin); !status.ok()) return status;
  return config;
}

}  // namespace ullage::model
