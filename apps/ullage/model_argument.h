// The MODEL argument of the verbs.
#pragma once

#include <string>

#include "ullage/status.h"

namespace ullage::apps {

// A folder or file as it is; `smollm2`, where no file of that name lies here, is the model that
// `./dev demo` fetches into the cache folder ($XDG_CACHE_HOME/ullage, or ~/.cache/ullage).
std::string model_path(const std::string& argument);

inline constexpr const char* kModelHelp =
    "A folder with config.json and safetensors, a .gguf file, or smollm2";

// Says on standard error, or with `json` as {"error": {...}} on standard output, why the verb
// refuses. Returns the exit code.
int report(const Status& status, bool json);

}  // namespace ullage::apps
