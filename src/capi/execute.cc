#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>
#include <string_view>

#include "runtime/functions.h"
#include "ullage/status.h"
#include "ullage/ullage.h"

namespace {

std::string_view or_else(const char* text, std::string_view fallback) {
  return text == nullptr ? fallback : std::string_view(text);
}

}  // namespace

extern "C" {

// Here and below, data() of a literal: it ends in a zero byte.
const char* ullage_version(void) { return ullage::runtime::version().data(); }

int ullage_execute(const char* module, const char* function, const char* args_json, char** out) {
  if (out == nullptr) return ULLAGE_NO_OUTPUT;
  *out = nullptr;
  try {
    const ullage::runtime::Execution execution = ullage::runtime::execute(
        or_else(module, ""), or_else(function, ""), or_else(args_json, "[]"));
    *out = strdup(execution.json.c_str());
    if (*out == nullptr) return ULLAGE_NO_OUTPUT;
    return execution.ran ? ULLAGE_RAN : ULLAGE_NOT_RUN;
  } catch (const std::exception&) {
    return ULLAGE_NO_OUTPUT;
  }
}

void ullage_string_free(char* text) { std::free(text); }

const char* ullage_status_name(int code) { return ullage::status_name(code).data(); }

const char* ullage_functions_json(void) {
  try {
    static const std::string table = ullage::runtime::functions_json();
    return table.c_str();
  } catch (const std::exception&) {
    return nullptr;
  }
}

}  // extern "C"
