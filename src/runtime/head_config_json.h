// A loss configuration as a JSON document, for the command line and Python:
//
//   {"losses": [{"name": "ce", "kind": "cross_entropy", "weight": 1, "label_smoothing": 0.1}, ...],
//    "teachers": [{"kind": "logits", "vocab": 151936, "dtype": "bf16"}],
//    "logits_scale": 1, "softcap": 30, "bias": true, ...}
//
// Field names are those of lossk::LossTerm, Teacher and HeadOptions; enumerators are snake_case.
// Absent fields have the structs' defaults, a loss without a name that of its kind. "masked": true
// is "mask": "auto", and false "none".
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "ullage/lossk/head.h"

namespace ullage::runtime {

// Errors: 681 an enumerator not known, 699 anything else, an unknown field with the nearest known
// one. `lossk::validate` has the meaning of the values still to check.
Result<lossk::HeadConfig> head_config_from_json(std::string_view text);

// Fields that differ from the defaults, and each loss's name, kind and weight.
std::string head_config_to_json(const lossk::HeadConfig& config);

// The document's top-level fields.
std::span<const std::string_view> head_config_fields();

// "auto", "fused", "per_term"; "f64", "f32", "bf16", "f16". Errors: 681.
Result<lossk::Implementation> implementation_from_name(std::string_view name);
Result<DType> dtype_from_name(std::string_view name);

// 699: "losses[0]: field 'wieght' is not known; accepted: kind, name, ...; did you mean 'weight'?"
Status unknown_field(const std::string& owner, std::string_view field,
                     std::span<const std::string_view> known);

}  // namespace ullage::runtime
