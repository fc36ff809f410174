#include "model/config_json.h"

#include <fmt/format.h>

#include <optional>
#include <string>
#include <utility>

#include "model/field_reader.h"
#include "model/json_document.h"
#include "model/text.h"

namespace ullage::model {
namespace {

// Scalars of a JSON object; null reads as absent, as transformers writes it.
FieldReader fields_of(const JsonValue& object, std::string_view origin) {
  return {origin, [&object](std::string_view key) -> std::optional<Scalar> {
            const JsonValue* value = object.find(key);
            if (value == nullptr || value->is_null()) return {};
            if (const auto* flag = value->get<bool>()) return *flag;
            if (const auto* integer = value->get<int64_t>()) return *integer;
            if (const auto* real = value->get<double>()) return *real;
            if (const auto* text = value->get<std::string>()) return *text;
            return NoScalar{describe(*value)};
          }};
}

// The object under `key`, or nullptr where it is absent or null. Another kind of value is refused.
const JsonValue* object_at(const JsonValue& root, std::string_view key, FieldReader& fields) {
  const JsonValue* value = root.find(key);
  if (value == nullptr || value->is_null()) return nullptr;
  const bool is_object = value->get<JsonValue::Object>() != nullptr;
  fields.require(is_object, key, "an object or null is read");
  return is_object ? value : nullptr;
}

// One id, a list of ids, or none.
std::vector<int64_t> token_ids(const JsonValue& root, std::string_view key, FieldReader& fields) {
  const JsonValue* value = root.find(key);
  const auto* list = value == nullptr ? nullptr : value->get<JsonValue::Array>();
  std::vector<int64_t> ids;
  if (list == nullptr) {
    if (const int64_t id = fields.integer(key, 0, kMaxVocab - 1, -1); id >= 0) ids.push_back(id);
    return ids;
  }
  for (const JsonValue& item : *list) {
    const auto* id = item.get<int64_t>();
    const bool usable = id != nullptr && *id >= 0 && *id < kMaxVocab;
    fields.require(usable, key, "an id or a list of ids of the vocabulary is read");
    if (!usable) break;
    ids.push_back(*id);
  }
  return ids;
}

Status read_rope(const JsonValue& root, FieldReader& fields, std::string_view origin,
                 Config& config) {
  const JsonValue* newer = object_at(root, "rope_parameters", fields);
  const JsonValue* older = object_at(root, "rope_scaling", fields);
  constexpr double kThetaBeforeItWasWritten = 10000;  // llama 1 and 2 files have no rope_theta
  config.rope_theta = fields.positive("rope_theta", kThetaBeforeItWasWritten);
  const JsonValue* object = newer != nullptr ? newer : older;
  if (object == nullptr) return kModelOk;

  FieldReader rope =
      fields_of(*object, fmt::format("{}: {}", origin, newer ? "rope_parameters" : "rope_scaling"));
  // The newer object holds the base too, in place of the older key or beside it.
  if (newer && (rope.has("rope_theta") || !fields.has("rope_theta"))) {
    config.rope_theta = rope.positive("rope_theta");
  }
  const std::string_view type_key = rope.has("rope_type") ? "rope_type" : "type";
  const std::string type = rope.text(type_key, "default");
  rope.require(type == "default" || type == "llama3", type_key, "default and llama3 are read");
  rope.require(rope.positive("partial_rotary_factor", 1) == 1, "partial_rotary_factor",
               "a rotation of whole heads, 1, is read");
  if (type == "llama3") {
    RopeScaling& scaling = config.rope_scaling;
    scaling.factor = rope.positive("factor");
    scaling.low_freq_factor = rope.positive("low_freq_factor");
    scaling.high_freq_factor = rope.positive("high_freq_factor");
    scaling.original_max_position =
        rope.integer("original_max_position_embeddings", 1, kMaxPosition);
    rope.require(scaling.high_freq_factor > scaling.low_freq_factor, "high_freq_factor",
                 "a number above low_freq_factor is read");
  }
  return rope.status();
}

// Attention over a window shorter than the context, in any layer, is not implemented.
void refuse_windows(const JsonValue& root, FieldReader& fields, const Config& config) {
  const JsonValue* layer_types = root.find("layer_types");
  if (const auto* types = layer_types ? layer_types->get<JsonValue::Array>() : nullptr) {
    for (const JsonValue& type : *types) {
      const auto* name = type.get<std::string>();
      fields.require(name != nullptr && *name == "full_attention", "layer_types",
                     fmt::format("full_attention in every layer is read, not {}", describe(type)));
    }
    return;
  }
  if (!fields.flag("use_sliding_window", false)) return;
  const int64_t window = fields.integer("sliding_window", 1, kMaxPosition, kMaxPosition);
  const int64_t first = fields.integer("max_window_layers", 0, kMaxPosition, 0);
  fields.require(window >= config.max_position || first >= config.n_layers, "sliding_window",
                 "full attention is read (use_sliding_window false, or a window that never binds)");
}

void refuse_unimplemented(const JsonValue& root, FieldReader& fields, const Config& config) {
  fields.require(fields.text("hidden_act", "silu") == "silu", "hidden_act", "silu is read");
  fields.require(!fields.flag("mlp_bias", false), "mlp_bias", "false is read");
  fields.require(fields.positive("partial_rotary_factor", 1) == 1, "partial_rotary_factor",
                 "a rotation of whole heads, 1, is read");
  refuse_windows(root, fields, config);
}

}  // namespace

Result<Config> parse_config_json(std::string_view text, std::string_view origin) {
  const auto document = parse_json(text, origin);
  if (!document) return document.status();
  if (document->get<JsonValue::Object>() == nullptr) {
    return {kModelBadJson, fmt::format("{}: {}, not an object", origin, describe(*document))};
  }
  FieldReader outer = fields_of(*document, origin);
  const JsonValue* inner = object_at(*document, "text_config", outer);
  if (!outer.ok()) return outer.status();
  const JsonValue& root = inner != nullptr ? *inner : *document;
  FieldReader fields = fields_of(
      root, inner != nullptr ? fmt::format("{}: text_config", origin) : std::string(origin));

  Config config;
  const auto family = family_named(fields.text("model_type"));
  fields.require(family.has_value(), "model_type", "llama, qwen2 and qwen3 are read",
                 kModelArchitecture);
  if (!fields.ok()) return fields.status();
  config.family = *family;

  config.n_layers = fields.integer("num_hidden_layers", 1, kMaxLayers);
  config.d_model = fields.integer("hidden_size", 1, kMaxModelWidth);
  config.h_q = fields.integer("num_attention_heads", 1, kMaxModelWidth);
  config.h_kv = fields.integer("num_key_value_heads", 1, kMaxModelWidth, config.h_q);
  if (!fields.has("head_dim")) {
    fields.require(config.h_q > 0 && config.d_model % config.h_q == 0, "head_dim",
                   fmt::format("hidden_size {} is not a multiple of num_attention_heads {}",
                               config.d_model, config.h_q));
  }
  if (!fields.ok()) return fields.status();
  config.d_head = fields.integer("head_dim", 1, kMaxModelWidth, config.d_model / config.h_q);
  config.d_ff = fields.integer("intermediate_size", 1, kMaxFeedForward);
  config.vocab = fields.integer("vocab_size", 1, kMaxVocab);
  config.max_position = fields.integer("max_position_embeddings", 1, kMaxPosition);
  config.rms_eps = fields.positive("rms_norm_eps");
  config.tied_head = fields.flag("tie_word_embeddings", outer.flag("tie_word_embeddings", false));
  config.qkv_bias = config.family == Family::kQwen2 || fields.flag("attention_bias", false);
  config.qk_norm = config.family == Family::kQwen3;
  if (const auto ids = token_ids(root, "bos_token_id", fields); !ids.empty()) {
    config.bos_id = ids.front();
  }
  config.eos_ids = token_ids(root, "eos_token_id", fields);
  if (!config.eos_ids.empty()) config.eos_id = config.eos_ids.front();

  const Status rope_status = read_rope(root, fields, origin, config);
  refuse_unimplemented(root, fields, config);
  for (const Status& status : {outer.status(), fields.status(), rope_status}) {
    if (!status.ok()) return status;
  }
  if (Status status = check_consistency(config, origin); !status.ok()) return status;
  return config;
}

}  // namespace ullage::model
