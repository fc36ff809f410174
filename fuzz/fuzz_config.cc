// Any bytes as a config.json: refused, or a configuration whose numbers hold together.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "model/config_json.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const auto config = ullage::model::parse_config_json(text, "config.json");
  if (!config) return 0;
  if (config->n_parameters() <= 0 || config->h_q % config->h_kv != 0) __builtin_trap();
  (void)config->rope_inverse_frequencies();
  return 0;
}
