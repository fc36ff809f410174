// The three products of a fused linear loss against OpenBLAS on the same threads, taken in turns in
// one run. One line per shape: our rate, its rate, and the ratio of the two over all three
// products.
//
//   logits   [n_tok][vocab]   = X [n_tok][d_model] W [vocab][d_model]^T
//   d_hidden [n_tok][d_model] = G [n_tok][vocab] W
//   d_weight [vocab][d_model] = G^T X
#include <benchmark/benchmark.h>
#include <cblas.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cpu/instruction_set.h"
#include "cpu/product.h"

namespace ullage::cpu {
namespace {

struct LossShape {
  int64_t n_tok, d_model, vocab;
};

void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, const ProductShape& s, const float* a,
          int64_t lda, const float* b, int64_t ldb, float* c) {
  cblas_sgemm(CblasRowMajor, ta, tb, static_cast<int>(s.m), static_cast<int>(s.n),
              static_cast<int>(s.k), 1.0f, a, static_cast<int>(lda), b, static_cast<int>(ldb), 0.0f,
              c, static_cast<int>(s.n));
}
void gemm(CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, const ProductShape& s, const double* a,
          int64_t lda, const double* b, int64_t ldb, double* c) {
  cblas_dgemm(CblasRowMajor, ta, tb, static_cast<int>(s.m), static_cast<int>(s.n),
              static_cast<int>(s.k), 1.0, a, static_cast<int>(lda), b, static_cast<int>(ldb), 0.0,
              c, static_cast<int>(s.n));
}

template <class T>
std::vector<T> filled(int64_t size) {
  std::vector<T> values(static_cast<size_t>(size));
  uint32_t state = 1;
  for (T& value : values) {
    state = state * 1664525u + 1013904223u;
    value = static_cast<T>(static_cast<int32_t>(state)) * static_cast<T>(0x1p-31);
  }
  return values;
}

double seconds_of(const std::function<void()>& work) {
  // OpenBLAS's threads spin for some 20 ms after a call, on the cores that the next one needs.
  std::this_thread::sleep_for(std::chrono::milliseconds(60));
  const auto start = std::chrono::steady_clock::now();
  work();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

template <class T>
void loss_products(benchmark::State& state, LossShape s, int n_threads) {
  const auto type = std::is_same_v<T, double> ? ElementType::kF64 : ElementType::kF32;
  const DType accumulate = std::is_same_v<T, double> ? DType::kF64 : DType::kF32;
  const std::vector<T> x = filled<T>(s.n_tok * s.d_model), w = filled<T>(s.vocab * s.d_model);
  const std::vector<T> g = filled<T>(s.n_tok * s.vocab);
  std::vector<T> logits(g.size()), d_hidden(x.size()), d_weight(w.size());
  WorkerPool pool(n_threads);
  openblas_set_num_threads(n_threads);

  const ProductShape shapes[] = {
      {s.n_tok, s.vocab, s.d_model}, {s.n_tok, s.d_model, s.vocab}, {s.vocab, s.d_model, s.n_tok}};
  int64_t bytes = 0;
  for (const ProductShape& shape : shapes) {
    bytes = std::max(bytes, product_workspace_bytes(shape, accumulate, n_threads));
  }
  const std::unique_ptr<std::byte[], void (*)(void*)> memory(
      static_cast<std::byte*>(
          std::aligned_alloc(4096, static_cast<size_t>((bytes + 4095) / 4096 * 4096))),
      std::free);
  const std::span<std::byte> workspace(memory.get(), static_cast<size_t>(bytes));
  const auto ours = [&](int i, const ProductOperand& a, const ProductOperand& b, T* c,
                        SumOrder order) {
    return [&, i, a, b, c, order] {
      product(shapes[i], a, b, c, shapes[i].n, false, order, workspace, pool);
    };
  };
  const auto theirs = [&](int i, CBLAS_TRANSPOSE ta, CBLAS_TRANSPOSE tb, const T* a, int64_t lda,
                          const T* b, int64_t ldb, T* c) {
    return [&, i, ta, tb, a, lda, b, ldb, c] { gemm(ta, tb, shapes[i], a, lda, b, ldb, c); };
  };
  const std::function<void()> our_work[] = {
      ours(0, {x.data(), type, s.d_model, 1}, {w.data(), type, 1, s.d_model}, logits.data(),
           SumOrder::kBlocks),
      ours(1, {g.data(), type, s.vocab, 1}, {w.data(), type, s.d_model, 1}, d_hidden.data(),
           SumOrder::kBlocks),
      ours(2, {g.data(), type, 1, s.vocab}, {x.data(), type, s.d_model, 1}, d_weight.data(),
           SumOrder::kChain)};
  const std::function<void()> their_work[] = {
      theirs(0, CblasNoTrans, CblasTrans, x.data(), s.d_model, w.data(), s.d_model, logits.data()),
      theirs(1, CblasNoTrans, CblasNoTrans, g.data(), s.vocab, w.data(), s.d_model,
             d_hidden.data()),
      theirs(2, CblasTrans, CblasNoTrans, g.data(), s.vocab, x.data(), s.d_model, d_weight.data())};

  // The least of the rounds: what the work costs when nobody else is on the machine.
  double our_best[3] = {1e9, 1e9, 1e9}, their_best[3] = {1e9, 1e9, 1e9};
  for (auto _ : state) {
    for (int i = 0; i < 3; ++i) {
      our_best[i] = std::min(our_best[i], seconds_of(our_work[i]));
      their_best[i] = std::min(their_best[i], seconds_of(their_work[i]));
    }
    state.SetIterationTime(our_best[0] + our_best[1] + our_best[2]);
  }
  const double flops = 2.0 * static_cast<double>(s.n_tok * s.d_model * s.vocab);
  const double our_total = our_best[0] + our_best[1] + our_best[2];
  const double their_total = their_best[0] + their_best[1] + their_best[2];
  state.counters["GF/s"] = 3 * flops / our_total * 1e-9;
  state.counters["OpenBLAS"] = 3 * flops / their_total * 1e-9;
  state.counters["ratio"] = their_total / our_total;
  const char* const names[] = {"logits", "d_hidden", "d_weight"};
  for (int i = 0; i < 3; ++i) state.counters[names[i]] = their_best[i] / our_best[i];
}

// One to eight rows times a weight [n][k] that lies along k: a decode step. The bytes of the weight
// over the time, beside the rate at which the same threads read the same memory.
void few_rows(benchmark::State& state, ElementType type, int64_t m, int n_threads) {
  const int64_t n = 32768, k = 2048;
  const int64_t weight_bytes = bytes_of(type, n * k);
  std::vector<uint64_t> w(static_cast<size_t>(weight_bytes / 8), 0x2c2c2c2c2c2c2c2cu);
  const std::vector<float> x = filled<float>(m * k);
  std::vector<float> y(static_cast<size_t>(m * n));
  WorkerPool pool(n_threads);
  const ProductShape shape{m, n, k};
  const int64_t bytes = product_workspace_bytes(shape, DType::kF32, n_threads);
  const std::unique_ptr<std::byte[], void (*)(void*)> memory(
      static_cast<std::byte*>(std::aligned_alloc(64, static_cast<size_t>(bytes))), std::free);

  const int64_t n_pieces = 16 * n_threads, piece = static_cast<int64_t>(w.size()) / n_pieces;
  std::vector<uint64_t> sums(static_cast<size_t>(n_pieces));
  const auto read = [&] {
    pool.run(n_pieces, [&](int64_t task, int) {
      uint64_t sum[8] = {};
      for (int64_t i = task * piece; i < (task + 1) * piece; i += 8) {
        for (int64_t j = 0; j < 8; ++j) sum[j] += w[static_cast<size_t>(i + j)];
      }
      for (uint64_t s : sum) sums[static_cast<size_t>(task)] += s;
    });
  };
  const auto multiply = [&] {
    product(shape, {x.data(), ElementType::kF32, k, 1}, {w.data(), type, 1, k}, y.data(), n, false,
            SumOrder::kBlocks, {memory.get(), static_cast<size_t>(bytes)}, pool);
  };
  double ours = 1e9, reading = 1e9;
  for (auto _ : state) {
    ours = std::min(ours, seconds_of(multiply));
    reading = std::min(reading, seconds_of(read));
    state.SetIterationTime(ours);
  }
  benchmark::DoNotOptimize(sums.data());
  state.counters["GB/s"] = static_cast<double>(weight_bytes) / ours * 1e-9;
  state.counters["read"] = static_cast<double>(weight_bytes) / reading * 1e-9;
  state.counters["ratio"] = reading / ours;
}

void add_benchmarks() {
  const auto add = [](const std::string& name, auto function, LossShape shape) {
    for (int n_threads : {1, 2}) {
      benchmark::RegisterBenchmark(
          (name + "/" + std::to_string(shape.n_tok) + "x" + std::to_string(shape.d_model) + "x" +
           std::to_string(shape.vocab) + "/threads:" + std::to_string(n_threads))
              .c_str(),
          function, shape, n_threads)
          ->UseManualTime()
          ->Unit(benchmark::kMillisecond)
          ->Iterations(3);
    }
  };
  add("f32", loss_products<float>, {256, 576, 49152});
  add("f32", loss_products<float>, {64, 4096, 32000});
  add("f32", loss_products<float>, {512, 1024, 151936});
  add("f64", loss_products<double>, {128, 576, 49152});

  const std::pair<const char*, ElementType> types[] = {
      {"f32", ElementType::kF32},   {"bf16", ElementType::kBF16}, {"f16", ElementType::kF16},
      {"q8_0", ElementType::kQ8_0}, {"q4_0", ElementType::kQ4_0}, {"q4_1", ElementType::kQ4_1}};
  for (const auto& [name, type] : types) {
    for (int64_t m : {1, 4, 8}) {
      for (int n_threads : {1, 2}) {
        benchmark::RegisterBenchmark((std::string("rows/") + name + "/m:" + std::to_string(m) +
                                      "/threads:" + std::to_string(n_threads))
                                         .c_str(),
                                     few_rows, type, m, n_threads)
            ->UseManualTime()
            ->Unit(benchmark::kMillisecond)
            ->Iterations(5);
      }
    }
  }
}

}  // namespace
}  // namespace ullage::cpu

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  benchmark::AddCustomContext("ullage", std::string(ullage::cpu::instruction_set()));
  benchmark::AddCustomContext(
      "openblas", std::string(openblas_get_config()) + ", core " + openblas_get_corename());
  ullage::cpu::add_benchmarks();
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
