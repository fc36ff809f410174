#include "cuda/cublas.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <string>

#include "contract/describe.h"
#include "cuda/cuda_status.h"

namespace ullage::cuda {
namespace {

static_assert(sizeof(ProductAlgorithm) == sizeof(cublasLtMatmulAlgo_t));

// The functions used here. Their structures are those of the headers' major version, so no other
// library is asked for.
#define ULLAGE_STRING_OF(x) #x
#define ULLAGE_LIBRARY_OF(major) "libcublasLt.so." ULLAGE_STRING_OF(major)
constexpr const char* kLibrary = ULLAGE_LIBRARY_OF(CUBLAS_VER_MAJOR);

#define ULLAGE_CUBLASLT_FUNCTIONS(X)       \
  X(cublasLtCreate)                        \
  X(cublasLtMatmul)                        \
  X(cublasLtMatmulAlgoCheck)               \
  X(cublasLtMatmulAlgoGetHeuristic)        \
  X(cublasLtMatmulAlgoConfigGetAttribute)  \
  X(cublasLtMatmulDescInit_internal)       \
  X(cublasLtMatmulDescSetAttribute)        \
  X(cublasLtMatrixLayoutInit_internal)     \
  X(cublasLtMatmulPreferenceInit_internal) \
  X(cublasLtMatmulPreferenceSetAttribute)

struct Functions {
#define ULLAGE_POINTER(name) decltype(&::name) name = nullptr;
  ULLAGE_CUBLASLT_FUNCTIONS(ULLAGE_POINTER)
#undef ULLAGE_POINTER
  std::string missing;  // why there are none

  Functions() {
    void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      missing = dlerror();
      return;
    }
#define ULLAGE_LOAD(name)                                            \
  name = reinterpret_cast<decltype(&::name)>(dlsym(library, #name)); \
  if (name == nullptr) missing = std::string(kLibrary) + " has no " #name;
    ULLAGE_CUBLASLT_FUNCTIONS(ULLAGE_LOAD)
#undef ULLAGE_LOAD
  }
};

const Functions& functions() {
  static const Functions loaded;
  return loaded;
}

#define ULLAGE_RETURN_IF_CUBLAS_FAILS(what, code, call)                            \
  if (const cublasStatus_t error = (call); error != CUBLAS_STATUS_SUCCESS) {       \
    return Status(code, std::string(what) + ": cuBLAS status " + describe(error)); \
  }

cudaDataType_t type_of(DType dtype) {
  return dtype == DType::kBF16 ? CUDA_R_16BF : dtype == DType::kF16 ? CUDA_R_16F : CUDA_R_32F;
}

// The problem as cuBLASLt sees it: column-major, so C^T = B^T A^T and what is stored transposed
// there is what is not here.
struct Problem {
  cublasLtMatmulDescOpaque_t operation;
  cublasLtMatrixLayoutOpaque_t a, b, c;

  Status make(const ProductShape& s) {
    const Functions& f = functions();
    const auto layout = [&](cublasLtMatrixLayoutOpaque_t& to, DType dtype, int64_t rows,
                            int64_t cols, int64_t stride) {
      return f.cublasLtMatrixLayoutInit_internal(&to, sizeof to, type_of(dtype),
                                                 static_cast<uint64_t>(cols),
                                                 static_cast<uint64_t>(rows), stride);
    };
    const auto compute = s.in == DType::kF32 ? CUBLAS_COMPUTE_32F_PEDANTIC : CUBLAS_COMPUTE_32F;
    const cublasOperation_t first = s.b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = s.a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t status =
        f.cublasLtMatmulDescInit_internal(&operation, sizeof operation, compute, CUDA_R_32F);
    const auto then = [&](auto&& call) {
      if (status == CUBLAS_STATUS_SUCCESS) status = call();
    };
    then([&] {
      return f.cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                              sizeof first);
    });
    then([&] {
      return f.cublasLtMatmulDescSetAttribute(&operation, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                              sizeof second);
    });
    then([&] {
      return layout(a, s.in, s.a_transposed ? s.k : s.m, s.a_transposed ? s.m : s.k, s.a_stride);
    });
    then([&] {
      return layout(b, s.in, s.b_transposed ? s.n : s.k, s.b_transposed ? s.k : s.n, s.b_stride);
    });
    then([&] { return layout(c, s.out, s.m, s.n, s.c_stride); });
    ULLAGE_RETURN_IF_CUBLAS_FAILS("describing a product", kCudaLaunchFailed, status);
    return kCudaOk;
  }
};

std::string describe_product(const ProductShape& s) {
  return describe(s.m) + " x " + describe(s.n) + " x " + describe(s.k) + ", " +
         std::string(name_of(s.in)) + " to " + std::string(name_of(s.out));
}

bool splits_k(const cublasLtMatmulAlgo_t& algorithm) {
  int parts = 0;
  size_t written = 0;
  const cublasStatus_t status = functions().cublasLtMatmulAlgoConfigGetAttribute(
      &algorithm, CUBLASLT_ALGO_CONFIG_SPLITK_NUM, &parts, sizeof parts, &written);
  return status != CUBLAS_STATUS_SUCCESS || parts > 1;
}

bool takes(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm,
           const ProductShape& shape) {
  Problem problem;
  if (!problem.make(shape).ok()) return false;
  cublasLtMatmulHeuristicResult_t result = {};
  const cublasStatus_t status =
      functions().cublasLtMatmulAlgoCheck(handle, &problem.operation, &problem.b, &problem.a,
                                          &problem.c, &problem.c, &algorithm, &result);
  // What workspace it would like does not matter: the heuristic knows that there is none.
  return status == CUBLAS_STATUS_SUCCESS;
}

}  // namespace

Result<const Cublas*> Cublas::of_current_device(int& device) {
  static std::mutex mutex;
  static auto* const handles = new std::map<int, Cublas>;  // never destroyed: CUDA goes first
  if (const cudaError_t error = cudaGetDevice(&device); error != cudaSuccess) {
    return failed("cudaGetDevice", error);
  }
  const Functions& f = functions();
  if (!f.missing.empty()) {
    return Status(kCudaUnavailable, "cuBLASLt cannot be loaded: " + f.missing);
  }
  const std::lock_guard lock(mutex);
  Cublas& made = (*handles)[device];
  if (made.handle_ == nullptr) {
    cublasLtHandle_t handle = nullptr;
    ULLAGE_RETURN_IF_CUBLAS_FAILS("cublasLtCreate", kCudaUnavailable, f.cublasLtCreate(&handle));
    made.handle_ = handle;
  }
  return &made;
}

Result<ProductAlgorithm> Cublas::choose(std::span<const ProductShape> shapes) const {
  const Functions& f = functions();
  const auto handle = static_cast<cublasLtHandle_t>(handle_);
  Problem problem;
  if (Status status = problem.make(shapes[0]); !status.ok()) return status;
  cublasLtMatmulPreferenceOpaque_t preference;
  cublasStatus_t status = f.cublasLtMatmulPreferenceInit_internal(&preference, sizeof preference);
  const auto prefer = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    if (status != CUBLAS_STATUS_SUCCESS) return;
    status = f.cublasLtMatmulPreferenceSetAttribute(&preference, attribute, &value, sizeof value);
  };
  prefer(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t{0});
  prefer(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t{CUBLASLT_REDUCTION_SCHEME_NONE});
  for (const auto alignment :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    prefer(alignment, uint32_t{16});
  }
  constexpr int kCandidates = 32;
  cublasLtMatmulHeuristicResult_t found[kCandidates] = {};
  int n_found = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = f.cublasLtMatmulAlgoGetHeuristic(handle, &problem.operation, &problem.b, &problem.a,
                                              &problem.c, &problem.c, &preference, kCandidates,
                                              found, &n_found);
  }
  for (int i = 0; i < n_found && status == CUBLAS_STATUS_SUCCESS; ++i) {
    const cublasLtMatmulAlgo_t& algo = found[i].algo;
    if (found[i].state != CUBLAS_STATUS_SUCCESS || splits_k(algo)) continue;
    const auto fits = [&](const ProductShape& shape) { return takes(handle, algo, shape); };
    if (!std::all_of(shapes.begin(), shapes.end(), fits)) continue;
    ProductAlgorithm algorithm;
    std::memcpy(algorithm.words, &algo, sizeof algorithm);
    return algorithm;
  }
  return Status(kCudaUnsupportedDevice, "cuBLASLt has no algorithm for a product of " +
                                            describe_product(shapes[0]) + ": cuBLAS status " +
                                            describe(status));
}

Status Cublas::multiply(const ProductShape& shape, const ProductAlgorithm& algorithm, float alpha,
                        const void* a, const void* b, float beta, void* c,
                        CUstream_st* stream) const {
  Problem problem;
  if (Status status = problem.make(shape); !status.ok()) return status;
  cublasLtMatmulAlgo_t algo;
  std::memcpy(&algo, algorithm.words, sizeof algo);
  ULLAGE_RETURN_IF_CUBLAS_FAILS(
      "a product of " + describe_product(shape), kCudaLaunchFailed,
      functions().cublasLtMatmul(static_cast<cublasLtHandle_t>(handle_), &problem.operation, &alpha,
                                 b, &problem.b, a, &problem.a, &beta, c, &problem.c, c, &problem.c,
                                 &algo, nullptr, 0, stream));
  return kCudaOk;
}

}  // namespace ullage::cuda
