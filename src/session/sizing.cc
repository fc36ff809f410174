#include "session/sizing.h"

#include <algorithm>
#include <map>

#include "ullage/residentk/contract.h"

namespace ullage::session {
namespace {

int64_t row_bytes(model::ElementType type, int64_t elements) {
  const int64_t block = model::block_elements(type);
  return (elements + block - 1) / block * model::block_bytes(type);
}

std::string refusal(StatusCode code, const model::Config& c) {
  if (code == kResidentHeadGeometry) {
    return "h_q = " + std::to_string(c.h_q) + ", h_kv = " + std::to_string(c.h_kv) +
           ", d_head = " + std::to_string(c.d_head) +
           ": the session kernels need whole groups and a power-of-two d_head";
  }
  return "d_model = " + std::to_string(c.d_model) +
         ", h_q * d_head = " + std::to_string(c.h_q * c.d_head) +
         ", d_ff = " + std::to_string(c.d_ff) + ": the longest must be staged as f32 in " +
         std::to_string(residentk::shared_memory_tier_bytes()) + " bytes of shared memory";
}

}  // namespace

WeightSizes weight_sizes(const model::Checkpoint& checkpoint) {
  WeightSizes sizes;
  std::map<model::ElementType, int64_t> bytes_by_type;
  const auto add = [&](const model::Weight& weight) {
    sizes.resident_bytes += weight.bytes();
    bytes_by_type[weight.type] += weight.bytes();
  };
  for (const model::LayerWeights& w : checkpoint.layers()) {
    for (const model::Weight* weight :
         {&w.attn_norm, &w.q, &w.k, &w.v, &w.q_bias, &w.k_bias, &w.v_bias, &w.q_norm, &w.k_norm,
          &w.o, &w.ffn_norm, &w.gate, &w.up, &w.down}) {
      if (*weight) add(*weight);
    }
  }
  add(checkpoint.final_norm());
  add(checkpoint.head());
  sizes.token_read_bytes = sizes.resident_bytes;
  if (!checkpoint.config().tied_head) {
    add(checkpoint.embedding());
    sizes.token_read_bytes += checkpoint.embedding().row_bytes;
  }
  const auto most =
      std::max_element(bytes_by_type.begin(), bytes_by_type.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  sizes.type = std::string(model::name_of(most->first));
  if (bytes_by_type.size() > 1) sizes.type += " and others";
  sizes.stored_elements = checkpoint.stored_elements();
  sizes.stored_bytes = checkpoint.stored_bytes();
  return sizes;
}

WeightSizes weight_sizes(const model::Config& config, model::ElementType type) {
  WeightSizes sizes;
  sizes.type = std::string(model::name_of(type));
  sizes.stored_elements = config.n_parameters();
  sizes.stored_bytes = row_bytes(type, sizes.stored_elements);
  sizes.resident_bytes = sizes.stored_bytes;
  sizes.token_read_bytes = sizes.stored_bytes;
  if (!config.tied_head) {
    sizes.token_read_bytes -= (config.vocab - 1) * row_bytes(type, config.d_model);
  }
  return sizes;
}

Result<Sizing> size_session(const model::Config& config, const WeightSizes& weights,
                            const SizingRequest& request) {
  const residentk::ContextBucket bucket = residentk::residentk_context_bucket(request.context);
  if (bucket.status != kResidentOk) {
    return Status(bucket.status, "context is " + std::to_string(request.context) +
                                     "; a session holds 1 to " +
                                     std::to_string(residentk::kResidentMaxContext) + " positions");
  }
  Sizing sizing;
  sizing.bucket = bucket.bucket;
  if (__builtin_mul_overflow(2 * config.n_layers, config.h_kv, &sizing.kv_position_bytes) ||
      __builtin_mul_overflow(sizing.kv_position_bytes, row_bytes(request.kv_type, config.d_head),
                             &sizing.kv_position_bytes) ||
      __builtin_mul_overflow(sizing.kv_position_bytes, sizing.bucket, &sizing.kv_bytes) ||
      __builtin_add_overflow(sizing.kv_bytes, weights.resident_bytes, &sizing.resident_bytes)) {
    return Status(kResidentDimensionTooLarge, "the session's bytes do not fit 63 bits");
  }
  sizing.bucket_waste_bytes = bucket.wasted_positions * sizing.kv_position_bytes;
  sizing.token_read_bytes = weights.token_read_bytes + request.context * sizing.kv_position_bytes;
  if (request.memory_bytes > 0) {
    sizing.fits = sizing.resident_bytes <= request.memory_bytes;
    const int64_t left = std::max<int64_t>(0, request.memory_bytes - weights.resident_bytes);
    sizing.memory_context = left / std::max<int64_t>(1, sizing.kv_position_bytes);
    sizing.largest_context = std::min(sizing.memory_context, residentk::kResidentMaxContext);
  }
  const StatusCode code = residentk::residentk_dims_check(config.d_model, config.h_q, config.h_kv,
                                                          config.d_head, config.d_ff);
  if (code == kResidentOk) {
    sizing.dispatches = residentk::residentk_dispatch_budget(config.n_layers);
    sizing.dispatches_deep = residentk::residentk_dispatch_budget_deep(config.n_layers);
  } else {
    sizing.session = Status(code, refusal(code, config));
  }
  return sizing;
}

}  // namespace ullage::session
