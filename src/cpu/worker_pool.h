// A fixed set of threads that run numbered tasks. Owned by a context; there is no global pool.
#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <type_traits>
#include <vector>

namespace ullage::cpu {

class WorkerPool {
 public:
  // The caller of `run` is worker 0, so n_threads - 1 threads are started; n_threads >= 1.
  // Throws std::system_error where the system refuses a thread.
  explicit WorkerPool(int n_threads);
  ~WorkerPool();
  WorkerPool(const WorkerPool&) = delete;
  WorkerPool& operator=(const WorkerPool&) = delete;

  int n_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Called once for every task in [0, n_tasks), with worker in [0, n_threads()); must not throw.
  using TaskFunction = void (*)(void* context, int64_t task, int worker);

  // Runs every task and returns when all are done; what a task wrote is visible to the caller.
  // Tasks are claimed in ascending order. Allocates nothing. One run at a time: a task must not
  // call `run` of its own pool (asserted). A pool of one thread runs inline and keeps no state, so
  // it may be used from any thread, including inside another pool's task.
  void run(int64_t n_tasks, TaskFunction function, void* context);

  // The same, with any callable of (int64_t task, int worker).
  template <class Callable>
  void run(int64_t n_tasks, Callable&& callable) {
    using Object = std::remove_reference_t<Callable>;
    run(
        n_tasks,
        [](void* context, int64_t task, int worker) {
          (*static_cast<Object*>(context))(task, worker);
        },
        const_cast<void*>(static_cast<const void*>(&callable)));
  }

 private:
  void stop();
  void serve(int worker);
  void claim_tasks(int worker);

  // The job. Written by `run` before `epoch_` moves, read by workers after they see it move.
  TaskFunction function_ = nullptr;
  void* context_ = nullptr;
  int64_t n_tasks_ = 0;

  // Each on its own cache line: they are written by different threads.
  alignas(64) std::atomic<int64_t> next_task_{0};
  alignas(64) std::atomic<uint32_t> epoch_{0};  // one more for every run, and for the end
  alignas(64) std::atomic<uint32_t> n_active_{
      0};  // started threads that have not finished this run
  std::atomic<bool> stopping_{false};
  std::vector<std::thread> threads_;
};

}  // namespace ullage::cpu
