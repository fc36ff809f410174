// The fused head against the three cuBLASLt products it contains, in one run: logits, d_hidden and
// an f32 d_weight accumulated over token chunks, the heuristic's first algorithm, the best chunk up
// to 4096. Errors are relative Frobenius norms against a float32 reference, beside those of the
// eager way (bf16 logits, bf16 logit gradient) on the same numbers.
//
//   bench_linear_head [--json FILE] [--quick] [--kernel NAME]
//
// Also over the default plan: a 16-bit d_weight, a budget of 64 MiB, and f16 throughout.
//
// With the chunked products by name: also distillation from a teacher's hidden states over plain
// cross-entropy, and f32 over its own three products.
//
// CUDA events, 2 warm-ups, the median of 9; the two sides take turns, so that both meet the same
// clocks.
#include <cublasLt.h>
#include <cublas_v2.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ullage/lossk/cuda_linear_head.h"

namespace ullage::bench {
namespace {

using namespace ullage::lossk;

std::string_view forced_kernel;  // empty: chosen

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void must(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  std::fprintf(stderr, "%s: cuBLAS status %d\n", what, static_cast<int>(status));
  std::exit(1);
}
void must(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.to_string().c_str());
  std::exit(1);
}

template <class T>
class Buffer {
 public:
  explicit Buffer(int64_t n) : n_(n) {
    must(cudaMalloc(&data_, static_cast<size_t>(std::max<int64_t>(n, 1)) * sizeof(T)),
         "cudaMalloc");
  }
  Buffer(const Buffer&) = delete;
  ~Buffer() { cudaFree(data_); }
  T* get() const { return data_; }
  int64_t size() const { return n_; }

 private:
  T* data_ = nullptr;
  int64_t n_;
};

__global__ void fill_normal(__nv_bfloat16* to, int64_t n, float scale, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint64_t x = (static_cast<uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull;
    x ^= x >> 29, x *= 0xbf58476d1ce4e5b9ull, x ^= x >> 32, x *= 0x94d049bb133111ebull,
        x ^= x >> 31;
    const float u1 = (static_cast<float>(x >> 40) + 1) * 0x1p-24f,
                u2 = static_cast<float>(x >> 8 & 0xffffff) * 0x1p-24f;
    to[i] = __float2bfloat16(scale * sqrtf(-2 * logf(u1)) * cospif(2 * u2));
  }
}
__global__ void narrow(const __nv_bfloat16* from, __half* to, int64_t n) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = __float2half(__bfloat162float(from[i]));
  }
}
__global__ void widen(const __nv_bfloat16* from, float* to, int64_t n) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    to[i] = __bfloat162float(from[i]);
  }
}
// One block a row: logits to their cross-entropy gradient, in place. Of float32 logits, the
// reference, the label stands apart from the sum of the others, which a sure row would drown in it.
template <class T>
__global__ void softmax_gradient(T* logits, int64_t stride, int64_t vocab, const int64_t* labels,
                                 float gain, double* loss) {
  constexpr bool kApart = std::is_same_v<T, float>;
  __shared__ float shared[1024];
  T* row = logits + blockIdx.x * stride;
  const int64_t label = labels[blockIdx.x];
  const auto reduce = [&](float x, auto op) {
    shared[threadIdx.x] = x;
    __syncthreads();
    for (unsigned step = blockDim.x / 2; step > 0; step /= 2) {
      if (threadIdx.x < step)
        shared[threadIdx.x] = op(shared[threadIdx.x], shared[threadIdx.x + step]);
      __syncthreads();
    }
    const float result = shared[0];
    __syncthreads();
    return result;
  };
  float top = -INFINITY, sum = 0;
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x)
    top = fmaxf(top, static_cast<float>(row[j]));
  top = reduce(top, [](float a, float b) { return fmaxf(a, b); });
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x)
    if (!kApart || j != label) sum += expf(static_cast<float>(row[j]) - top);
  sum = reduce(sum, [](float a, float b) { return a + b; });
  const float label_logit = static_cast<float>(row[label]);
  const double label_exponential = exp(static_cast<double>(label_logit) - top);
  const float others = sum;
  if (kApart) sum += static_cast<float>(label_exponential);
  __syncthreads();
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x) {
    const float q = expf(static_cast<float>(row[j]) - top) / sum;
    row[j] = static_cast<T>(gain * (j != label ? q : kApart ? -others / sum : q - 1.f));
  }
  if (threadIdx.x != 0) return;
  loss[blockIdx.x] =
      kApart ? log1p(others / label_exponential)
             : static_cast<double>(logf(sum)) - (static_cast<double>(label_logit) - top);
}
template <class A, class B>
__global__ void square_norms(const A* a, const B* b, int64_t n, double* out) {
  double difference = 0, reference = 0;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const double x = static_cast<float>(a[i]), y = static_cast<float>(b[i]);
    difference += (x - y) * (x - y);
    reference += y * y;
  }
  atomicAdd(out, difference);
  atomicAdd(out + 1, reference);
}
template <class A, class B>
double relative_error(const A* a, const B* b, int64_t n) {
  Buffer<double> sums(2);
  must(cudaMemset(sums.get(), 0, 16), "memset");
  square_norms<<<1024, 256>>>(a, b, n, sums.get());
  double host[2];
  must(cudaMemcpy(host, sums.get(), 16, cudaMemcpyDeviceToHost), "norms");
  return std::sqrt(host[0] / host[1]);
}

// Row-major c[m][n] = beta c + a[m][k] b[k][n] of bf16 (or f32) operands, either stored transposed.
class Products {
 public:
  static constexpr size_t kWorkspaceBytes = size_t{64} << 20;
  Products() : workspace_(kWorkspaceBytes) { must(cublasLtCreate(&handle_), "cublasLtCreate"); }

  void run(int64_t m, int64_t n, int64_t k, const void* a, int64_t a_stride, bool a_transposed,
           const void* b, int64_t b_stride, bool b_transposed, void* c, int64_t c_stride,
           cudaDataType_t in, cudaDataType_t out, float beta) {
    Call& call = calls_[{m, n, k, a_transposed, b_transposed, in, out, beta != 0}];
    if (call.operation == nullptr)
      make(call, m, n, k, a_stride, a_transposed, b_stride, b_transposed, c_stride, in, out);
    const float one = 1;
    // Column-major sees the transposed problem: c^T = b^T a^T.
    must(cublasLtMatmul(handle_, call.operation, &one, b, call.b, a, call.a, &beta, c, call.c, c,
                        call.c, &call.found.algo, workspace_.get(), kWorkspaceBytes, nullptr),
         "cublasLtMatmul");
  }

 private:
  struct Call {
    cublasLtMatmulDesc_t operation = nullptr;
    cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
    cublasLtMatmulHeuristicResult_t found = {};
  };
  void make(Call& call, int64_t m, int64_t n, int64_t k, int64_t a_stride, bool a_transposed,
            int64_t b_stride, bool b_transposed, int64_t c_stride, cudaDataType_t in,
            cudaDataType_t out) {
    must(cublasLtMatmulDescCreate(&call.operation, CUBLAS_COMPUTE_32F, CUDA_R_32F), "descriptor");
    const cublasOperation_t first = b_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = a_transposed ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasLtMatmulDescSetAttribute(call.operation, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                   sizeof first);
    cublasLtMatmulDescSetAttribute(call.operation, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                   sizeof second);
    must(cublasLtMatrixLayoutCreate(&call.b, in, b_transposed ? k : n, b_transposed ? n : k,
                                    b_stride),
         "layout");
    must(cublasLtMatrixLayoutCreate(&call.a, in, a_transposed ? m : k, a_transposed ? k : m,
                                    a_stride),
         "layout");
    must(cublasLtMatrixLayoutCreate(&call.c, out, n, m, c_stride), "layout");
    cublasLtMatmulPreference_t preference;
    must(cublasLtMatmulPreferenceCreate(&preference), "preference");
    const size_t bytes = kWorkspaceBytes;
    cublasLtMatmulPreferenceSetAttribute(preference, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                         &bytes, sizeof bytes);
    int n_found = 0;
    must(cublasLtMatmulAlgoGetHeuristic(handle_, call.operation, call.b, call.a, call.c, call.c,
                                        preference, 1, &call.found, &n_found),
         "heuristic");
    cublasLtMatmulPreferenceDestroy(preference);
  }
  cublasLtHandle_t handle_ = nullptr;
  Buffer<uint8_t> workspace_;
  std::map<std::tuple<int64_t, int64_t, int64_t, bool, bool, int, int, bool>, Call> calls_;
};

double time_once(const std::function<void()>& work) {
  static cudaEvent_t start = nullptr, stop = nullptr;
  if (start == nullptr) {
    must(cudaEventCreate(&start), "event");
    must(cudaEventCreate(&stop), "event");
  }
  must(cudaEventRecord(start), "record");
  work();
  must(cudaEventRecord(stop), "record");
  must(cudaEventSynchronize(stop), "run");
  float ms = 0;
  must(cudaEventElapsedTime(&ms, start, stop), "elapsed");
  return ms;
}

// Medians of works that take turns.
std::vector<double> medians(const std::vector<std::function<void()>>& works) {
  constexpr int kWarm = 2, kRuns = 9;
  std::vector<std::vector<double>> ms(works.size());
  for (int i = 0; i < kWarm + kRuns; ++i) {
    for (size_t w = 0; w < works.size(); ++w) {
      const double elapsed = time_once(works[w]);
      if (i >= kWarm) ms[w].push_back(elapsed);
    }
  }
  std::vector<double> result;
  for (auto& times : ms) {
    std::sort(times.begin(), times.end());
    result.push_back(times[times.size() / 2]);
  }
  return result;
}

struct Head {
  int64_t n, d, v;
  Buffer<__nv_bfloat16> hidden{n * d}, weight{v * d}, d_hidden{n * d};
  Buffer<float> d_weight{v * d};
  Buffer<int64_t> labels{n};
  Buffer<float> row_floats{3 * n};  // advantages, old log-probabilities, token losses
  Buffer<double> total{1};

  // peak: each row points at its label's row of the weight, for a logit of about that there and
  // N(0, 1) elsewhere; 0: N(0, 1) everywhere.
  void fill(float peak) {
    fill_normal<<<1024, 256>>>(hidden.get(), n * d, 1, 1);
    fill_normal<<<1024, 256>>>(weight.get(), v * d, 1 / std::sqrt(static_cast<float>(d)), 77777777);
    std::vector<int64_t> host(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) host[i] = (i * 7919 + 13) % v;
    must(cudaMemcpy(labels.get(), host.data(), host.size() * 8, cudaMemcpyHostToDevice), "labels");
    if (peak > 0) {
      std::vector<__nv_bfloat16> row(static_cast<size_t>(d)), w(static_cast<size_t>(d));
      for (int64_t i = 0; i < n; ++i) {
        must(cudaMemcpy(row.data(), hidden.get() + i * d, row.size() * 2, cudaMemcpyDeviceToHost),
             "row");
        must(cudaMemcpy(w.data(), weight.get() + host[i] * d, w.size() * 2, cudaMemcpyDeviceToHost),
             "row");
        for (int64_t k = 0; k < d; ++k)
          row[k] = __float2bfloat16(__bfloat162float(row[k]) + peak * __bfloat162float(w[k]));
        must(cudaMemcpy(hidden.get() + i * d, row.data(), row.size() * 2, cudaMemcpyHostToDevice),
             "row");
      }
    }
    std::vector<float> floats(static_cast<size_t>(3 * n));
    for (int64_t i = 0; i < n; ++i) floats[i] = i % 2 ? 1.f : -0.5f, floats[n + i] = -12;
    must(cudaMemcpy(row_floats.get(), floats.data(), floats.size() * 4, cudaMemcpyHostToDevice),
         "rows");
  }
};

struct Job {
  CudaLinearHeadPlan plan;
  Inputs inputs;
  Outputs outputs;
  Buffer<std::byte> workspace;

  Job(Head& head, const HeadConfig& config, const Request& request, int64_t budget,
      double filter_tolerance = 0)
      : plan([&] {
          auto made = plan_cuda_linear({head.n, head.d, head.v}, config, request,
                                       {.budget_bytes = budget,
                                        .kernel = forced_kernel,
                                        .filter_tolerance = filter_tolerance});
          must(made.status(), "plan");
          return *made;
        }()),
        workspace(plan.workspace_bytes()) {
    inputs.hidden = {head.hidden.get(), DType::kBF16, head.n, head.d, head.d};
    inputs.weight = {head.weight.get(), DType::kBF16, head.v, head.d, head.d};
    inputs.labels = {head.labels.get(), 8, head.n, 1};
    inputs.advantages = {head.row_floats.get(), DType::kF32, head.n, 1};
    inputs.old_log_probs = {head.row_floats.get() + head.n, DType::kF32, head.n, 1};
    outputs.token_loss = {head.row_floats.get() + 2 * head.n, DType::kF32, head.n, 1};
    outputs.total = head.total.get();
    if (request.d_hidden)
      outputs.d_hidden = {head.d_hidden.get(), DType::kBF16, head.n, head.d, head.d};
    if (request.d_weight)
      outputs.d_weight = {head.d_weight.get(), request.d_weight_dtype, head.v, head.d, head.d};
  }
  void run() {
    must(plan.run(nullptr, inputs, outputs,
                  {workspace.get(), static_cast<size_t>(workspace.size())}),
         "run");
  }
  FilterReport report() {
    auto made =
        plan.filter_report(nullptr, {workspace.get(), static_cast<size_t>(workspace.size())});
    must(made.status(), "filter report");
    return *made;
  }
  void check() {
    must(plan.check(nullptr, {workspace.get(), static_cast<size_t>(workspace.size())}), "check");
  }
};

void three_products(Products& products, Head& head, __nv_bfloat16* logits, int64_t chunk,
                    int which = 7) {
  for (int64_t first = 0; first < head.n; first += chunk) {
    const int64_t rows = std::min(chunk, head.n - first);
    const __nv_bfloat16* x = head.hidden.get() + first * head.d;
    if (which & 1)
      products.run(rows, head.v, head.d, x, head.d, false, head.weight.get(), head.d, true, logits,
                   head.v, CUDA_R_16BF, CUDA_R_16BF, 0);
    if (which & 2)
      products.run(rows, head.d, head.v, logits, head.v, false, head.weight.get(), head.d, false,
                   head.d_hidden.get() + first * head.d, head.d, CUDA_R_16BF, CUDA_R_16BF, 0);
    if (which & 4)
      products.run(head.v, head.d, rows, logits, head.v, true, x, head.d, false,
                   head.d_weight.get(), head.d, CUDA_R_16BF, CUDA_R_32F, 1);
  }
}

// The same head in f16 over bf16: bf16 numbers of this size are f16 numbers but for the smallest.
double f16_over_bf16(Head& head, const HeadConfig& config, Request request, Job& bf16) {
  Buffer<__half> hidden(head.n * head.d), weight(head.v * head.d);
  narrow<<<1024, 256>>>(head.hidden.get(), hidden.get(), head.n * head.d);
  narrow<<<1024, 256>>>(head.weight.get(), weight.get(), head.v * head.d);
  request.input_dtype = request.weight_dtype = request.grad_dtype = DType::kF16;
  Job f16(head, config, request, 0);
  f16.inputs.hidden = {hidden.get(), DType::kF16, head.n, head.d, head.d};
  f16.inputs.weight = {weight.get(), DType::kF16, head.v, head.d, head.d};
  f16.outputs.d_hidden.dtype = DType::kF16;
  const std::vector<double> ms = medians({[&] { f16.run(); }, [&] { bf16.run(); }});
  f16.check();
  return ms[0] / ms[1];
}

struct Errors {
  double d_hidden = 0, d_weight = 0, loss = 0;
};

// Ours and the eager way against float32 products of the same bf16 numbers.
void measure_errors(Products& products, Head& head, Job& job, Errors& ours, Errors& eager) {
  const int64_t n = head.n, d = head.d, v = head.v, chunk = 512;
  Buffer<float> x(n * d), w(v * d), logits(chunk * v), d_hidden(n * d), d_weight(v * d);
  Buffer<double> loss(n);
  widen<<<1024, 256>>>(head.hidden.get(), x.get(), n * d);
  widen<<<1024, 256>>>(head.weight.get(), w.get(), v * d);
  const float gain = 1 / static_cast<float>(n);
  const auto mean = [&] {
    std::vector<double> host(static_cast<size_t>(n));
    must(cudaMemcpy(host.data(), loss.get(), host.size() * 8, cudaMemcpyDeviceToHost), "loss");
    double sum = 0;
    for (const double value : host) sum += value;
    return sum / static_cast<double>(n);
  };
  for (int64_t first = 0; first < n; first += chunk) {
    const int64_t rows = std::min(chunk, n - first);
    products.run(rows, v, d, x.get() + first * d, d, false, w.get(), d, true, logits.get(), v,
                 CUDA_R_32F, CUDA_R_32F, 0);
    softmax_gradient<<<static_cast<unsigned>(rows), 1024>>>(
        logits.get(), v, v, head.labels.get() + first, gain, loss.get() + first);
    products.run(rows, d, v, logits.get(), v, false, w.get(), d, false, d_hidden.get() + first * d,
                 d, CUDA_R_32F, CUDA_R_32F, 0);
    products.run(v, d, rows, logits.get(), v, true, x.get() + first * d, d, false, d_weight.get(),
                 d, CUDA_R_32F, CUDA_R_32F, first > 0 ? 1 : 0);
  }
  const double true_loss = mean();
  job.run();
  job.check();
  double total = 0;
  must(cudaMemcpy(&total, head.total.get(), 8, cudaMemcpyDeviceToHost), "total");
  ours = {relative_error(head.d_hidden.get(), d_hidden.get(), n * d),
          relative_error(head.d_weight.get(), d_weight.get(), v * d),
          std::abs(total - true_loss) / true_loss};
  // Eager: one pass over all rows, so that its bf16 d_weight is rounded once.
  Buffer<__nv_bfloat16> all(n * v), rounded(v * d);
  products.run(n, v, d, head.hidden.get(), d, false, head.weight.get(), d, true, all.get(), v,
               CUDA_R_16BF, CUDA_R_16BF, 0);
  softmax_gradient<<<static_cast<unsigned>(n), 1024>>>(all.get(), v, v, head.labels.get(), gain,
                                                       loss.get());
  products.run(n, d, v, all.get(), v, false, head.weight.get(), d, false, head.d_hidden.get(), d,
               CUDA_R_16BF, CUDA_R_16BF, 0);
  products.run(v, d, n, all.get(), v, true, head.hidden.get(), d, false, rounded.get(), d,
               CUDA_R_16BF, CUDA_R_16BF, 0);
  eager = {relative_error(head.d_hidden.get(), d_hidden.get(), n * d),
           relative_error(rounded.get(), d_weight.get(), v * d),
           std::abs(mean() - true_loss) / true_loss};
}

// Distillation from a teacher of the student's own width, over plain cross-entropy.
double distillation_over_ce(Head& head, Job& ce, const Request& request) {
  Head teacher{head.n, head.d, head.v};
  fill_normal<<<1024, 256>>>(teacher.hidden.get(), head.n * head.d, 1, 5);
  fill_normal<<<1024, 256>>>(teacher.weight.get(), head.v * head.d,
                             1 / std::sqrt(static_cast<float>(head.d)), 555555);
  HeadConfig config;
  config.terms = {{.name = "distillation",
                   .kind = LossKind::kDistillation,
                   .divergence = Divergence::kForwardKl}};
  config.teachers = {{.kind = TeacherKind::kHidden,
                      .vocab = head.v,
                      .d_model = head.d,
                      .dtype = DType::kBF16,
                      .weight_dtype = DType::kBF16}};
  Job job(head, config, request, 0);
  job.inputs.teachers = {{.hidden = {teacher.hidden.get(), DType::kBF16, head.n, head.d, head.d},
                          .weight = {teacher.weight.get(), DType::kBF16, head.v, head.d, head.d}}};
  const std::vector<double> ms = medians({[&] { job.run(); }, [&] { ce.run(); }});
  return ms[0] / ms[1];
}

// Cross-entropy in f32 over the three products in f32.
double f32_over_products(Products& products, Head& head, double& ms_of_ours) {
  const int64_t n = head.n, d = head.d, v = head.v;
  Buffer<float> x(n * d), w(v * d), logits(n * v), d_hidden(n * d);
  widen<<<1024, 256>>>(head.hidden.get(), x.get(), n * d);
  widen<<<1024, 256>>>(head.weight.get(), w.get(), v * d);
  const Request request = {.d_hidden = true, .d_weight = true};
  HeadConfig config;
  config.terms = {{.name = "cross_entropy"}};
  Job job(head, config, request, 0);
  job.inputs.hidden = {x.get(), DType::kF32, n, d, d};
  job.inputs.weight = {w.get(), DType::kF32, v, d, d};
  job.outputs.d_hidden = {d_hidden.get(), DType::kF32, n, d, d};
  const std::vector<double> ms = medians(
      {[&] { job.run(); },
       [&] {
         const auto f32 = CUDA_R_32F;
         products.run(n, v, d, x.get(), d, false, w.get(), d, true, logits.get(), v, f32, f32, 0);
         products.run(n, d, v, logits.get(), v, false, w.get(), d, false, d_hidden.get(), d, f32,
                      f32, 0);
         products.run(v, d, n, logits.get(), v, true, x.get(), d, false, head.d_weight.get(), d,
                      f32, f32, 1);
       }});
  job.check();
  ms_of_ours = ms[0];
  return ms[0] / ms[1];
}

constexpr Request kTraining = {.input_dtype = DType::kBF16,
                               .weight_dtype = DType::kBF16,
                               .grad_dtype = DType::kBF16,
                               .d_weight_dtype = DType::kF32,
                               .d_hidden = true,
                               .d_weight = true};

int main_of(int argc, char** argv) {
  const char* json = nullptr;
  bool quick = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--quick") == 0) quick = true;
    if (std::strcmp(argv[i], "--kernel") == 0 && i + 1 < argc) forced_kernel = argv[++i];
    if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) json = argv[++i];
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "device");
  Products products;
  std::string records;
  std::printf("%-22s %-16s %9s %9s %7s %8s %6s | %9s %9s %9s | %7s %7s %7s | %9s %9s\n",
              "n_tok x d_model x vocab", "rows", "3 products", "ours ms", "ratio", "TFLOP/s", "MiB",
              "forward", "of logits", "grpo/ce", "16-bit", "64 MiB", "f16", "d_hidden", "d_weight");
  struct Size {
    int64_t n, d, v;
  };
  std::vector<Size> sizes = {{2048, 4096, 151936},
                             {8192, 1024, 151936},
                             {8192, 4096, 128256},
                             {8192, 2304, 256000},
                             {2048, 4096, 128256}};
  if (quick) sizes = {{2048, 4096, 128256}, {8192, 1024, 151936}, {8192, 2304, 256000}};
  for (const Size& size : sizes) {
    // The last goes through the filter; its rows have 1e-4 of their softmax outside their label.
    constexpr struct {
      const char* rows;
      float peak;
      double filter_tolerance;
    } kinds[] = {{"flat", 0, 0}, {"peaked", 12, 0}, {"peaked, filtered", 24, 1e-2}};
    for (const auto& kind : kinds) {
      if (kind.peak > 0 && (quick || size.n > 2048)) continue;
      if (kind.filter_tolerance > 0 && !forced_kernel.empty()) continue;
      Head head{size.n, size.d, size.v};
      head.fill(kind.peak);
      HeadConfig config;
      config.terms = {{.name = "cross_entropy"}};
      HeadConfig policy;
      policy.terms = {{.name = "grpo", .kind = LossKind::kGrpo}};
      Request forward = kTraining;
      forward.d_hidden = forward.d_weight = false;
      Request rounding = kTraining;
      rounding.d_weight_dtype = DType::kBF16;
      Job ours(head, config, kTraining, 0, kind.filter_tolerance),
          grpo(head, policy, kTraining, 0, kind.filter_tolerance), look(head, config, forward, 0),
          rounded(head, config, rounding, 0, kind.filter_tolerance);
      const bool exact = kind.filter_tolerance == 0 && kind.peak == 0 && forced_kernel.empty();
      double tight_ms = 0, f16_ms = 0;
      double products_ms = 1e30, ours_ms = 0, forward_ms = 0, grpo_ms = 0, logits_ms = 0,
             rounded_ms = 0;
      int64_t best_chunk = 0;
      {
        Buffer<__nv_bfloat16> logits(std::min<int64_t>(4096, size.n) * size.v);
        for (const int64_t chunk : {1024, 2048, 4096}) {
          if (chunk > size.n) continue;
          const std::vector<double> ms = medians(
              {[&] { three_products(products, head, logits.get(), chunk); }, [&] { ours.run(); }});
          if (ms[0] < products_ms) products_ms = ms[0], ours_ms = ms[1], best_chunk = chunk;
        }
        const std::vector<double> ms =
            medians({[&] { look.run(); },
                     [&] { three_products(products, head, logits.get(), best_chunk, 1); },
                     [&] { grpo.run(); }, [&] { ours.run(); }, [&] { rounded.run(); }});
        forward_ms = ms[0], logits_ms = ms[1], grpo_ms = ms[2] / ms[3], rounded_ms = ms[4] / ms[3];
      }
      if (exact) {
        Job tight(head, config, kTraining, int64_t{64} << 20);
        const std::vector<double> ms = medians({[&] { tight.run(); }, [&] { ours.run(); }});
        tight_ms = ms[0] / ms[1];
        f16_ms = f16_over_bf16(head, config, kTraining, ours);
      }
      FilterReport report;
      if (kind.filter_tolerance > 0) report = ours.report();
      Errors mine, eager;
      if (!quick) measure_errors(products, head, ours, mine, eager);
      const double operations = 6.0 * static_cast<double>(size.n) * static_cast<double>(size.d) *
                                static_cast<double>(size.v);
      char name[64];
      std::snprintf(name, sizeof name, "%ld x %ld x %ld", size.n, size.d, size.v);
      std::printf(
          "%-22s %-16s %9.3f %9.3f %7.3f %8.0f %6.0f | %9.3f %9.3f %9.3f | %7.3f %7.3f %7.3f | "
          "%.1e/%.1e %.1e/%.1e\n",
          name, kind.rows, products_ms, ours_ms, ours_ms / products_ms, operations / ours_ms * 1e-9,
          static_cast<double>(ours.plan.workspace_bytes()) / 1048576, forward_ms,
          forward_ms / logits_ms, grpo_ms, rounded_ms, tight_ms, f16_ms, mine.d_hidden,
          eager.d_hidden, mine.d_weight, eager.d_weight);
      std::fflush(stdout);
      char record[1536];
      std::snprintf(
          record, sizeof record,
          "%s\n    {\"n_tok\": %ld, \"d_model\": %ld, \"vocab\": %ld, \"rows\": \"%s\", "
          "\"filter_tolerance\": %g, \"kept_tiles\": %.4f, \"largest_share_left_out\": %.3e, "
          "\"products_ms\": %.4f, \"products_chunk\": %ld, \"ours_ms\": %.4f, \"ratio\": %.4f, "
          "\"tflops\": %.1f, \"chunk\": %ld, \"workspace_bytes\": %ld, \"forward_ms\": %.4f, "
          "\"forward_over_logits_product\": %.4f, \"grpo_over_ce\": %.4f, "
          "\"bf16_d_weight_over_f32\": %.4f, \"in_64_mib_over_default\": %.4f, "
          "\"f16_over_bf16\": %.4f, \"error\": "
          "{\"d_hidden\": %.3e, \"d_weight\": %.3e, "
          "\"loss\": %.3e}, \"eager_error\": {\"d_hidden\": %.3e, \"d_weight\": %.3e, \"loss\": "
          "%.3e}}",
          records.empty() ? "" : ",", size.n, size.d, size.v, kind.rows, kind.filter_tolerance,
          report.kept, report.largest_share, products_ms, best_chunk, ours_ms,
          ours_ms / products_ms, operations / ours_ms * 1e-9, ours.plan.chunk(),
          ours.plan.workspace_bytes(), forward_ms, forward_ms / logits_ms, grpo_ms, rounded_ms,
          tight_ms, f16_ms, mine.d_hidden, mine.d_weight, mine.loss, eager.d_hidden, eager.d_weight,
          eager.loss);
      records += record;
    }
  }
  if (forced_kernel == "linear_head_sm80_chunked_products") {
    Head head{4096, 4096, 128256}, small{1024, 1024, 50304};
    head.fill(false);
    small.fill(false);
    HeadConfig config;
    config.terms = {{.name = "cross_entropy"}};
    Job ce(head, config, kTraining, 0);
    const double distillation = distillation_over_ce(head, ce, kTraining);
    double f32_ms = 0;
    const double f32 = f32_over_products(products, small, f32_ms);
    std::printf(
        "distillation from hidden over ce, 4096 x 4096 x 128256: %.3f\n"
        "f32 over its three products, 1024 x 1024 x 50304: %.3f (%.3f ms)\n",
        distillation, f32, f32_ms);
    char record[256];
    std::snprintf(record, sizeof record,
                  ",\n    {\"n_tok\": 4096, \"d_model\": 4096, \"vocab\": 128256, "
                  "\"distillation_over_ce\": %.4f},\n    {\"n_tok\": 1024, \"d_model\": 1024, "
                  "\"vocab\": 50304, \"dtype\": \"f32\", \"ours_ms\": %.4f, \"ratio\": %.4f}",
                  distillation, f32_ms, f32);
    records += record;
  }
  if (json != nullptr) {
    FILE* file = std::fopen(json, "w");
    if (file == nullptr) return 1;
    std::fprintf(file, "{\n  \"device\": \"%s\",\n  \"records\": [%s\n  ]\n}\n", device.name,
                 records.c_str());
    std::fclose(file);
  }
  return 0;
}

}  // namespace
}  // namespace ullage::bench

int main(int argc, char** argv) { return ullage::bench::main_of(argc, argv); }
