// JSON text to a function's arguments, or the reason why not.
#pragma once

#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "runtime/function_table.h"

namespace ullage::runtime {

struct ArgumentError {
  std::string_view kind;  // json, arity or type
  std::string message;
  std::string expected;
};

// "name(n_tok: int, max_ctx: int = 512)".
std::string signature(const Function& function);

std::variant<std::vector<Argument>, ArgumentError> parse_arguments(const Function& function,
                                                                   std::string_view args_json);

}  // namespace ullage::runtime
