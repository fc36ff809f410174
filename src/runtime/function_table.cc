#include "runtime/function_table.h"

#include <string>

#include "runtime/function_binding.h"
#include "ullage/lossk/contract.h"
#include "ullage/lossk/cross_entropy.h"
#include "ullage/residentk/contract.h"
#include "ullage/residentk/probe.h"

namespace ullage::runtime {
namespace {

// Parameters that mean the same wherever they appear.
constexpr Parameter kNTok{"n_tok", "tokens in the batch"};
constexpr Parameter kDModel{"d_model", "width of a hidden state"};
constexpr Parameter kVocab{"vocab", "vocabulary size"};
constexpr Parameter kChunk{"chunk", "tokens whose logits exist at once"};
constexpr Parameter kHidden{"hidden", "hidden states [n_tok][d_model]"};
constexpr Parameter kWeight{"weight", "output projection [vocab][d_model]"};
constexpr Parameter kTargets{"targets", "correct class of each token [n_tok]"};
constexpr Parameter kCode{"code", "a status code"};
constexpr Parameter kHQ{"h_q", "query heads"};
constexpr Parameter kHKv{"h_kv", "key/value heads"};
constexpr Parameter kDHead{"d_head", "width of a head"};
constexpr Parameter kDFf{"d_ff", "width of the feed-forward layer"};
constexpr Parameter kNLayers{"n_layers", "decoder layers"};
constexpr Parameter kMaxCtx{"max_ctx", "positions the session holds"};
constexpr Parameter kNKeys{"n_keys", "keys attended to"};
constexpr Parameter kNCores{"n_cores", "cores of the device; below 1 where they cannot be probed"};

Module lossk_contract() {
  using namespace lossk;
  return {
      "lossk.contract",
      "Budgets and checks that a loss passes before any work. Status codes 580-588.",
      {
          bind<loss_status_name>("loss_status_name", "Names a lossk status code.",
                                 "the name, or \"unknown_status\"", kCode),
          bind<loss_dims_check>("loss_dims_check",
                                "Is this a shape of a fused projection that may run: dimensions at "
                                "least 1 and under their ceilings, work under LOSS_MAX_WORK_CELLS?",
                                "580, 581, 583 or 584", kNTok, kDModel, kVocab),
          bind<loss_chunk_check>("loss_chunk_check",
                                 "May the logits of one chunk exist at once, under "
                                 "LOSS_MAX_LOGIT_CELLS? Refused, never clamped.",
                                 "580, 581, 583 or 587", kChunk, kVocab),
          bind<loss_logit_cells>("loss_logit_cells", "Logits that one chunk holds: chunk * vocab.",
                                 "the count, or -1 where either is below 1", kChunk, kVocab),
          bind<loss_work_fits>("loss_work_fits",
                               "Is n_tok * d_model * vocab at most the ceiling? Computed by "
                               "division, so nothing overflows.",
                               "true or false; false where any of the four is below 1", kNTok,
                               kDModel, kVocab, Parameter{"ceiling", "the most cells allowed"}),
          bind<loss_targets_in_range>("loss_targets_in_range",
                                      "Are the first n_tok targets all in [0, vocab)? A negative "
                                      "target is refused, not read as a mask.",
                                      "true or false; false where there are fewer than n_tok",
                                      kTargets, kNTok, kVocab),
          bind<loss_scalars_ok>("loss_scalars_ok", "Is the value finite?", "true or false",
                                Parameter{"value", "the value"}),
          bind<loss_tol_for>(
              "loss_tol_for",
              "The most by which two spellings of one loss may differ: max(1, |magnitude|) * "
              "(LOSS_TRANSCENDENTAL_FLOOR + reduction_width * 2^-52).",
              "the tolerance; 0 where magnitude is not finite or reduction_width is below 1",
              Parameter{"magnitude", "about how large the loss is"},
              Parameter{"reduction_width", "how many summands stand behind it"}),
      }};
}

Module lossk_cross_entropy() {
  using namespace lossk;
  constexpr std::string_view kRefusal =
      "; on a refusal numbers are 0 and lists empty, and status says why";
  static const std::string returns_loss = "the losses" + std::string(kRefusal);
  static const std::string returns_gradients = "gradients of mean_loss" + std::string(kRefusal);
  static const std::string returns_cells = "counts of logits" + std::string(kRefusal);
  static const std::string returns_delta =
      "the largest difference over totals and tokens, and both means" + std::string(kRefusal);
  return {
      "lossk.cross_entropy",
      "Mean cross-entropy in float64, from logits or fused with the projection a chunk of tokens "
      "at a "
      "time. Per-token losses are summed in token order, so every chunk size gives the same bits.",
      {
          bind<ce_from_logits_flat>(
              "ce_from_logits_flat", "Cross-entropy of logits that already exist.", returns_loss,
              Parameter{"logits", "logits [n_tok][vocab]"}, kTargets, kNTok, kVocab),
          bind<fused_linear_ce_flat>(
              "fused_linear_ce_flat",
              "Projects and reduces one chunk at a time; the full logits never exist.",
              returns_loss, kHidden, kWeight, kTargets, kNTok, kDModel, kVocab, kChunk),
          bind<fused_linear_ce_bwd_flat>(
              "fused_linear_ce_bwd_flat", "Gradients of the fused loss for hidden and weight.",
              returns_gradients, kHidden, kWeight, kTargets, kNTok, kDModel, kVocab),
          bind<ce_peak_logit_cells>("ce_peak_logit_cells",
                                    "Logits a chunked call holds, against all of them at once.",
                                    returns_cells, kNTok, kVocab, kChunk),
          bind<ce_chunk_invariance_flat>(
              "ce_chunk_invariance_flat",
              "The fused loss at chunk = 1 and at chunk = n_tok: how far "
              "apart do they land? max_abs_delta is 0.",
              returns_delta, kHidden, kWeight, kTargets, kNTok, kDModel, kVocab),
      }};
}

Module residentk_contract() {
  using namespace residentk;
  constexpr Parameter kMaxCtxOrDefault{"max_ctx", "positions the session holds",
                                       kResidentDefaultContext};
  return {
      "residentk.contract",
      "What a decode session that keeps weights and KV cache on the device would need. No device "
      "is "
      "asked. Status codes 600-610.",
      {
          bind<residentk_status_name>("residentk_status_name", "Names a residentk status code.",
                                      "the name, or \"resident_code_out_of_range\"", kCode),
          bind<residentk_dims_check>(
              "residentk_dims_check",
              "Can a session hold this shape: dimensions at least 1 and under their ceilings, h_q "
              "a "
              "multiple of h_kv, d_head a power of two, the longest staged vector within shared "
              "memory?",
              "600, 601, 602 or 603", kDModel, kHQ, kHKv, kDHead, kDFf),
          bind<residentk_context_check>("residentk_context_check",
                                        "Do a prompt and its continuation fit a session opened at "
                                        "max_ctx positions, and may it open at that many?",
                                        "600, 601, 602 or 606",
                                        Parameter{"n_prompt", "tokens of the prompt"},
                                        Parameter{"n_new", "tokens to generate"}, kMaxCtx),
          bind<residentk_cache_elements>("residentk_cache_elements",
                                         "Float32 elements of the KV cache: n_layers * 2 * max_ctx "
                                         "* h_kv * d_head.",
                                         "the count; 0 where a dimension is refused", kNLayers,
                                         kHKv, kDHead, kMaxCtx),
          bind<residentk_dispatch_budget>(
              "residentk_dispatch_budget",
              "Device dispatches of one decoded token: n_layers * 6 + 3.",
              "the count; 0 where n_layers is refused", kNLayers),
          bind<residentk_dispatch_budget_deep>(
              "residentk_dispatch_budget_deep",
              "The same where attention is split over the keys: 1 + n_layers * 7 + 2.",
              "the count; 0 where n_layers is refused", kNLayers),
          bind<residentk_weight_elems>("residentk_weight_elems",
                                       "Resident float32 elements: layers, embedding table shared "
                                       "with the head, and KV cache at max_ctx.",
                                       "the count; 0 where the shape is refused", kDModel, kHQ,
                                       kHKv, kDHead, kDFf, kNLayers, kVocab, kMaxCtxOrDefault),
          bind<residentk_scalars_ok>("residentk_scalars_ok", "Are both finite and above 0?",
                                     "true or false", Parameter{"eps", "a norm's epsilon"},
                                     Parameter{"scale", "the attention scale"}),
          bind<residentk_splitk_should_split>("residentk_splitk_should_split",
                                              "Does splitting attention over this many keys pay "
                                              "for its second launch (32 or more)?",
                                              "true or false", kNKeys),
          bind<residentk_splitk_policy>("residentk_splitk_policy",
                                        "How many ways to split: 1 below 32 keys, then linear in "
                                        "log(n_keys) through half the "
                                        "maximum at 128 and the maximum at 1000.",
                                        "splits, from 1 to residentk_splitk_max_n_splits", kNKeys,
                                        kNCores, kHQ),
          bind<residentk_splitk_max_n_splits>(
              "residentk_splitk_max_n_splits",
              "The most splits the policy can return: n_cores * 32 / h_q.",
              "splits, at least 1; 80 where n_cores or h_q is below 1", kNCores, kHQ),
          bind<residentk_prefill_gemm_use_narrow_tile>(
              "residentk_prefill_gemm_use_narrow_tile",
              "Is the narrow tile the faster one for a prefill of this many rows (below 32)?",
              "true or false", Parameter{"m_rows", "rows of the prefill"}),
          bind<residentk_context_bucket>(
              "residentk_context_bucket",
              "The capacity a session opens at: the next power of two, at least "
              "RESIDENT_DEFAULT_CONTEXT, and what it wastes.",
              "the bucket; zeros and 601 or 602 where max_ctx is refused", kMaxCtx),
      }};
}

Module residentk_probe() {
  using namespace residentk;
  return {
      "residentk.probe",
      "Could a session run here?",
      {
          bind<resident_gpu_kernels_compiled>("resident_gpu_kernels_compiled",
                                              "Was this library built with GPU kernels?",
                                              "true or false"),
          bind<resident_available>("resident_available",
                                   "Were GPU kernels compiled in, and does a device answer?",
                                   "true or false"),
          bind<resident_session_probe>(
              "resident_session_probe",
              "Shape, cost and host in one answer. A refused shape is reported before the host is "
              "asked.",
              "the answer, at RESIDENT_DEFAULT_CONTEXT positions; status 600 to 605", kDModel, kHQ,
              kHKv, kDHead, kDFf, kNLayers, kVocab),
      }};
}

}  // namespace

std::string_view name_of(ValueType type) {
  switch (type) {
    case ValueType::kBool:
      return "bool";
    case ValueType::kInt:
      return "int";
    case ValueType::kFloat:
      return "float";
    case ValueType::kString:
      return "string";
    case ValueType::kIntList:
      return "list of int";
    case ValueType::kFloatList:
      return "list of float";
    case ValueType::kObject:
      return "object";
  }
  return "";
}

ValueType type_of(const Field& field) {
  // In the order of Field's alternatives.
  constexpr ValueType kTypes[] = {ValueType::kBool, ValueType::kInt, ValueType::kFloat,
                                  ValueType::kString, ValueType::kFloatList};
  static_assert(std::size(kTypes) == std::variant_size_v<Field>);
  return kTypes[field.index()];
}

ValueType type_of(const ReturnValue& value) {
  const auto* field = std::get_if<Field>(&value);
  return field == nullptr ? ValueType::kObject : type_of(*field);
}

std::span<const Module> modules() {
  static const std::vector<Module> table = {lossk_contract(), lossk_cross_entropy(),
                                            residentk_contract(), residentk_probe()};
  return table;
}

std::span<const Constant> constants() {
  using namespace lossk;
  using namespace residentk;
  static const std::vector<Constant> table = {
      {"lossk.contract", "LOSS_MAX_WORK_CELLS", kLossMaxWorkCells,
       "largest n_tok * d_model * vocab"},
      {"lossk.contract", "LOSS_MAX_LOGIT_CELLS", kLossMaxLogitCells, "largest chunk * vocab"},
      {"lossk.contract", "LOSS_MAX_TOKENS", kLossMaxTokens, "largest n_tok"},
      {"lossk.contract", "LOSS_MAX_MODEL_DIM", kLossMaxModelDim, "largest d_model"},
      {"lossk.contract", "LOSS_MAX_VOCAB", kLossMaxVocab, "largest vocab"},
      {"lossk.contract", "LOSS_TRANSCENDENTAL_FLOOR", kLossTranscendentalFloor,
       "smallest relative tolerance a comparison of losses asks for"},
      {"residentk.contract", "RESIDENT_MAX_CONTEXT", kResidentMaxContext, "largest max_ctx"},
      {"residentk.contract", "RESIDENT_DEFAULT_CONTEXT", kResidentDefaultContext,
       "max_ctx where none is given; the smallest bucket"},
      {"residentk.contract", "RESIDENT_MAX_MODEL_DIM", kResidentMaxModelDim, "largest d_model"},
      {"residentk.contract", "RESIDENT_MAX_HEADS", kResidentMaxHeads, "largest h_q and h_kv"},
      {"residentk.contract", "RESIDENT_MAX_HEAD_DIM", kResidentMaxHeadDim, "largest d_head"},
      {"residentk.contract", "RESIDENT_MAX_FEED_FORWARD_DIM", kResidentMaxFeedForwardDim,
       "largest d_ff"},
      {"residentk.contract", "RESIDENT_MAX_LAYERS", kResidentMaxLayers, "largest n_layers"},
      {"residentk.contract", "RESIDENT_MAX_VOCAB", kResidentMaxVocab, "largest vocab"},
      {"residentk.contract", "RESIDENT_SHARED_MEMORY_TIER_BYTES", shared_memory_tier_bytes(),
       "largest staged vector max(d_model, h_q * d_head, d_ff), in bytes of float32; a build "
       "constant"},
  };
  return table;
}

}  // namespace ullage::runtime
