#include "cuda/linear_head/launch.h"

namespace ullage::lossk::cuda {

Status launch_linear_head(const HeadParams&, const LinearParams&, CUstream_st*) {
  return {kCudaUnavailable, "this build has no CUDA kernels; configure with ULLAGE_ENABLE_CUDA=ON"};
}

}  // namespace ullage::lossk::cuda
