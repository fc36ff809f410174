// The losses from logits against what the device can move: every time is put beside a device copy,
// a device add and a read of the same logits, measured in the same run.
//
//   bench_head_logits [--sweep] [--shape INDEX] [--json FILE]
//
// CUDA events around one run, 3 warm-ups, the median of 15 and the span of the middle half. Every
// tensor is some GB, far beyond L2, so no buffer is found there from the run before.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cuda/head_logits/config.h"
#include "cuda/head_logits/passes.h"
#include "ullage/lossk/cuda_head.h"

namespace ullage::bench {
namespace {

using namespace ullage::lossk;

void must(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void must(const Status& status, const char* what) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s: %s\n", what, status.to_string().c_str());
  std::exit(1);
}

struct Times {
  double median = 0, low = 0, high = 0;  // ms; low and high: the middle half
};

int runs_of_each = 15;

Times time_of(const std::function<void()>& work) {
  constexpr int kWarm = 3;
  const int kRuns = runs_of_each;
  cudaEvent_t start, stop;
  must(cudaEventCreate(&start), "event");
  must(cudaEventCreate(&stop), "event");
  std::vector<float> ms;
  for (int i = 0; i < kWarm + kRuns; ++i) {
    must(cudaEventRecord(start), "record");
    work();
    must(cudaEventRecord(stop), "record");
    must(cudaEventSynchronize(stop), "run");
    float elapsed = 0;
    must(cudaEventElapsedTime(&elapsed, start, stop), "elapsed");
    if (i >= kWarm) ms.push_back(elapsed);
  }
  must(cudaEventDestroy(start), "event");
  must(cudaEventDestroy(stop), "event");
  std::sort(ms.begin(), ms.end());
  return {ms[kRuns / 2], ms[kRuns / 4], ms[kRuns - 1 - kRuns / 4]};
}

// Roughly normal values, different in every element.
__device__ float value_at(uint64_t i, uint64_t seed) {
  uint64_t x = (i + seed) * 0x9e3779b97f4a7c15ull;
  x ^= x >> 29;
  x *= 0xbf58476d1ce4e5b9ull;
  x ^= x >> 32;
  float sum = 0;
  for (int part = 0; part < 4; ++part) {
    sum += static_cast<float>(x >> (16 * part) & 0xffff) / 32768.0f - 1;
  }
  return 1.7f * sum;
}
__global__ void fill(void* to, int64_t n, DType dtype, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    const float value = value_at(static_cast<uint64_t>(i), seed);
    const uint32_t word = __float_as_uint(value);
    if (dtype == DType::kF32) {
      static_cast<float*>(to)[i] = value;
    } else {
      static_cast<uint16_t*>(to)[i] =
          static_cast<uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
    }
  }
}

// The yardsticks, one 16-byte word a thread. The sum of words keeps the reads alive.
__global__ void add_words(const uint4* a, const uint4* b, uint4* c, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint4 x = a[i], y = b[i];
  c[i] = make_uint4(x.x + y.x, x.y + y.y, x.z + y.z, x.w + y.w);
}
__global__ void copy_words(const uint4* a, uint4* c, int64_t n) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i];
}
__global__ void read_words(const uint4* a, unsigned* sink, int64_t n) {
  constexpr int kUnroll = 4;
  unsigned sum = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + (kUnroll - 1) * step < n; i += kUnroll * step) {
    uint4 x[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) x[u] = a[i + u * step];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) sum += x[u].x ^ x[u].y ^ x[u].z ^ x[u].w;
  }
  for (; i < n; i += step) sum += a[i].x;
  if (sum == 0x12345678) *sink = sum;
}

struct Tensors {
  void *logits = nullptr, *teacher = nullptr, *gradient = nullptr;
  int64_t* labels = nullptr;
  int64_t* segments = nullptr;
  float *advantages = nullptr, *old_log_probs = nullptr, *entropy = nullptr;
  double* scalars = nullptr;
  std::byte* workspace = nullptr;
};
constexpr int64_t kWorkspaceBytes = int64_t{64} << 20;

struct Mix {
  const char* name;
  std::vector<LossTerm> terms;
  bool entropy = false;
};

LossTerm term(const char* name, LossKind kind, Divergence divergence = Divergence::kCrossEntropy) {
  LossTerm t;
  t.name = name;
  t.kind = kind;
  t.divergence = divergence;
  t.beta = 0.5;
  return t;
}

struct Record {
  std::string shape, dtype, work, placement, kernel;
  int cluster = 0, warps = 0, slots = 0;
  double bytes = 0;  // that must move
  Times ms;
  double yardstick_ms = 0;
  std::string yardstick;
};

class Shapes {
 public:
  Shapes(int64_t n_tok, int64_t vocab, DType dtype, std::vector<Record>& records)
      : n_tok_(n_tok), vocab_(vocab), dtype_(dtype), records_(records) {
    bytes_ = n_tok * vocab * size_of(dtype);
    const int64_t elements = n_tok * vocab;
    for (auto [pointer, seed] : {std::pair{&t_.logits, 1ull}, {&t_.teacher, 77ull}}) {
      must(cudaMalloc(pointer, static_cast<size_t>(bytes_ + 16)), "logits");
      fill<<<4096, 256>>>(*pointer, elements, dtype, seed << 40);
    }
    must(cudaMalloc(&t_.gradient, static_cast<size_t>(bytes_ + 16)), "gradient");
    std::vector<int64_t> labels(n_tok), segments(n_tok);
    std::vector<float> advantages(n_tok), old(n_tok);
    for (int64_t i = 0; i < n_tok; ++i) {
      labels[i] = i * 7919 % vocab;
      segments[i] = i * 64 / n_tok;
      advantages[i] = i % 3 == 0 ? -0.7f : 0.9f;
      old[i] = -12.0f - static_cast<float>(i % 5) * 0.1f;
    }
    const auto upload = [](auto*& pointer, const auto& values) {
      const size_t size = values.size() * sizeof values[0];
      must(cudaMalloc(&pointer, size), "vector");
      must(cudaMemcpy(pointer, values.data(), size, cudaMemcpyHostToDevice), "upload");
    };
    upload(t_.labels, labels);
    upload(t_.segments, segments);
    upload(t_.advantages, advantages);
    upload(t_.old_log_probs, old);
    must(cudaMalloc(&t_.entropy, n_tok * 4), "entropy");
    must(cudaMalloc(&t_.scalars, 1024), "scalars");
    must(cudaMalloc(&t_.workspace, kWorkspaceBytes), "workspace");
    measure_yardsticks();
  }
  ~Shapes() {
    for (void* p : {t_.logits, t_.teacher, t_.gradient}) cudaFree(p);
    for (void* p : {static_cast<void*>(t_.labels), static_cast<void*>(t_.segments),
                    static_cast<void*>(t_.advantages), static_cast<void*>(t_.old_log_probs),
                    static_cast<void*>(t_.entropy), static_cast<void*>(t_.scalars),
                    static_cast<void*>(t_.workspace)}) {
      cudaFree(p);
    }
  }

  enum Placement { kForward, kOutOfPlace, kInPlace };

  // False where the tuning does not fit.
  bool measure(const Mix& mix, Placement placement, const char* kernel = "",
               const cuda::Tuning& tuning = {}) {
    HeadConfig config;
    config.terms = mix.terms;
    bool distills = false, sequences = false;
    for (const LossTerm& t : mix.terms) {
      distills |= t.kind == LossKind::kDistillation;
      sequences |= t.kind == LossKind::kGspo;
    }
    if (distills) config.teachers = {{.vocab = vocab_, .dtype = dtype_}};
    Request request;
    request.input_dtype = request.grad_dtype = dtype_;
    request.d_logits = placement != kForward;
    request.entropy = mix.entropy;
    CudaHeadOptions options;
    options.kernel = kernel;
    const auto plan = cuda::plan_with_tuning({n_tok_, 0, vocab_}, config, request, options, tuning);
    if (!plan) return false;
    if (tuning.cluster > 0 && plan->kernel() != cuda::name_of(cuda::RowKernel::kCluster)) {
      return false;
    }
    must(plan->workspace_bytes() <= kWorkspaceBytes ? Status(kCudaOk) : Status(kCudaOutOfMemory),
         "workspace");
    const void* logits = t_.logits;
    Inputs inputs;
    inputs.logits = {logits, dtype_, n_tok_, vocab_, vocab_};
    inputs.labels = {t_.labels, 8, n_tok_, 1};
    inputs.advantages = {t_.advantages, DType::kF32, n_tok_, 1};
    inputs.old_log_probs = {t_.old_log_probs, DType::kF32, n_tok_, 1};
    if (sequences) {
      inputs.segments = {t_.segments, 8, n_tok_, 1};
      inputs.n_segments = 64;
    }
    if (distills) {
      inputs.teachers.resize(1);
      inputs.teachers[0].logits = {t_.teacher, dtype_, n_tok_, vocab_, vocab_};
    }
    Outputs outputs;
    outputs.terms = {t_.scalars, mix.terms.size()};
    outputs.total = t_.scalars + 16;
    if (mix.entropy) outputs.entropy = {t_.entropy, DType::kF32, n_tok_, 1};
    if (placement == kOutOfPlace) outputs.d_logits = {t_.gradient, dtype_, n_tok_, vocab_, vocab_};
    if (placement == kInPlace) outputs.d_logits = {t_.logits, dtype_, n_tok_, vocab_, vocab_};
    const std::span<std::byte> work{t_.workspace, static_cast<size_t>(kWorkspaceBytes)};
    Record record;
    record.ms = time_of([&] { must(plan->run(nullptr, inputs, outputs, work), mix.name); });
    must(plan->check(nullptr, work), mix.name);
    if (placement == kInPlace) {
      fill<<<4096, 256>>>(t_.logits, n_tok_ * vocab_, dtype_, 1ull << 40);
    }
    std::vector<Rejection> rejections;
    const cuda::Family family = cuda::family_of(config, cuda::passes_of(config).back());
    const cuda::RowWork work_of_row{
        .family = mix.entropy && !has_teacher(family) ? cuda::Family::kEntropy : family,
        .extras = mix.entropy,
        .gradient = placement != kForward};
    const auto layout = cuda::choose_row_layout(vocab_, dtype_, work_of_row, options.device,
                                                options.kernel, tuning, rejections);
    record.shape = std::to_string(n_tok_) + "x" + std::to_string(vocab_);
    record.dtype = name_of(dtype_);
    record.work = mix.name;
    record.placement = placement == kForward      ? "forward"
                       : placement == kOutOfPlace ? "out of place"
                                                  : "in place";
    record.kernel = plan->kernel();
    record.cluster = layout->cluster;
    record.warps = layout->warps;
    record.slots = layout->slots;
    record.bytes =
        static_cast<double>(bytes_) * ((distills ? 2 : 1) + (placement == kForward ? 0 : 1));
    record.yardstick = distills && placement == kForward ? "two reads"
                       : distills                        ? "add"
                       : placement == kForward           ? "read"
                                                         : "copy";
    record.yardstick_ms = record.yardstick == "add"         ? add_.median
                          : record.yardstick == "copy"      ? copy_.median
                          : record.yardstick == "two reads" ? 2 * read_.median
                                                            : read_.median;
    print(record);
    records_.push_back(record);
    return true;
  }

 private:
  static void print(const Record& r) {
    std::printf(
        "%-14s %-4s %-22s %-12s %-8s c%-2d w%-2d s%d %7.3f ms [%.3f, %.3f]  %5.0f GB/s  "
        "%.3f x %s\n",
        r.shape.c_str(), r.dtype.c_str(), r.work.c_str(), r.placement.c_str(),
        r.kernel.substr(r.kernel.rfind('_') + 1).c_str(), r.cluster, r.warps, r.slots, r.ms.median,
        r.ms.low, r.ms.high, r.bytes / r.ms.median / 1e6, r.ms.median / r.yardstick_ms,
        r.yardstick.c_str());
    std::fflush(stdout);
  }

  void measure_yardsticks() {
    const int64_t words = bytes_ / 16;
    const auto blocks = static_cast<unsigned>((words + 511) / 512);
    const auto* a = static_cast<const uint4*>(t_.logits);
    const auto* b = static_cast<const uint4*>(t_.teacher);
    auto* c = static_cast<uint4*>(t_.gradient);
    const Times copy = time_of([&] {
      must(cudaMemcpyAsync(t_.gradient, t_.logits, static_cast<size_t>(bytes_),
                           cudaMemcpyDeviceToDevice),
           "copy");
    });
    const Times words_copy = time_of([&] { copy_words<<<blocks, 512>>>(a, c, words); });
    add_ = time_of([&] { add_words<<<blocks, 512>>>(a, b, c, words); });
    auto* sink = reinterpret_cast<unsigned*>(t_.scalars);
    read_ = time_of([&] { read_words<<<132 * 16, 512>>>(a, sink, words); });
    copy_ = copy.median < words_copy.median ? copy : words_copy;
    must(cudaGetLastError(), "yardsticks");
    const std::string shape = std::to_string(n_tok_) + "x" + std::to_string(vocab_);
    const auto note = [&](const char* name, const Times& ms, double passes) {
      Record r;
      r.shape = shape, r.dtype = name_of(dtype_), r.work = name, r.placement = "yardstick";
      r.kernel = "", r.ms = ms, r.bytes = passes * static_cast<double>(bytes_);
      r.yardstick = name, r.yardstick_ms = ms.median;
      print(r);
      records_.push_back(r);
    };
    note("cudaMemcpyAsync", copy, 2);
    note("copy kernel", words_copy, 2);
    note("add kernel", add_, 3);
    note("read kernel", read_, 1);
  }

  int64_t n_tok_, vocab_, bytes_ = 0;
  DType dtype_;
  std::vector<Record>& records_;
  Tensors t_;
  Times copy_, add_, read_;
};

void write_json(const char* path, const std::vector<Record>& records) {
  std::FILE* file = std::fopen(path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path);
    std::exit(1);
  }
  cudaDeviceProp device;
  must(cudaGetDeviceProperties(&device, 0), "device");
  std::fprintf(file, "{\"device\": \"%s\", \"records\": [", device.name);
  const char* separator = "\n";
  for (const Record& r : records) {
    std::fprintf(
        file,
        "%s{\"shape\": \"%s\", \"dtype\": \"%s\", \"work\": \"%s\", \"placement\": \"%s\", "
        "\"kernel\": \"%s\", \"cluster\": %d, \"warps\": %d, \"slots\": %d, "
        "\"ms\": %.5f, \"ms_low\": %.5f, \"ms_high\": %.5f, \"gb_per_s\": %.1f, "
        "\"yardstick\": \"%s\", \"times_yardstick\": %.4f}",
        separator, r.shape.c_str(), r.dtype.c_str(), r.work.c_str(), r.placement.c_str(),
        r.kernel.c_str(), r.cluster, r.warps, r.slots, r.ms.median, r.ms.low, r.ms.high,
        r.bytes / r.ms.median / 1e6, r.yardstick.c_str(), r.ms.median / r.yardstick_ms);
    separator = ",\n";
  }
  std::fprintf(file, "\n]}\n");
  std::fclose(file);
}

const LossTerm kCe = term("ce", LossKind::kCrossEntropy), kZ = term("z", LossKind::kZLoss),
               kGrpo = term("grpo", LossKind::kGrpo), kGspo = term("gspo", LossKind::kGspo);

std::vector<Mix> label_mixes() {
  return {{"ce", {kCe}}, {"ce+z", {kCe, kZ}}, {"ce+z+grpo", {kCe, kZ, kGrpo}}};
}

std::vector<Mix> distillation_mixes() {
  const auto kd = [](Divergence d) { return term("kd", LossKind::kDistillation, d); };
  return {{"kd ce", {kd(Divergence::kCrossEntropy)}},
          {"kd forward", {kd(Divergence::kForwardKl)}},
          {"kd reverse", {kd(Divergence::kReverseKl)}},
          {"kd jensen-shannon", {kd(Divergence::kJensenShannon)}},
          {"kd forward+ce+z", {kd(Divergence::kForwardKl), kCe, kZ}},
          {"kd reverse+ce+z", {kd(Divergence::kReverseKl), kCe, kZ}}};
}

void measure_shape(Shapes& shape) {
  for (const Mix& mix : label_mixes()) {
    shape.measure(mix, Shapes::kOutOfPlace);
    shape.measure(mix, Shapes::kInPlace);
  }
  shape.measure({"ce", {kCe}}, Shapes::kForward);
  shape.measure({"ce+entropy", {kCe}, true}, Shapes::kOutOfPlace);
  shape.measure({"gspo", {kGspo}}, Shapes::kOutOfPlace);
  for (const Mix& mix : distillation_mixes()) shape.measure(mix, Shapes::kOutOfPlace);
  // Its student is tempered, its labels' is not.
  LossTerm tempered = distillation_mixes()[1].terms[0];
  tempered.temperature = tempered.student_temperature = 2;
  tempered.t_squared = true;
  shape.measure({"kd textbook+ce", {tempered, kCe}}, Shapes::kOutOfPlace);
  shape.measure(distillation_mixes()[2], Shapes::kForward);
  shape.measure({"ce", {kCe}}, Shapes::kOutOfPlace, "head_rows_sm80_streamed");
}

void sweep_shape(Shapes& shape) {
  const Mix ce_z = label_mixes()[1], forward = distillation_mixes()[1],
            mixed = distillation_mixes()[3];
  runs_of_each = 3;
  for (const int cluster : {1, 2, 3, 4, 8}) {
    for (const int slots : {2, 3, 4, 6}) {
      const cuda::Tuning tuning = {.cluster = cluster, .slots = slots};
      shape.measure(forward, Shapes::kOutOfPlace, "", tuning);
      if (cluster == 3) continue;  // for nothing else
      shape.measure(ce_z, Shapes::kOutOfPlace, "", tuning);
      shape.measure({"ce", {kCe}}, Shapes::kForward, "", tuning);
      shape.measure(forward, Shapes::kForward, "", tuning);
      shape.measure(mixed, Shapes::kOutOfPlace, "", tuning);
    }
  }
  runs_of_each = 15;
}

}  // namespace
}  // namespace ullage::bench

int main(int argc, char** argv) {
  using namespace ullage;
  bool sweep = false;
  int only = -1;
  const char* json = nullptr;
  for (int i = 1; i < argc; ++i) {
    if (std::string(argv[i]) == "--sweep") sweep = true;
    if (std::string(argv[i]) == "--shape" && i + 1 < argc) only = std::atoi(argv[++i]);
    if (std::string(argv[i]) == "--json" && i + 1 < argc) json = argv[++i];
  }
  std::vector<bench::Record> records;
  struct {
    int64_t n_tok, vocab;
    DType dtype;
  } const shapes[] = {
      {8192, 151936, DType::kBF16}, {16384, 32768, DType::kBF16}, {8192, 128256, DType::kBF16},
      {4096, 262144, DType::kBF16}, {4096, 151936, DType::kF32},  {16384, 50257, DType::kBF16},
      {65536, 8192, DType::kBF16},  {131072, 4096, DType::kBF16}, {262144, 1000, DType::kBF16},
      {262144, 256, DType::kBF16},  {8192, 100352, DType::kBF16}};
  int index = 0;
  for (const auto& [n_tok, vocab, dtype] : shapes) {
    if (only >= 0 && index++ != only) continue;
    bench::Shapes shape(n_tok, vocab, dtype, records);
    bench::measure_shape(shape);
    if (sweep && vocab >= 32768) bench::sweep_shape(shape);
    if (json != nullptr) bench::write_json(json, records);
  }
  return 0;
}
