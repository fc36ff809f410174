// Matrix products by cuBLASLt, loaded at run time: a machine without the library gets a status.
// No CUDA header here, so that plans can name products where there is no toolkit.
#pragma once

#include <cstdint>
#include <span>

#include "ullage/dtype.h"
#include "ullage/status.h"

struct CUstream_st;

namespace ullage::cuda {

// C [m][n] = alpha A B + beta C, row-major, A [m][k] or stored transposed [k][m], B likewise.
// 16-bit operands of one type give that type or f32; f32 gives f32. Sums are in float32: f32
// products are pedantic, without TF32. Strides count elements. Base pointers lie at multiples of 16
// bytes.
struct ProductShape {
  int64_t m = 0, n = 0, k = 0;
  DType in = DType::kBF16, out = DType::kBF16;
  bool a_transposed = false, b_transposed = false;
  int64_t a_stride = 0, b_stride = 0, c_stride = 0;
};

// cublasLtMatmulAlgo_t, opaque.
struct ProductAlgorithm {
  uint64_t words[8] = {};
};

// One device's cuBLASLt. Lives as long as the process; its functions may be called from any thread.
class Cublas {
 public:
  // Loads the library and makes a handle for the current device on the first call. Errors: 621.
  static Result<const Cublas*> of_current_device(int& device);

  // The heuristic's first algorithm for shapes[0] that needs no workspace, does not split k (every
  // element is one sum, whatever m is) and takes the other shapes too. The answer depends on the
  // shapes, the device and the library's version. Errors: 622.
  Result<ProductAlgorithm> choose(std::span<const ProductShape> shapes) const;

  // One kernel on the stream. `shape` may have other m, n, k than the algorithm was chosen for.
  Status multiply(const ProductShape& shape, const ProductAlgorithm& algorithm, float alpha,
                  const void* a, const void* b, float beta, void* c, CUstream_st* stream) const;

 private:
  void* handle_ = nullptr;
};

}  // namespace ullage::cuda
