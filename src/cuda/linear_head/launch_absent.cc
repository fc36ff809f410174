#include "cuda/linear_head/launch.h"

namespace ullage::lossk::cuda {

namespace {
Status absent() {
  return {kCudaUnavailable, "this build has no CUDA kernels; configure with ULLAGE_ENABLE_CUDA=ON"};
}
}  // namespace

Status launch_linear_head(const HeadParams&, const LinearParams&, CUstream_st*) { return absent(); }
Status read_filter(const LinearParams&, std::vector<SkippedMass>&, std::vector<int>&,
                   CUstream_st*) {
  return absent();
}

}  // namespace ullage::lossk::cuda
