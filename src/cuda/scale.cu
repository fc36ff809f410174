#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "cuda/cuda_status.h"
#include "cuda/scale.h"

namespace ullage::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocks = 1024;  // some for each multiprocessor of any device there is

template <class T>
__device__ T times(T value, double factor) {
  if constexpr (std::is_same_v<T, double>) {
    return value * factor;
  } else {
    return static_cast<T>(static_cast<float>(value) * static_cast<float>(factor));
  }
}

// n_packed: packs of 16 bytes at `data`; the rest of the n values follows them.
template <class T>
__global__ void scale_values(T* data, int64_t n, int64_t n_packed, const double* factor) {
  constexpr int kPack = 16 / sizeof(T);
  const double by = *factor;
  if (by == 1) return;
  const int64_t thread = blockIdx.x * int64_t{kThreads} + threadIdx.x;
  const int64_t n_threads = gridDim.x * int64_t{kThreads};
  for (int64_t i = thread; i < n_packed; i += n_threads) {
    alignas(16) T pack[kPack];
    *reinterpret_cast<uint4*>(pack) = reinterpret_cast<const uint4*>(data)[i];
#pragma unroll
    for (T& value : pack) value = times(value, by);
    reinterpret_cast<uint4*>(data)[i] = *reinterpret_cast<const uint4*>(pack);
  }
  for (int64_t i = n_packed * kPack + thread; i < n; i += n_threads) data[i] = times(data[i], by);
}

template <class T>
Status launch(void* data, int64_t n, const double* factor, cudaStream_t stream) {
  constexpr int64_t kPack = 16 / sizeof(T);
  const int64_t n_packed = reinterpret_cast<uintptr_t>(data) % 16 == 0 ? n / kPack : 0;
  const int64_t items = std::max(n_packed, n - n_packed * kPack);
  const auto blocks = static_cast<unsigned>(std::min(kBlocks, (items + kThreads - 1) / kThreads));
  scale_values<<<blocks, kThreads, 0, stream>>>(static_cast<T*>(data), n, n_packed, factor);
  ULLAGE_RETURN_IF_CUDA_FAILS("scale", cudaGetLastError());
  return kCudaOk;
}

}  // namespace

Status scale(void* data, int64_t n, DType dtype, const double* factor, CUstream_st* stream) {
  if (n <= 0) return kCudaOk;
  switch (dtype) {
    case DType::kF64:
      return launch<double>(data, n, factor, stream);
    case DType::kF32:
      return launch<float>(data, n, factor, stream);
    case DType::kBF16:
      return launch<__nv_bfloat16>(data, n, factor, stream);
    case DType::kF16:
      return launch<__half>(data, n, factor, stream);
  }
  return kCudaOk;
}

}  // namespace ullage::cuda
