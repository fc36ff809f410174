// The status ledger: every refusal this library can give, as a number, a name and one line of
// meaning.
//
// Families own disjoint ranges and a code of one family never means another's:
//   580-599 lossk      600-619 residentk    620-639 CUDA
//   640-659 model files    660-679 vocab-parallel groups    680-699 loss configuration (head)
// The first code of each range is that family's "ok". Codes 580-588 and 600-610 are the published
// contract.
#pragma once

#include <cassert>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "ullage/export.h"

namespace ullage {

// X(code, symbol, name, meaning). The one place where codes are written.
#define ULLAGE_STATUS_LEDGER(X)                                                                    \
  X(580, kLossOk, "ok", "shape and target checks passed, or the computation ran")                  \
  X(581, kLossEmptyDimension, "empty_dimension", "a required dimension was < 1")                   \
  X(582, kLossLengthMismatch, "length_mismatch", "an argument is shorter than its shape")          \
  X(583, kLossDimensionTooLarge, "dimension_too_large", "a dimension exceeds its ceiling")         \
  X(584, kLossWorkBudgetExceeded, "work_budget_exceeded",                                          \
    "n_tok * d_model * vocab exceeds LOSS_MAX_WORK_CELLS")                                         \
  X(585, kLossNonFiniteScalar, "non_finite_scalar", "a scalar was NaN or infinite")                \
  X(586, kLossTargetOutOfRange, "target_id_out_of_range",                                          \
    "a target class id was negative or >= vocab")                                                  \
  X(587, kLossBadChunk, "chunk_exceeds_logit_budget", "the logits of one chunk exceed the budget") \
  X(588, kLossUnknownObjective, "unknown_objective", "an objective this library does not know")    \
  X(600, kResidentOk, "resident_ok", "the session can hold the shape, or the step ran")            \
  X(601, kResidentEmptyDimension, "resident_empty_dimension", "a declared dimension was < 1")      \
  X(602, kResidentDimensionTooLarge, "resident_dimension_too_large",                               \
    "a dimension exceeds its ceiling")                                                             \
  X(603, kResidentHeadGeometry, "resident_head_geometry_unsupported",                              \
    "h_q is not a multiple of h_kv, or d_head is not a power of two")                              \
  X(604, kResidentToolchainAbsent, "resident_shader_toolchain_absent",                             \
    "this binary was built without GPU kernels")                                                   \
  X(605, kResidentNoAccelerator, "resident_no_accelerator_present",                                \
    "GPU kernels are compiled in, but this host has no usable accelerator")                        \
  X(606, kResidentContextFull, "resident_kv_context_full",                                         \
    "the run needs more KV positions than the session's max_ctx")                                  \
  X(607, kResidentWeightLength, "resident_weight_length_mismatch",                                 \
    "a weight does not match its declared shape")                                                  \
  X(608, kResidentLaunchFailed, "resident_launch_failed", "a device call failed")                  \
  X(609, kResidentNonFiniteScalar, "resident_non_finite_scalar",                                   \
    "eps or the attention scale was not finite and positive")                                      \
  X(610, kResidentCodeOutOfRange, "resident_code_out_of_range", "not a residentk status code")     \
  X(620, kCudaOk, "cuda_ok", "the device call succeeded")                                          \
  X(621, kCudaUnavailable, "cuda_unavailable",                                                     \
    "no CUDA kernels in this build, or no CUDA device on this host")                               \
  X(622, kCudaUnsupportedDevice, "cuda_unsupported_device",                                        \
    "the device lacks the compute capability a kernel needs")                                      \
  X(623, kCudaLaunchFailed, "cuda_launch_failed", "a CUDA call returned an error")                 \
  X(624, kCudaOutOfMemory, "cuda_out_of_memory", "the device cannot hold the planned bytes")       \
  X(625, kCudaNonFinite, "cuda_non_finite", "a kernel met a NaN or +inf logit")                    \
  X(640, kModelOk, "model_ok", "the file was read")                                                \
  X(641, kModelUnreadable, "model_unreadable", "a file is missing, not regular, or unreadable")    \
  X(642, kModelTruncated, "model_truncated", "the file ends inside a field")                       \
  X(643, kModelBadMagic, "model_bad_magic", "the file is not of the format its name promises")     \
  X(644, kModelVersion, "model_version_unsupported", "a format version outside the supported set") \
  X(645, kModelCountExceedsFile, "model_count_exceeds_file",                                       \
    "a declared count or length needs more bytes than the file has left")                          \
  X(646, kModelProductOverflow, "model_product_overflow", "a shape's element count overflows")     \
  X(647, kModelTooManyDimensions, "model_too_many_dimensions",                                     \
    "a tensor has more dimensions than the format allows")                                         \
  X(648, kModelBadName, "model_bad_name", "a key or tensor name is empty, too long or not UTF-8")  \
  X(649, kModelDuplicate, "model_duplicate", "a key or tensor name appears twice")                 \
  X(650, kModelBadValue, "model_bad_value", "a metadata value has an unknown type or bad bytes")   \
  X(651, kModelTypeUnsupported, "model_type_unsupported", "a tensor's element type is not read")   \
  X(652, kModelBlockMisaligned, "model_block_misaligned",                                          \
    "a quantised row is not a whole number of blocks")                                             \
  X(653, kModelLayout, "model_layout_mismatch",                                                    \
    "offsets overlap, leave holes, or disagree with the shapes")                                   \
  X(654, kModelBadAlignment, "model_bad_alignment",                                                \
    "an alignment that is not a usable power of two")                                              \
  X(655, kModelBadJson, "model_bad_json", "a JSON document is malformed")                          \
  X(656, kModelBadField, "model_bad_field", "a configuration field is missing or out of range")    \
  X(657, kModelTensorMissing, "model_tensor_missing",                                              \
    "a tensor the model needs is absent or has another shape")                                     \
  X(658, kModelArchitecture, "model_architecture_unsupported", "a model family that is not read")  \
  X(659, kModelTokenizer, "model_tokenizer_unsupported", "a tokenizer that is absent or not read") \
  X(660, kGroupOk, "group_ok", "a shard of a vocab-parallel head ran")                             \
  X(661, kGroupUnsupported, "group_unsupported",                                                   \
    "a loss, input or output that a shard of the vocabulary cannot serve")                         \
  X(662, kGroupBadRange, "group_bad_range", "a shard's columns are not within its group's")        \
  X(663, kGroupStatistics, "group_statistics_missing",                                             \
    "the group's row statistics are not given, or given where there is no group")                  \
  X(664, kGroupDisagrees, "group_disagrees", "the ranks of a group do not hold one problem")       \
  X(680, kHeadOk, "head_ok", "the loss configuration is valid, or the losses were computed")       \
  X(681, kHeadUnknownKind, "head_unknown_kind", "a loss kind, divergence or option not known")     \
  X(682, kHeadDuplicateName, "head_duplicate_name", "two terms have the same name")                \
  X(683, kHeadMissingInput, "head_missing_input", "a term needs an input that was not given")      \
  X(684, kHeadBadWeight, "head_bad_weight", "a weight is not finite")                              \
  X(685, kHeadBadTemperature, "head_bad_temperature", "a temperature is not finite and > 0")       \
  X(686, kHeadBadEpsilon, "head_bad_epsilon", "a clip bound is out of range")                      \
  X(687, kHeadBadDivisor, "head_bad_divisor", "a divisor is not finite and > 0")                   \
  X(688, kHeadBadScale, "head_bad_scale", "a logits scale or softcap is not finite and > 0")       \
  X(689, kHeadBadSmoothing, "head_bad_smoothing", "label smoothing is outside [0, 1]")             \
  X(690, kHeadBadDivergence, "head_bad_divergence",                                                \
    "a divergence that the given target cannot define")                                            \
  X(691, kHeadBadBeta, "head_bad_beta", "a beta is outside its range")                             \
  X(692, kHeadBadSegments, "head_bad_segments", "segment ids do not cover the rows")               \
  X(693, kHeadBadPairs, "head_bad_pairs", "preference pairs do not name existing segments")        \
  X(694, kHeadBadTopK, "head_bad_top_k", "a top-k teacher's ids or log-probabilities are invalid") \
  X(695, kHeadShapeMismatch, "head_shape_mismatch", "an input's shape disagrees with the plan")    \
  X(696, kHeadBadDtype, "head_bad_dtype", "a storage type this operation does not take")           \
  X(697, kHeadTeacherVocab, "head_teacher_vocab",                                                  \
    "the teacher has another vocabulary size than the student")                                    \
  X(698, kHeadUnknownKernel, "head_unknown_kernel", "a forced kernel that does not exist here")    \
  X(699, kHeadBadConfig, "head_bad_config", "a loss configuration document is malformed")

enum StatusCode : int {
#define ULLAGE_STATUS_ENUM(code, symbol, name, meaning) symbol = code,
  ULLAGE_STATUS_LEDGER(ULLAGE_STATUS_ENUM)
#undef ULLAGE_STATUS_ENUM
};

// The code's name, or "unknown_status" where no family owns it.
ULLAGE_API std::string_view status_name(int code);

// One line that says what the code means, or "" where no family owns it.
ULLAGE_API std::string_view status_meaning(int code);

// A code, and for a refusal the offending value and what would have been accepted.
class [[nodiscard]] Status {
 public:
  Status(StatusCode code) : code_(code) {}  // NOLINT: a bare code is a status
  Status(StatusCode code, std::string message) : code_(code), message_(std::move(message)) {}

  // Each family's first code is its ok, and every family starts at a multiple of 20.
  bool ok() const { return code_ % 20 == 0; }
  StatusCode code() const { return code_; }
  const std::string& message() const { return message_; }

  // "651 model_type_unsupported: tensor 'x' is F4; read are F32, F16, BF16".
  ULLAGE_API std::string to_string() const;

 private:
  StatusCode code_;
  std::string message_;
};

// A value or the status that says why there is none; never both. (std::expected is C++23.)
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)), status_(kLossOk) {}                // NOLINT
  Result(Status status) : status_(std::move(status)) { assert(!status_.ok()); }  // NOLINT
  Result(StatusCode code, std::string message) : Result(Status(code, std::move(message))) {}

  explicit operator bool() const { return value_.has_value(); }
  bool ok() const { return value_.has_value(); }
  const Status& status() const { return status_; }

  T& operator*() & { return *value_; }
  const T& operator*() const& { return *value_; }
  T&& operator*() && { return *std::move(value_); }
  T* operator->() { return &*value_; }
  const T* operator->() const { return &*value_; }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace ullage
