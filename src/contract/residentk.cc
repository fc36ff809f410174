#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "contract/session_shape.h"
#include "ullage/residentk/contract.h"

namespace ullage::residentk {
namespace {

// 601 below 1, 602 above the ceiling.
StatusCode dimension_check(int64_t value, int64_t ceiling) {
  if (value < 1) return kResidentEmptyDimension;
  if (value > ceiling) return kResidentDimensionTooLarge;
  return kResidentOk;
}

struct Dimension {
  int64_t value;
  int64_t ceiling;
};

// Every dimension is asked whether it is empty before any is asked whether it is too large.
template <size_t kCount>
StatusCode dimensions_check(const Dimension (&dimensions)[kCount]) {
  StatusCode status = kResidentOk;
  for (const Dimension& dimension : dimensions) {
    const StatusCode one = dimension_check(dimension.value, dimension.ceiling);
    if (one == kResidentEmptyDimension) return one;
    if (one != kResidentOk) status = one;
  }
  return status;
}

}  // namespace

int64_t shared_memory_tier_bytes() { return ULLAGE_SHARED_MEMORY_TIER_BYTES; }

std::string_view residentk_status_name(int64_t code) {
  if (code < kResidentOk || code > kResidentCodeOutOfRange) code = kResidentCodeOutOfRange;
  return status_name(static_cast<int>(code));
}

StatusCode residentk_dims_check(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                                int64_t d_ff) {
  const StatusCode status = dimensions_check({{d_model, kResidentMaxModelDim},
                                              {h_q, kResidentMaxHeads},
                                              {h_kv, kResidentMaxHeads},
                                              {d_head, kResidentMaxHeadDim},
                                              {d_ff, kResidentMaxFeedForwardDim}});
  if (status != kResidentOk) return status;
  if (h_q % h_kv != 0 || !std::has_single_bit(static_cast<uint64_t>(d_head))) {
    return kResidentHeadGeometry;
  }
  const int64_t staged_bytes =
      std::max({d_model, h_q * d_head, d_ff}) * static_cast<int64_t>(sizeof(float));
  return staged_bytes > shared_memory_tier_bytes() ? kResidentDimensionTooLarge : kResidentOk;
}

StatusCode residentk_context_check(int64_t n_prompt, int64_t n_new, int64_t max_ctx) {
  if (n_prompt < 1 || n_new < 1 || max_ctx < 1) return kResidentEmptyDimension;
  if (max_ctx > kResidentMaxContext) return kResidentDimensionTooLarge;
  if (n_prompt > max_ctx - n_new) return kResidentContextFull;
  return kResidentOk;
}

int64_t residentk_cache_elements(int64_t n_layers, int64_t h_kv, int64_t d_head, int64_t max_ctx) {
  const StatusCode status = dimensions_check({{n_layers, kResidentMaxLayers},
                                              {h_kv, kResidentMaxHeads},
                                              {d_head, kResidentMaxHeadDim},
                                              {max_ctx, kResidentMaxContext}});
  return status == kResidentOk ? n_layers * 2 * max_ctx * h_kv * d_head : 0;
}

int64_t residentk_dispatch_budget(int64_t n_layers) {
  return dimension_check(n_layers, kResidentMaxLayers) == kResidentOk ? n_layers * 6 + 3 : 0;
}

int64_t residentk_dispatch_budget_deep(int64_t n_layers) {
  return dimension_check(n_layers, kResidentMaxLayers) == kResidentOk ? 1 + n_layers * 7 + 2 : 0;
}

StatusCode session_shape_check(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                               int64_t d_ff, int64_t n_layers, int64_t vocab, int64_t max_ctx) {
  const StatusCode status = residentk_dims_check(d_model, h_q, h_kv, d_head, d_ff);
  if (status != kResidentOk) return status;
  return dimensions_check(
      {{n_layers, kResidentMaxLayers}, {vocab, kResidentMaxVocab}, {max_ctx, kResidentMaxContext}});
}

int64_t residentk_weight_elems(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                               int64_t d_ff, int64_t n_layers, int64_t vocab, int64_t max_ctx) {
  if (session_shape_check(d_model, h_q, h_kv, d_head, d_ff, n_layers, vocab, max_ctx) !=
      kResidentOk) {
    return 0;
  }
  const int64_t q_and_o = 2 * d_model * h_q * d_head;
  const int64_t k_and_v = 2 * d_model * h_kv * d_head;
  const int64_t gate_up_down = 3 * d_model * d_ff;
  const int64_t norms = 2 * d_model + 2 * d_head;
  return n_layers * (q_and_o + k_and_v + gate_up_down + norms) + vocab * d_model + d_model +
         residentk_cache_elements(n_layers, h_kv, d_head, max_ctx);
}

StatusCode residentk_scalars_check(double eps, double scale) {
  const bool ok = std::isfinite(eps) && std::isfinite(scale) && eps > 0 && scale > 0;
  return ok ? kResidentOk : kResidentNonFiniteScalar;
}

bool residentk_scalars_ok(double eps, double scale) {
  return residentk_scalars_check(eps, scale) == kResidentOk;
}

bool residentk_splitk_should_split(int64_t n_keys) { return n_keys >= kSplitKMinKeys; }

int64_t residentk_splitk_max_n_splits(int64_t n_cores, int64_t h_q) {
  if (n_cores < 1 || h_q < 1) return kSplitKFallbackMax;
  const __int128 splits = static_cast<__int128>(n_cores) * 32 / h_q;  // exact for any pair
  return static_cast<int64_t>(std::clamp<__int128>(splits, 1, std::numeric_limits<int64_t>::max()));
}

int64_t residentk_splitk_policy(int64_t n_keys, int64_t n_cores, int64_t h_q) {
  if (!residentk_splitk_should_split(n_keys)) return 1;
  const int64_t max_splits = residentk_splitk_max_n_splits(n_cores, h_q);
  const double half = 0.5 * static_cast<double>(max_splits);
  const double low = std::log(128.0);
  const double depth = (std::log(static_cast<double>(n_keys)) - low) / (std::log(1000.0) - low);
  const double splits = std::round(half + half * depth);
  if (splits >= static_cast<double>(max_splits)) return max_splits;
  return std::max<int64_t>(1, static_cast<int64_t>(splits));
}

bool residentk_prefill_gemm_use_narrow_tile(int64_t m_rows) {
  return m_rows < kPrefillNarrowTileRows;
}

ContextBucket residentk_context_bucket(int64_t max_ctx) {
  ContextBucket out;
  out.status = dimension_check(max_ctx, kResidentMaxContext);
  if (out.status != kResidentOk) return out;
  const uint64_t next = std::bit_ceil(static_cast<uint64_t>(max_ctx));
  out.bucket = std::max(static_cast<int64_t>(next), kResidentDefaultContext);
  out.wasted_positions = out.bucket - max_ctx;
  out.waste_fraction = static_cast<double>(out.wasted_positions) / static_cast<double>(out.bucket);
  return out;
}

ResidentProbe session_probe(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                            int64_t d_ff, int64_t n_layers, int64_t vocab,
                            HostFacts (*ask_host)()) {
  ResidentProbe out;
  out.status = session_shape_check(d_model, h_q, h_kv, d_head, d_ff, n_layers, vocab,
                                   kResidentDefaultContext);
  if (out.status != kResidentOk) return out;
  out.dispatch_budget = residentk_dispatch_budget(n_layers);
  out.resident_f32_elems =
      residentk_weight_elems(d_model, h_q, h_kv, d_head, d_ff, n_layers, vocab);
  const HostFacts host = ask_host();
  out.kernels_compiled = host.kernels_compiled;
  out.device_present = host.device_present;
  out.session_possible = host.kernels_compiled && host.device_present;
  if (!host.kernels_compiled) {
    out.status = kResidentToolchainAbsent;
  } else if (!host.device_present) {
    out.status = kResidentNoAccelerator;
  }
  return out;
}

}  // namespace ullage::residentk
