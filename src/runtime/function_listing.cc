// The function table for readers: a terminal, and docs/functions.md.
#include <fmt/format.h>

#include "runtime/function_table.h"
#include "runtime/functions.h"
#include "runtime/json_arguments.h"

namespace ullage::runtime {
namespace {

// "int", or "{mean_loss: float, ..., status: int}".
std::string result_type(const Function& function) {
  const ReturnValue sample = function.sample();
  const auto* object = std::get_if<Object>(&sample);
  if (object == nullptr) return std::string(name_of(type_of(sample)));
  std::string fields;
  for (const auto& [name, field] : *object) {
    if (!fields.empty()) fields += ", ";
    fields += fmt::format("{}: {}", name, name_of(type_of(field)));
  }
  return '{' + fields + '}';
}

std::string shown(const Field& field) {
  if (const auto* integer = std::get_if<int64_t>(&field)) return fmt::format("{}", *integer);
  return fmt::format("{}", std::get<double>(field));
}

constexpr std::string_view kMarkdownHead =
    R"(<!-- Written by `ullage functions --markdown`; a test compares. Edit src/runtime/function_table.cc instead. -->
# Contract functions

Each is run by its module and name with positional JSON arguments:

```console
$ ullage exec residentk.contract residentk_dispatch_budget '[28]'
{"module":"residentk.contract","function":"residentk_dispatch_budget","result":171}
```

The arguments may also come from a file (`--args-file FILE`) or from standard input (`-` in their place). From C the
same call is `ullage_execute`. The program exits 0 when the function ran, a refusal included, since the status is its result; else it
prints `{"error": {"kind", "message", "expected"}}` and exits 2.

A float result always shows a point or an exponent and reads back to the same bits. A whole number may be given as
`256` or, up to 2^53, `256.0`; a bool is not a number; a whole number beyond 64 bits is an error. JSON has no non-finite numbers: where a float is
expected, `NaN`, `Infinity`, `-Infinity`, `"nan"`, `"inf"` and `"-inf"` are understood. A list may be longer than its shape; what lies
beyond is not read.
)";

}  // namespace

std::string functions_text() {
  std::string out;
  for (const Module& module : modules()) {
    if (!out.empty()) out += '\n';
    out += fmt::format("{}\n  {}\n", module.name, module.doc);
    for (const Function& function : module.functions) {
      out += fmt::format("\n  {} -> {}\n      {}\n", signature(function), result_type(function),
                         function.doc);
    }
  }
  return out;
}

std::string functions_markdown() {
  std::string out(kMarkdownHead);
  for (const Module& module : modules()) {
    out += fmt::format("\n## {}\n\n{}\n", module.name, module.doc);
    for (const Function& function : module.functions) {
      out += fmt::format("\n### {}\n\n```\n{} -> {}\n```\n\n{}\n", function.name,
                         signature(function), result_type(function), function.doc);
      if (!function.parameters.empty()) out += '\n';
      for (const Parameter& parameter : function.parameters) {
        out += fmt::format("- `{}`: {}\n", parameter.name, parameter.doc);
      }
      out += fmt::format("\nReturns {}.\n", function.returns);
    }
  }
  out += "\n## Constants\n\n| module | name | value | meaning |\n| --- | --- | ---: | --- |\n";
  for (const Constant& constant : constants()) {
    out += fmt::format("| {} | `{}` | {} | {} |\n", constant.module, constant.name,
                       shown(constant.value), constant.doc);
  }
  return out;
}

}  // namespace ullage::runtime
