// The losses at the head on the CPU, each beside its yardstick in the same run:
//   from_logits   against a copy of the logits (one read, one write) on the same threads; a
//                 distillation also against their sum with the teacher's (two reads, one write)
//   from_hidden   against OpenBLAS's three products (logits, d_hidden, d_weight), or its first
//                 where no gradient is asked for
#include <benchmark/benchmark.h>
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cpu/worker_pool.h"
#include "ullage/lossk/head.h"

namespace ullage::lossk {
namespace {

double seconds_of(const std::function<void()>& work) {
  // OpenBLAS's threads spin for some 20 ms after a call, on the cores that the next one needs.
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

using Memory = std::unique_ptr<std::byte[], void (*)(void*)>;

Memory memory_of(int64_t bytes) {
  const auto size = static_cast<size_t>((bytes + 4095) / 4096 * 4096);
  Memory memory(static_cast<std::byte*>(std::aligned_alloc(4096, size)), std::free);
  std::memset(memory.get(), 0, size);
  return memory;
}

std::vector<float> normals(int64_t size, float scale) {
  std::minstd_rand rng;
  std::vector<float> values(static_cast<size_t>(size));
  // A sum of four uniforms: near enough to a normal, and cheap.
  const auto uniform = [&] { return static_cast<float>(rng()) * (2.0f / 2147483648.0f) - 1.0f; };
  for (float& v : values) v = scale * (uniform() + uniform() + uniform() + uniform());
  return values;
}

HeadPlan planned(const Shape& shape, const HeadConfig& config, const Request& request,
                 const PlanLimits& limits) {
  Result<HeadPlan> plan = lossk::plan(shape, config, request, limits);
  if (!plan) {
    std::fprintf(stderr, "%s\n", plan.status().to_string().c_str());
    std::exit(1);
  }
  return *std::move(plan);
}

void check(const Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "%s\n", status.to_string().c_str());
  std::exit(1);
}

struct Batch {
  std::vector<int64_t> labels, segments;
  std::vector<float> minus, ones;

  explicit Batch(const Shape& shape)
      : labels(static_cast<size_t>(shape.n_tok)),
        segments(labels.size(), 0),
        minus(labels.size(), -10.0f),
        ones(labels.size(), 1.0f) {
    for (size_t i = 0; i < labels.size(); ++i) {
      labels[i] = static_cast<int64_t>(i) * 7919 % shape.vocab;
    }
  }
  Inputs inputs() {
    Inputs in;
    const auto n = static_cast<int64_t>(labels.size());
    in.labels = {labels.data(), 8, n, 1};
    in.segments = {segments.data(), 8, n, 1};
    in.n_segments = 1;
    in.old_log_probs = {minus.data(), DType::kF32, n, 1};
    in.advantages = {ones.data(), DType::kF32, n, 1};
    return in;
  }
};

enum class Buffer { kNone, kOther, kInPlace };

void from_logits(benchmark::State& state, HeadConfig config, Shape shape, DType dtype,
                 Buffer gradient, int n_threads) {
  const int64_t count = shape.n_tok * shape.vocab, bytes = count * size_of(dtype);
  const std::vector<float> values = normals(count, 2);
  Memory source = memory_of(bytes), logits = memory_of(bytes), d_logits = memory_of(bytes);
  Memory teacher = memory_of(bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (dtype == DType::kF32) {
      reinterpret_cast<float*>(source.get())[i] = values[static_cast<size_t>(i)];
    } else {
      reinterpret_cast<BF16*>(source.get())[i] = BF16::from_float(values[static_cast<size_t>(i)]);
    }
  }
  for (Teacher& t : config.teachers) t = {.vocab = shape.vocab, .dtype = dtype};
  const bool distils = !config.teachers.empty();
  const HeadPlan plan =
      planned(shape, config,
              {.input_dtype = dtype, .grad_dtype = dtype, .d_logits = gradient != Buffer::kNone},
              {.n_threads = n_threads});
  Memory workspace = memory_of(plan.workspace_bytes());
  Batch batch(shape);
  Inputs in = batch.inputs();
  const auto matrix = [&](Memory& m) {
    return MutableMatrixView{m.get(), dtype, shape.n_tok, shape.vocab, shape.vocab};
  };
  in.logits = matrix(logits);
  if (distils) {
    in.teachers.resize(1);
    in.teachers[0].logits = matrix(teacher);
  }
  std::memcpy(teacher.get(), source.get(), static_cast<size_t>(bytes));
  double total = 0;
  Outputs out;
  out.total = &total;
  if (gradient != Buffer::kNone) {
    out.d_logits = matrix(gradient == Buffer::kInPlace ? logits : d_logits);
  }
  cpu::WorkerPool pool(n_threads);
  const auto copy = [&](Memory& to) {
    pool.run(shape.n_tok, [&](int64_t row, int) {
      const int64_t row_bytes = shape.vocab * size_of(dtype);
      std::memcpy(to.get() + row * row_bytes, source.get() + row * row_bytes,
                  static_cast<size_t>(row_bytes));
    });
  };
  // As floats, whatever they mean.
  const auto add = [&] {
    pool.run(shape.n_tok, [&](int64_t row, int) {
      const int64_t floats = shape.vocab * size_of(dtype) / 4;
      const auto* const a = reinterpret_cast<const float*>(source.get()) + row * floats;
      const auto* const b = reinterpret_cast<const float*>(teacher.get()) + row * floats;
      auto* const sum = reinterpret_cast<float*>(d_logits.get()) + row * floats;
      for (int64_t j = 0; j < floats; ++j) sum[j] = a[j] + b[j];
    });
  };
  double ours = 1e9, copying = 1e9, adding = 1e9;
  for (auto _ : state) {
    if (distils) adding = std::min(adding, seconds_of(add));
    copying = std::min(copying, seconds_of([&] { copy(logits); }));
    ours = std::min(
        ours, seconds_of([&] {
          check(plan.run(in, out, {workspace.get(), static_cast<size_t>(plan.workspace_bytes())}));
        }));
    state.SetIterationTime(ours);
  }
  benchmark::DoNotOptimize(total);
  const int moved = 1 + distils + (gradient != Buffer::kNone);
  state.counters["copy_GB/s"] = 2 * static_cast<double>(bytes) / copying * 1e-9;
  state.counters["GB/s"] = moved * static_cast<double>(bytes) / ours * 1e-9;
  state.counters["rate_ratio"] = moved * copying / (2 * ours);
  state.counters["ratio"] = copying / ours;
  if (distils) state.counters["add_ratio"] = adding / ours;
  state.counters["MiB"] = static_cast<double>(plan.workspace_bytes()) / 1048576.0;
}

void from_hidden(benchmark::State& state, HeadConfig config, Shape shape, bool gradient,
                 int n_threads) {
  const auto& [n_tok, d_model, vocab] = shape;
  std::vector<float> hidden = normals(n_tok * d_model, 1), weight = normals(vocab * d_model, 0.05f);
  std::vector<float> d_hidden(hidden.size()), d_weight(weight.size());
  const HeadPlan plan = planned(shape, config, {.d_hidden = gradient, .d_weight = gradient},
                                {.n_threads = n_threads});
  Memory workspace = memory_of(plan.workspace_bytes());
  Batch batch(shape);
  Inputs in = batch.inputs();
  in.hidden = {hidden.data(), DType::kF32, n_tok, d_model, d_model};
  in.weight = {weight.data(), DType::kF32, vocab, d_model, d_model};
  double total = 0;
  Outputs out;
  out.total = &total;
  if (gradient) {
    out.d_hidden = {d_hidden.data(), DType::kF32, n_tok, d_model, d_model};
    out.d_weight = {d_weight.data(), DType::kF32, vocab, d_model, d_model};
  }
  std::vector<float> logits(static_cast<size_t>(n_tok * vocab), 0.1f);
  openblas_set_num_threads(n_threads);
  const auto n = static_cast<int>(n_tok), d = static_cast<int>(d_model),
             v = static_cast<int>(vocab);
  const auto products = [&] {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, n, v, d, 1, hidden.data(), d,
                weight.data(), d, 0, logits.data(), v);
    if (!gradient) return;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, n, d, v, 1, logits.data(), v,
                weight.data(), d, 0, d_hidden.data(), d);
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, v, d, n, 1, logits.data(), v,
                hidden.data(), d, 0, d_weight.data(), d);
  };
  double ours = 1e9, theirs = 1e9;
  for (auto _ : state) {
    ours = std::min(
        ours, seconds_of([&] {
          check(plan.run(in, out, {workspace.get(), static_cast<size_t>(plan.workspace_bytes())}));
        }));
    theirs = std::min(theirs, seconds_of(products));
    state.SetIterationTime(ours);
  }
  benchmark::DoNotOptimize(total);
  state.counters["GF/s"] = plan.operations() / ours * 1e-9;
  state.counters["OpenBLAS"] = plan.operations() / theirs * 1e-9;
  state.counters["ratio"] = theirs / ours;
  state.counters["chunk"] = static_cast<double>(plan.chunk());
  state.counters["MiB"] = static_cast<double>(plan.workspace_bytes()) / 1048576.0;
}

void add_benchmarks() {
  const LossTerm ce{.name = "ce"};
  const LossTerm z{.name = "z", .kind = LossKind::kZLoss, .weight = 1e-4};
  const LossTerm grpo{.name = "grpo", .kind = LossKind::kGrpo};
  const auto distil = [](Divergence d) {
    return HeadConfig{.terms = {{.name = "kd", .kind = LossKind::kDistillation, .divergence = d}},
                      .teachers = {{}},
                      .options = {}};
  };
  const HeadConfig labels{.terms = {ce, z, grpo}, .teachers = {}, .options = {}};
  const HeadConfig only_ce{.terms = {ce}, .teachers = {}, .options = {}};
  const auto add = [](const std::string& name, auto&&... rest) {
    benchmark::RegisterBenchmark(name.c_str(), rest...)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond)
        ->Iterations(5);
  };
  const int t = 2;
  for (const Shape shape : {Shape{512, 0, 32000}, Shape{256, 0, 151936}}) {
    const std::string at = "/" + std::to_string(shape.n_tok) + "x" + std::to_string(shape.vocab);
    add("logits/ce+z+grpo/f32/in_place" + at, from_logits, labels, shape, DType::kF32,
        Buffer::kInPlace, t);
    add("logits/ce+z+grpo/f32/out_of_place" + at, from_logits, labels, shape, DType::kF32,
        Buffer::kOther, t);
    add("logits/ce+z+grpo/f32/forward" + at, from_logits, labels, shape, DType::kF32, Buffer::kNone,
        t);
    add("logits/ce+z+grpo/bf16/in_place" + at, from_logits, labels, shape, DType::kBF16,
        Buffer::kInPlace, t);
    add("logits/forward_kl/f32" + at, from_logits, distil(Divergence::kForwardKl), shape,
        DType::kF32, Buffer::kOther, t);
    add("logits/forward_kl/bf16" + at, from_logits, distil(Divergence::kForwardKl), shape,
        DType::kBF16, Buffer::kOther, t);
    add("logits/reverse_kl/f32" + at, from_logits, distil(Divergence::kReverseKl), shape,
        DType::kF32, Buffer::kOther, t);
    add("logits/jensen_shannon/f32" + at, from_logits, distil(Divergence::kJensenShannon), shape,
        DType::kF32, Buffer::kOther, t);
  }
  for (const Shape shape :
       {Shape{256, 576, 49152}, Shape{64, 4096, 32000}, Shape{512, 1024, 151936}}) {
    const std::string at = "/" + std::to_string(shape.n_tok) + "x" + std::to_string(shape.d_model) +
                           "x" + std::to_string(shape.vocab);
    add("hidden/ce/f32" + at, from_hidden, only_ce, shape, true, t);
    add("hidden/ce/f32/forward" + at, from_hidden, only_ce, shape, false, t);
  }
}

}  // namespace
}  // namespace ullage::lossk

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  ullage::lossk::add_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
