// A CUDA call's error as a status of this library, with the name of what was being done.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "ullage/status.h"

namespace ullage::cuda {

inline Status failed(const char* what, cudaError_t error) {
  const StatusCode code = error == cudaErrorNoDevice || error == cudaErrorInsufficientDriver
                              ? kCudaUnavailable
                              : kCudaLaunchFailed;
  return {code,
          std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

}  // namespace ullage::cuda

#define ULLAGE_RETURN_IF_CUDA_FAILS(what, call)                                     \
  if (const cudaError_t error = (call); error != cudaSuccess) {                     \
    (void)cudaGetLastError(); /* an error is reported once, by whoever caused it */ \
    return ::ullage::cuda::failed(what, error);                                     \
  }

#define ULLAGE_RETURN_IF_REFUSED(call) \
  if (Status status = (call); !status.ok()) return status
