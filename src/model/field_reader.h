// Typed, range-checked reading of named scalars, from config.json and from GGUF metadata alike.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <variant>

#include "ullage/status.h"

namespace ullage::model {

// What stands under a key that holds no scalar, for the error message: "an array of 3".
struct NoScalar {
  std::string description;
};
using Scalar = std::variant<bool, int64_t, double, std::string, NoScalar>;

// The first field that is missing or out of range is kept as a 656; it and all later reads give the
// fallback or 0. A key with a fallback may be absent.
class FieldReader {
 public:
  // `lookup` gives nothing where the key is absent or null.
  using Lookup = std::function<std::optional<Scalar>(std::string_view key)>;
  FieldReader(std::string_view origin, Lookup lookup)
      : origin_(origin), lookup_(std::move(lookup)) {}

  // An integer in [min, max].
  int64_t integer(std::string_view key, int64_t min, int64_t max,
                  std::optional<int64_t> fallback = {});
  // A finite number in (0, inf); an integer will do.
  double positive(std::string_view key, std::optional<double> fallback = {});
  bool flag(std::string_view key, bool fallback);
  std::string text(std::string_view key, std::optional<std::string> fallback = {});
  bool has(std::string_view key) const { return lookup_(key).has_value(); }

  // Refuses the field where `ok` is false: "<key> is <what>; <accepted>".
  void require(bool ok, std::string_view key, std::string_view accepted,
               StatusCode code = kModelBadField);

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }

 private:
  void refuse(StatusCode code, std::string_view key, std::string_view accepted);

  std::string origin_;
  Lookup lookup_;
  Status status_ = kModelOk;
};

}  // namespace ullage::model
