#include "cpu/worker_pool.h"

#include <cassert>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace ullage::cpu {
namespace {

// Inside one computation runs follow one another within some ten microseconds (a decode step is a
// few hundred of them), and waking a sleeper costs as much; so a waiter first spins for 20 to 40
// microseconds (a pause is 20 to 40 ns on recent x86) and only then sleeps in the kernel.
constexpr int kSpins = 1000;

void pause() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Returns once `value` is no longer `old`.
void wait_while(const std::atomic<uint32_t>& value, uint32_t old) {
  for (int i = 0; i < kSpins; ++i) {
    if (value.load(std::memory_order_acquire) != old) return;
    pause();
  }
  value.wait(old, std::memory_order_acquire);
}

}  // namespace

WorkerPool::WorkerPool(int n_threads) {
  assert(n_threads >= 1);
  threads_.reserve(static_cast<size_t>(n_threads) - 1);
  try {
    for (int worker = 1; worker < n_threads; ++worker) {
      threads_.emplace_back([this, worker] { serve(worker); });
    }
  } catch (...) {
    stop();
    throw;
  }
}

WorkerPool::~WorkerPool() { stop(); }

void WorkerPool::stop() {
  stopping_.store(true, std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void WorkerPool::claim_tasks(int worker) {
  while (true) {
    const int64_t task = next_task_.fetch_add(1, std::memory_order_relaxed);
    if (task >= n_tasks_) return;
    function_(context_, task, worker);
  }
}

void WorkerPool::serve(int worker) {
  uint32_t seen = 0;
  while (true) {
    wait_while(epoch_, seen);
    ++seen;  // `run` waits for every thread, so no epoch is ever skipped
    if (stopping_.load(std::memory_order_relaxed)) return;
    claim_tasks(worker);
    if (n_active_.fetch_sub(1, std::memory_order_acq_rel) == 1) n_active_.notify_one();
  }
}

void WorkerPool::run(int64_t n_tasks, TaskFunction function, void* context) {
  if (threads_.empty() || n_tasks <= 1) {
    for (int64_t task = 0; task < n_tasks; ++task) function(context, task, 0);
    return;
  }
  assert(n_active_.load(std::memory_order_relaxed) == 0 && "a task called run of its own pool");
  function_ = function;
  context_ = context;
  n_tasks_ = n_tasks;
  next_task_.store(0, std::memory_order_relaxed);
  n_active_.store(static_cast<uint32_t>(threads_.size()), std::memory_order_relaxed);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  claim_tasks(0);
  for (uint32_t active; (active = n_active_.load(std::memory_order_acquire)) != 0;) {
    wait_while(n_active_, active);
  }
}

}  // namespace ullage::cpu
