#include <cstring>
#include <exception>
#include <string>

#include "runtime/session_plan.h"
#include "ullage/status.h"
#include "ullage/ullage.h"

namespace {

// Gives `*out` the text of `make()`, a Result<std::string>, or on a refusal the message.
template <class Make>
int given(char** out, Make make) {
  if (out) *out = nullptr;
  try {
    const ullage::Result<std::string> text = make();
    if (out) *out = strdup(text ? text->c_str() : text.status().message().c_str());
    return text ? ullage::kResidentOk : text.status().code();
  } catch (const std::exception& error) {
    if (out) *out = strdup(error.what());
    return ullage::kHeadBadConfig;
  }
}

}  // namespace

extern "C" {

int ullage_plan_session(const char* request_json, char** out) {
  return given(out, [&]() -> ullage::Result<std::string> {
    const auto plan = ullage::runtime::plan_session_from_json(request_json ? request_json : "");
    if (!plan) return plan.status();
    return ullage::runtime::session_plan_json(*plan);
  });
}

int ullage_probe(char** out) {
  return given(out, []() -> ullage::Result<std::string> { return ullage::runtime::probe_json(); });
}

}  // extern "C"
