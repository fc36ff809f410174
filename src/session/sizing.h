// What a resident session of a model costs, from its shape and its stored types alone. Pure
// arithmetic: no device, no allocation of what is sized.
#pragma once

#include <cstdint>
#include <string>

#include "model/checkpoint.h"
#include "model/config.h"
#include "model/weight.h"
#include "ullage/status.h"

namespace ullage::session {

// Bytes of a model's weights, and what one decoded token reads of them.
struct WeightSizes {
  std::string type;              // "bf16", or "q4_1 and others" where a file mixes types
  int64_t resident_bytes = 0;    // every tensor the forward reads, a tied table once
  int64_t token_read_bytes = 0;  // resident, less all but one row of an untied embedding
  int64_t stored_elements = 0;   // on disk, which may hold a tied head twice
  int64_t stored_bytes = 0;
};

WeightSizes weight_sizes(const model::Checkpoint& checkpoint);

// As if every weight were stored as `type`, with the elements of Config::n_parameters.
WeightSizes weight_sizes(const model::Config& config, model::ElementType type);

struct SizingRequest {
  int64_t context = 512;  // positions
  model::ElementType kv_type = model::ElementType::kBF16;
  int64_t memory_bytes = 0;  // of the device; 0: not known, then nothing is said of the fit
};

struct Sizing {
  int64_t kv_position_bytes = 0;  // keys and values of one position, all layers
  int64_t kv_bytes = 0;           // at `bucket` positions: what a session opens with
  int64_t bucket = 0;             // the power of two that the context is rounded up to
  int64_t bucket_waste_bytes = 0;
  int64_t resident_bytes = 0;    // weights + kv_bytes
  bool fits = false;             // resident_bytes <= memory_bytes
  int64_t memory_context = 0;    // positions whose KV the memory holds beside the weights
  int64_t largest_context = 0;   // the same, within the contract's ceiling of 65536
  int64_t dispatches = 0;        // a decoded token; 0 where the session's shape check refuses
  int64_t dispatches_deep = 0;   // with attention split over the keys
  int64_t token_read_bytes = 0;  // weights once, and the KV of `context` positions
  // 600, or why this library's own session kernels refuse the shape (601-603); the bytes above hold
  // all the same.
  Status session = kResidentOk;
};

// Errors: 601 for a context below 1, 602 above 65536 or where a byte count overflows.
Result<Sizing> size_session(const model::Config& config, const WeightSizes& weights,
                            const SizingRequest& request);

}  // namespace ullage::session
