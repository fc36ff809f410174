// What the session's arithmetic and the probe share.
#pragma once

#include <cstdint>

#include "ullage/residentk/probe.h"

namespace ullage::residentk {

// residentk_dims_check, and the layers, vocabulary and positions beside it (601, 602).
StatusCode session_shape_check(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                               int64_t d_ff, int64_t n_layers, int64_t vocab, int64_t max_ctx);

struct HostFacts {
  bool kernels_compiled;
  bool device_present;
};

// resident_session_probe on a host that answers `ask_host`, which is called only for an accepted
// shape.
ResidentProbe session_probe(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                            int64_t d_ff, int64_t n_layers, int64_t vocab, HostFacts (*ask_host)());

}  // namespace ullage::residentk
