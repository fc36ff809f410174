// Derives a table entry's argument types, call and result shape from the C++ function itself, so
// that the table cannot disagree with the code.
#pragma once

#include <initializer_list>
#include <type_traits>

#include "runtime/function_table.h"
#include "ullage/lossk/cross_entropy.h"
#include "ullage/residentk/contract.h"
#include "ullage/residentk/probe.h"

namespace ullage::runtime {

// The type in which an argument is stored, by the type of the C++ parameter it feeds.
template <class T>
struct Stored;
template <>
struct Stored<int64_t> {
  using Type = int64_t;
  static constexpr ValueType kType = ValueType::kInt;
};
template <>
struct Stored<double> {
  using Type = double;
  static constexpr ValueType kType = ValueType::kFloat;
};
template <>
struct Stored<std::span<const int64_t>> {
  using Type = std::vector<int64_t>;
  static constexpr ValueType kType = ValueType::kIntList;
};
template <>
struct Stored<std::span<const double>> {
  using Type = std::vector<double>;
  static constexpr ValueType kType = ValueType::kFloatList;
};

// Built in place: g++ 12 warns, wrongly, of an uninitialised vector where a Field is moved under
// sanitizers.
template <class T>
ReturnValue field(T value) {
  return ReturnValue(std::in_place_type<Field>, std::in_place_type<T>, value);
}
inline ReturnValue to_value(bool value) { return field(value); }
inline ReturnValue to_value(int64_t value) { return field(value); }
inline ReturnValue to_value(double value) { return field(value); }
inline ReturnValue to_value(std::string_view value) { return field(value); }
inline ReturnValue to_value(StatusCode code) { return field(int64_t{code}); }

inline ReturnValue to_value(const lossk::CrossEntropy& r) {
  return Object{{"mean_loss", r.mean_loss},
                {"total_loss", r.total_loss},
                {"token_losses", r.token_losses},
                {"status", int64_t{r.status}}};
}
inline ReturnValue to_value(const lossk::FusedCrossEntropy& r) {
  return Object{{"mean_loss", r.mean_loss},       {"total_loss", r.total_loss},
                {"token_losses", r.token_losses}, {"peak_logit_cells", r.peak_logit_cells},
                {"n_chunks", r.n_chunks},         {"status", int64_t{r.status}}};
}
inline ReturnValue to_value(const lossk::FusedCrossEntropyGradients& r) {
  return Object{{"d_hidden", r.d_hidden},
                {"d_weight", r.d_weight},
                {"mean_loss", r.mean_loss},
                {"status", int64_t{r.status}}};
}
inline ReturnValue to_value(const lossk::PeakLogitCells& r) {
  return Object{{"chunked_cells", r.chunked_cells},
                {"materialized_cells", r.materialized_cells},
                {"ratio", r.ratio},
                {"n_chunks", r.n_chunks},
                {"status", int64_t{r.status}}};
}
inline ReturnValue to_value(const lossk::ChunkInvariance& r) {
  return Object{{"max_abs_delta", r.max_abs_delta},
                {"mean_loss_chunk_one", r.mean_loss_chunk_one},
                {"mean_loss_chunk_all", r.mean_loss_chunk_all},
                {"status", int64_t{r.status}}};
}
inline ReturnValue to_value(const residentk::ContextBucket& r) {
  return Object{{"bucket", r.bucket},
                {"wasted_positions", r.wasted_positions},
                {"waste_fraction", r.waste_fraction},
                {"status", int64_t{r.status}}};
}
inline ReturnValue to_value(const residentk::ResidentProbe& r) {
  return Object{
      {"kernels_compiled", r.kernels_compiled},     {"device_present", r.device_present},
      {"session_possible", r.session_possible},     {"dispatch_budget", r.dispatch_budget},
      {"resident_f32_elems", r.resident_f32_elems}, {"status", int64_t{r.status}}};
}

template <auto kFunction>
struct Binding;

template <class R, class... A, R (*kFunction)(A...)>
struct Binding<kFunction> {
  static constexpr size_t kArity = sizeof...(A);

  static ReturnValue call(std::span<const Argument> arguments) {
    return call_with(arguments, std::index_sequence_for<A...>());
  }
  static ReturnValue sample() { return to_value(R{}); }

  static void set_types(std::vector<Parameter>& parameters) {
    size_t i = 0;
    ((parameters[i++].type = Stored<A>::kType), ...);
  }

 private:
  template <size_t... kIndex>
  static ReturnValue call_with([[maybe_unused]] std::span<const Argument> arguments,
                               std::index_sequence<kIndex...>) {
    return to_value(kFunction(std::get<typename Stored<A>::Type>(arguments[kIndex])...));
  }
};

template <auto kFunction, class... Parameters>
Function bind(std::string_view name, std::string_view doc, std::string_view returns,
              Parameters... parameters) {
  using Bound = Binding<kFunction>;
  static_assert(sizeof...(Parameters) == Bound::kArity, "one Parameter per argument");
  Function function{name, doc, {parameters...}, returns, &Bound::call, &Bound::sample};
  Bound::set_types(function.parameters);
  return function;
}

}  // namespace ullage::runtime
