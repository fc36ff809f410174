#include "model/config.h"

#include <fmt/format.h>

#include <cmath>
#include <numbers>

namespace ullage::model {

std::string_view name_of(Family family) {
  switch (family) {
    case Family::kLlama:
      return "llama";
    case Family::kQwen2:
      return "qwen2";
    case Family::kQwen3:
      return "qwen3";
  }
  return "";
}

std::optional<Family> family_named(std::string_view name) {
  for (const Family family : {Family::kLlama, Family::kQwen2, Family::kQwen3}) {
    if (name == name_of(family)) return family;
  }
  return {};
}

int64_t Config::n_parameters() const {
  const int64_t q_rows = h_q * d_head;
  const int64_t kv_rows = h_kv * d_head;
  const int64_t attention = d_model * (2 * q_rows + 2 * kv_rows) +
                            (qkv_bias ? q_rows + 2 * kv_rows : 0) + (qk_norm ? 2 * d_head : 0);
  const int64_t layer = attention + 3 * d_model * d_ff + 2 * d_model;
  return vocab * d_model * (tied_head ? 1 : 2) + n_layers * layer + d_model;
}

std::vector<double> Config::rope_inverse_frequencies() const {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < d_head / 2; ++i) {
    double frequency =
        std::pow(rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(d_head));
    if (rope_scaling.original_max_position > 0) {
      // Turns over the original context: many (a short wave) stay, few are slowed by `factor`, and
      // between the two bounds the two are mixed.
      const double turns = static_cast<double>(rope_scaling.original_max_position) * frequency /
                           (2 * std::numbers::pi);
      if (turns < rope_scaling.low_freq_factor) {
        frequency /= rope_scaling.factor;
      } else if (turns <= rope_scaling.high_freq_factor) {
        const double kept = (turns - rope_scaling.low_freq_factor) /
                            (rope_scaling.high_freq_factor - rope_scaling.low_freq_factor);
        frequency = (1 - kept) * frequency / rope_scaling.factor + kept * frequency;
      }
    }
    if (!rope_factors.empty()) {
      frequency /= static_cast<double>(rope_factors[static_cast<size_t>(i)]);
    }
    frequencies.push_back(frequency);
  }
  return frequencies;
}

Status check_consistency(const Config& config, std::string_view origin) {
  const auto refuse = [&](std::string_view why) {
    return Status(kModelBadField, fmt::format("{}: {}", origin, why));
  };
  if (config.h_q % config.h_kv != 0) {
    return refuse(fmt::format("{} query heads are no multiple of {} key/value heads", config.h_q,
                              config.h_kv));
  }
  if (config.d_head % 2 != 0) {
    return refuse(
        fmt::format("heads of {}: a rotary embedding turns pairs of elements, so "
                    "head_dim is even",
                    config.d_head));
  }
  if (config.h_q > kMaxModelWidth / config.d_head) {
    return refuse(
        fmt::format("{} heads of {} are wider than {}", config.h_q, config.d_head, kMaxModelWidth));
  }
  std::vector<int64_t> special = config.eos_ids;
  special.push_back(config.bos_id);
  for (const int64_t id : special) {
    if (id >= config.vocab) {
      return refuse(fmt::format("bos or eos token id {} is not below the vocabulary of {}", id,
                                config.vocab));
    }
  }
  return kModelOk;
}

}  // namespace ullage::model
