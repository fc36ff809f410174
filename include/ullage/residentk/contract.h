// residentk.contract: would a resident decode session hold this model, and what would it cost? A
// resident session keeps weights and KV cache on the device for the whole generation. Pure host
// arithmetic: no device, no allocation, and no count, however extreme, overflows a check.
//
// Counts of elements and dispatches are 0 where the shape they are asked about is refused.
#pragma once

#include <cstdint>
#include <string_view>

#include "ullage/export.h"
#include "ullage/status.h"

namespace ullage::residentk {

// RESIDENT_MAX_CONTEXT: the most positions a session may open with. A ceiling for refusal, not a
// size: a session pays for the max_ctx it opens at.
inline constexpr int64_t kResidentMaxContext = 65536;

// RESIDENT_DEFAULT_CONTEXT: the positions of a session that was not told otherwise, and the
// smallest bucket.
inline constexpr int64_t kResidentDefaultContext = 512;

// Ceilings of the single dimensions (602 above them). Every published dense decoder passes; with
// them the element counts below stay under 2^51.
inline constexpr int64_t kResidentMaxModelDim = int64_t{1} << 17;
inline constexpr int64_t kResidentMaxHeads = int64_t{1} << 10;
inline constexpr int64_t kResidentMaxHeadDim = int64_t{1} << 10;
inline constexpr int64_t kResidentMaxFeedForwardDim = int64_t{1} << 20;
inline constexpr int64_t kResidentMaxLayers = int64_t{1} << 10;
inline constexpr int64_t kResidentMaxVocab = int64_t{1} << 20;

// Keys from which splitting attention over the keys pays for its second launch.
inline constexpr int64_t kSplitKMinKeys = 32;

// The split ceiling where it cannot be computed: the value measured on the reference device (40
// cores, 16 query heads).
inline constexpr int64_t kSplitKFallbackMax = 80;

// Rows of a prefill product below which the narrow tile is the faster one.
inline constexpr int64_t kPrefillNarrowTileRows = 32;

// The shared memory one block may use, in bytes: a build constant
// (ULLAGE_SHARED_MEMORY_TIER_BYTES).
ULLAGE_API int64_t shared_memory_tier_bytes();

// The name of a code in 600-610; "resident_code_out_of_range" for any other.
ULLAGE_API std::string_view residentk_status_name(int64_t code);

// A model's shape: width, query heads, key/value heads, head width, feed-forward width. h_q *
// d_head need not equal d_model. 601: a dimension below 1; 602: one above its ceiling; 603: h_q not
// a multiple of h_kv, or d_head not a power of two; 602: the longest vector a block stages,
// max(d_model, h_q * d_head, d_ff) in float32, exceeds shared_memory_tier_bytes().
ULLAGE_API StatusCode residentk_dims_check(int64_t d_model, int64_t h_q, int64_t h_kv,
                                           int64_t d_head, int64_t d_ff);

// Does a prompt of n_prompt tokens and n_new generated ones fit a session opened at max_ctx
// positions? 601: a count below 1; 602: max_ctx above kResidentMaxContext; 606: it does not fit.
ULLAGE_API StatusCode residentk_context_check(int64_t n_prompt, int64_t n_new, int64_t max_ctx);

// Float32 elements of the KV cache: n_layers * 2 * max_ctx * h_kv * d_head.
ULLAGE_API int64_t residentk_cache_elements(int64_t n_layers, int64_t h_kv, int64_t d_head,
                                            int64_t max_ctx);

// Device dispatches of one decoded token: n_layers * 6 + 3.
ULLAGE_API int64_t residentk_dispatch_budget(int64_t n_layers);

// The same where attention is split over the keys, a partial and a merge: 1 + n_layers * 7 + 2.
ULLAGE_API int64_t residentk_dispatch_budget_deep(int64_t n_layers);

// Resident float32 elements: every layer's weights, the embedding table (shared with the head), the
// last norm, and the KV cache at max_ctx. A layer holds q [h_q*d_head][d_model], k and v
// [h_kv*d_head][d_model], o [d_model][h_q*d_head], gate and up [d_ff][d_model], down
// [d_model][d_ff], two norms [d_model], and the q and k norms [d_head].
ULLAGE_API int64_t residentk_weight_elems(int64_t d_model, int64_t h_q, int64_t h_kv,
                                          int64_t d_head, int64_t d_ff, int64_t n_layers,
                                          int64_t vocab, int64_t max_ctx = kResidentDefaultContext);

// A norm's epsilon and the attention scale: 609 unless both are finite and above 0.
ULLAGE_API StatusCode residentk_scalars_check(double eps, double scale);
ULLAGE_API bool residentk_scalars_ok(double eps, double scale);

// n_keys >= kSplitKMinKeys.
ULLAGE_API bool residentk_splitk_should_split(int64_t n_keys);

// How many ways to split attention over n_keys keys, on a device of n_cores cores with h_q query
// heads: 1 below kSplitKMinKeys; then linear in log(n_keys) through half the maximum at 128 keys
// and the maximum at 1000, rounded, within [1, residentk_splitk_max_n_splits(n_cores, h_q)].
ULLAGE_API int64_t residentk_splitk_policy(int64_t n_keys, int64_t n_cores, int64_t h_q);

// The most splits residentk_splitk_policy can return: n_cores * 32 / h_q, at least 1;
// kSplitKFallbackMax where n_cores (it could not be probed) or h_q is below 1.
ULLAGE_API int64_t residentk_splitk_max_n_splits(int64_t n_cores, int64_t h_q);

// m_rows < kPrefillNarrowTileRows.
ULLAGE_API bool residentk_prefill_gemm_use_narrow_tile(int64_t m_rows);

struct ContextBucket {
  int64_t bucket = 0;            // positions the session opens with
  int64_t wasted_positions = 0;  // bucket - max_ctx
  double waste_fraction = 0;     // wasted_positions / bucket
  StatusCode status = kResidentOk;
};

// The capacity a session opens at so that neighbouring requests share its buffers: the next power
// of two, at least kResidentDefaultContext. 601: max_ctx below 1; 602: above kResidentMaxContext.
ULLAGE_API ContextBucket residentk_context_bucket(int64_t max_ctx);

}  // namespace ullage::residentk
