#include "model_argument.h"

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "verbs.h"

namespace ullage::apps {

std::string model_path(const std::string& argument) {
  std::error_code ignored;
  if (argument != "smollm2" || std::filesystem::exists(argument, ignored)) return argument;
  const char* cache = std::getenv("XDG_CACHE_HOME");
  const char* home = std::getenv("HOME");
  const std::filesystem::path folder = cache != nullptr && *cache != '\0'
                                           ? std::filesystem::path(cache)
                                           : std::filesystem::path(home ? home : "") / ".cache";
  return (folder / "ullage" / "smollm2.gguf").string();
}

int report(const Status& status, bool json) {
  if (json) {
    const nlohmann::ordered_json error = {{"code", static_cast<int>(status.code())},
                                          {"name", status_name(status.code())},
                                          {"message", status.message()}};
    std::puts(nlohmann::ordered_json{{"error", error}}.dump(2).c_str());
  } else {
    std::fprintf(stderr, "ullage: %s\n", status.to_string().c_str());
  }
  return kExitError;
}

}  // namespace ullage::apps
