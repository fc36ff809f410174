#include "cuda/device.h"

#ifdef ULLAGE_ENABLE_CUDA

#include <cuda_runtime_api.h>

#include <string>

namespace ullage::cuda {

Result<lossk::CudaDevice> current_device() {
  int index = 0;
  cudaDeviceProp properties;
  cudaError_t error = cudaGetDevice(&index);
  if (error == cudaSuccess) error = cudaGetDeviceProperties(&properties, index);
  if (error != cudaSuccess) {
    return {kCudaUnavailable, std::string("cudaGetDevice: ") + cudaGetErrorString(error)};
  }
  lossk::CudaDevice device;
  device.name = properties.name;
  device.compute_capability = 10 * properties.major + properties.minor;
  device.n_multiprocessors = properties.multiProcessorCount;
  device.shared_per_block_bytes = static_cast<int64_t>(properties.sharedMemPerBlockOptin);
  device.shared_per_multiprocessor_bytes =
      static_cast<int64_t>(properties.sharedMemPerMultiprocessor);
  if (properties.major < 9) device.max_cluster_blocks = 1;
  return device;
}

}  // namespace ullage::cuda

#else

namespace ullage::cuda {

Result<lossk::CudaDevice> current_device() {
  return {kCudaUnavailable, "this build has no CUDA kernels"};
}

}  // namespace ullage::cuda

#endif
