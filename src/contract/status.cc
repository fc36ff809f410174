#include "ullage/status.h"

namespace ullage {

std::string_view status_name(int code) {
  switch (code) {
#define ULLAGE_STATUS_NAME(value, symbol, name, meaning) \
  case value:                                            \
    return name;
    ULLAGE_STATUS_LEDGER(ULLAGE_STATUS_NAME)
#undef ULLAGE_STATUS_NAME
    default:
      return "unknown_status";
  }
}

std::string_view status_meaning(int code) {
  switch (code) {
#define ULLAGE_STATUS_MEANING(value, symbol, name, meaning) \
  case value:                                               \
    return meaning;
    ULLAGE_STATUS_LEDGER(ULLAGE_STATUS_MEANING)
#undef ULLAGE_STATUS_MEANING
    default:
      return "";
  }
}

std::string Status::to_string() const {
  std::string text =
      std::to_string(static_cast<int>(code_)) + " " + std::string(status_name(code_));
  if (!message_.empty()) text += ": " + message_;
  return text;
}

}  // namespace ullage
