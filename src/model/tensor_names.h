// What each weight is called in Hugging Face's files and in GGUF.
#pragma once

#include <array>
#include <span>
#include <string_view>

namespace ullage::model {

struct TensorNames {
  // Modules that the decoder and its head may be in; the file's own names tell.
  std::span<const std::string_view> prefixes;  // of all but the head
  std::span<const std::string_view> head_prefixes;
  std::string_view embedding;
  std::string_view head;
  std::string_view final_norm;
  std::string_view layers;  // a layer's tensors are `layers` + number + "." + one of these:
  std::string_view attn_norm;
  std::string_view q, k, v;
  std::string_view q_bias, k_bias, v_bias;
  std::string_view q_norm, k_norm;
  std::string_view o;
  std::string_view ffn_norm;
  std::string_view gate, up, down;
};

// Text models, multimodal models by age, and a decoder alone.
inline constexpr auto kHuggingFacePrefixes = std::to_array<std::string_view>(
    {"model.", "model.language_model.", "language_model.model.", ""});
inline constexpr auto kHuggingFaceHeadPrefixes =
    std::to_array<std::string_view>({"", "language_model."});
inline constexpr auto kNoPrefix = std::to_array<std::string_view>({""});

inline constexpr TensorNames kHuggingFaceNames = {
    .prefixes = kHuggingFacePrefixes,
    .head_prefixes = kHuggingFaceHeadPrefixes,
    .embedding = "embed_tokens.weight",
    .head = "lm_head.weight",
    .final_norm = "norm.weight",
    .layers = "layers.",
    .attn_norm = "input_layernorm.weight",
    .q = "self_attn.q_proj.weight",
    .k = "self_attn.k_proj.weight",
    .v = "self_attn.v_proj.weight",
    .q_bias = "self_attn.q_proj.bias",
    .k_bias = "self_attn.k_proj.bias",
    .v_bias = "self_attn.v_proj.bias",
    .q_norm = "self_attn.q_norm.weight",
    .k_norm = "self_attn.k_norm.weight",
    .o = "self_attn.o_proj.weight",
    .ffn_norm = "post_attention_layernorm.weight",
    .gate = "mlp.gate_proj.weight",
    .up = "mlp.up_proj.weight",
    .down = "mlp.down_proj.weight",
};

// GGUF: what divides the frequencies of Llama 3; belongs to the configuration.
inline constexpr std::string_view kGgufRopeFactors = "rope_freqs.weight";

inline constexpr TensorNames kGgufNames = {
    .prefixes = kNoPrefix,
    .head_prefixes = kNoPrefix,
    .embedding = "token_embd.weight",
    .head = "output.weight",
    .final_norm = "output_norm.weight",
    .layers = "blk.",
    .attn_norm = "attn_norm.weight",
    .q = "attn_q.weight",
    .k = "attn_k.weight",
    .v = "attn_v.weight",
    .q_bias = "attn_q.bias",
    .k_bias = "attn_k.bias",
    .v_bias = "attn_v.bias",
    .q_norm = "attn_q_norm.weight",
    .k_norm = "attn_k_norm.weight",
    .o = "attn_output.weight",
    .ffn_norm = "ffn_norm.weight",
    .gate = "ffn_gate.weight",
    .up = "ffn_up.weight",
    .down = "ffn_down.weight",
};

}  // namespace ullage::model
