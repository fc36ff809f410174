// What a decoder of the llama, qwen2 or qwen3 family is, whatever file said so.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "ullage/status.h"

namespace ullage::model {

enum class Family { kLlama, kQwen2, kQwen3 };

std::string_view name_of(Family family);
std::optional<Family> family_named(std::string_view name);

// Llama 3's frequency scaling (https://arxiv.org/abs/2407.21783, and the reference code that came
// with it).
struct RopeScaling {
  double factor = 1;
  double low_freq_factor = 1;
  double high_freq_factor = 1;
  int64_t original_max_position = 0;  // positions; 0: no scaling
};

// The largest models that are read: above every one published, and small enough that no product of
// them overflows.
inline constexpr int64_t kMaxLayers = 1024;
inline constexpr int64_t kMaxModelWidth = int64_t{1} << 17;  // d_model, h_q * d_head
inline constexpr int64_t kMaxFeedForward = int64_t{1} << 20;
inline constexpr int64_t kMaxVocab = int64_t{1} << 20;
inline constexpr int64_t kMaxPosition = int64_t{1} << 30;

struct Config {
  Family family = Family::kLlama;
  int64_t n_layers = 0;
  int64_t d_model = 0;
  int64_t h_q = 0;     // query heads
  int64_t h_kv = 0;    // key/value heads; h_q is a multiple
  int64_t d_head = 0;  // apart from d_model / h_q; even
  int64_t d_ff = 0;
  int64_t vocab = 0;         // rows of the embedding, padding rows included
  int64_t max_position = 0;  // positions the model was trained for
  double rms_eps = 0;
  double rope_theta = 0;
  RopeScaling rope_scaling;
  // [d_head / 2] or empty: what divides the inverse frequency of each pair. GGUF files of Llama 3
  // hold these and not the parameters of rope_scaling, which they were made from.
  std::vector<float> rope_factors;
  // Query and key rows are stored so that a rotation pairs elements (2i, 2i+1), as llama GGUF files
  // do, and not (i, i + d_head/2), as Hugging Face files do.
  bool rope_pairs_adjacent = false;
  bool tied_head = false;
  bool qkv_bias = false;
  bool qk_norm = false;          // RMSNorm over d_head on queries and keys before RoPE
  int64_t bos_id = -1;           // -1: none
  int64_t eos_id = -1;           // the first of eos_ids; -1: none
  std::vector<int64_t> eos_ids;  // every id that ends a text

  int64_t n_parameters() const;  // tied tables counted once

  // [d_head / 2], radians a position: pair i of a head turns by position * value i. Scaling and
  // factors are in it.
  std::vector<double> rope_inverse_frequencies() const;
};

// 656 where fields that are each in range disagree: heads, widths, token ids. `origin` names the
// file.
Status check_consistency(const Config& config, std::string_view origin);

}  // namespace ullage::model
