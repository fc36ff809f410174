#include "cuda/scale.h"

namespace ullage::cuda {

Status scale(void*, int64_t, DType, const double*, CUstream_st*) {
  return {kCudaUnavailable, "this build has no CUDA kernels; configure with ULLAGE_ENABLE_CUDA=ON"};
}

}  // namespace ullage::cuda
