// Runs the functions of the table on JSON, and describes them.
//
// Arguments are one JSON array, positional; parameters with a default may be left off. An int may
// be written 256 or 256.0; a bool is not an int; what does not fit 64 bits is refused. JSON has no
// non-finite numbers: a float may also be NaN, Infinity or -Infinity as a bare word, or "nan",
// "inf" or "-inf", which is how a result shows one.
#pragma once

#include <string>
#include <string_view>

namespace ullage::runtime {

struct Execution {
  bool ran;  // a refusal by the function itself counts as run: its status is its result
  // {"module", "function", "result"}, or {"error": {"kind", "message", "expected"}} where kind is
  // one of unknown_module, unknown_function, json, arity, type, out_of_memory. Floats read back to
  // the same bits.
  std::string json;
};

Execution execute(std::string_view module, std::string_view function, std::string_view args_json);

// The error object alone, for callers that fail before they have arguments.
std::string error_json(std::string_view kind, std::string_view message, std::string_view expected);

std::string_view version();

// The table as JSON, as a listing for a terminal, and as docs/functions.md.
std::string functions_json();
std::string functions_text();
std::string functions_markdown();

}  // namespace ullage::runtime
