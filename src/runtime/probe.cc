#include "ullage/residentk/probe.h"

#include "contract/session_shape.h"
#include "runtime/device_presence.h"

namespace ullage::residentk {

bool resident_gpu_kernels_compiled() {
#ifdef ULLAGE_ENABLE_CUDA
  return true;
#else
  return false;
#endif
}

bool resident_available() {
  return resident_gpu_kernels_compiled() && runtime::cuda_device_count() > 0;
}

ResidentProbe resident_session_probe(int64_t d_model, int64_t h_q, int64_t h_kv, int64_t d_head,
                                     int64_t d_ff, int64_t n_layers, int64_t vocab) {
  const auto ask_host = [] {
    return HostFacts{.kernels_compiled = resident_gpu_kernels_compiled(),
                     .device_present = resident_available()};
  };
  return session_probe(d_model, h_q, h_kv, d_head, d_ff, n_layers, vocab, ask_host);
}

}  // namespace ullage::residentk
