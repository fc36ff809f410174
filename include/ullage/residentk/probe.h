// residentk.probe: could a resident session run here? Two facts, one of the build and one of the
// host, joined to residentk.contract's arithmetic.
#pragma once

#include <cstdint>

#include "ullage/export.h"
#include "ullage/status.h"

namespace ullage::residentk {

struct ResidentProbe {
  bool kernels_compiled = false;
  bool device_present = false;  // asked only of a build that has kernels
  bool session_possible = false;
  int64_t dispatch_budget = 0;     // per decoded token
  int64_t resident_f32_elems = 0;  // at kResidentDefaultContext positions
  StatusCode status = kResidentOk;
};

// Was this library built with ULLAGE_ENABLE_CUDA? The same on every host it is copied to.
ULLAGE_API bool resident_gpu_kernels_compiled();

// Kernels compiled in, and a CUDA device present whose driver answers.
ULLAGE_API bool resident_available();

// The full answer for one model. A refused shape (601, 602, 603) is reported before either device
// question is asked, with every other field false or 0; an accepted one has its costs reported
// whatever the host: 604 without kernels, 605 without a device, else 600.
ULLAGE_API ResidentProbe resident_session_probe(int64_t d_model, int64_t h_q, int64_t h_kv,
                                                int64_t d_head, int64_t d_ff, int64_t n_layers,
                                                int64_t vocab);

}  // namespace ullage::residentk
