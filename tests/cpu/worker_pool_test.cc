#include "cpu/worker_pool.h"

#include <gtest/gtest.h>

#include <vector>

namespace ullage::cpu {
namespace {

TEST(WorkerPool, RunsEveryTaskOnceForAnyCountOfThreadsAndTasks) {
  for (int n_threads = 1; n_threads <= 8; ++n_threads) {
    WorkerPool pool(n_threads);
    ASSERT_EQ(pool.n_threads(), n_threads);
    for (int64_t n_tasks : {0, 1, 2, n_threads - 1, n_threads, n_threads + 1, 257}) {
      std::vector<int> times(static_cast<size_t>(n_tasks), 0);  // not atomic: TSan is the witness
      std::vector<int64_t> done(static_cast<size_t>(n_threads), 0);
      pool.run(n_tasks, [&](int64_t task, int worker) {
        ++times.at(static_cast<size_t>(task));
        ++done.at(static_cast<size_t>(worker));
      });
      int64_t total = 0;
      for (int64_t count : done) total += count;
      EXPECT_EQ(total, n_tasks);
      EXPECT_EQ(times, std::vector<int>(static_cast<size_t>(n_tasks), 1));
    }
  }
}

TEST(WorkerPool, RunsFollowOneAnotherAndSeeWhatTheLastOneWrote) {
  WorkerPool pool(3);
  std::vector<int64_t> value(64, 0);
  for (int64_t round = 0; round < 2000; ++round) {
    pool.run(64, [&](int64_t task, int) {
      const size_t from = static_cast<size_t>((task + 1) % 64);
      // Odd rounds read what even rounds wrote, at another worker's place.
      if (round % 2 == 0)
        value[static_cast<size_t>(task)] = round + task;
      else
        EXPECT_EQ(value[from], round - 1 + static_cast<int64_t>(from));
    });
  }
}

TEST(WorkerPool, APoolOfOneThreadRunsInsideAnotherPoolsTask) {
  WorkerPool outer(4), inner(1);
  std::vector<int64_t> sums(32, 0);
  outer.run(32, [&](int64_t task, int) {
    int64_t sum = 0;
    inner.run(10, [&](int64_t i, int worker) { sum += i + worker; });
    sums[static_cast<size_t>(task)] = sum;
  });
  EXPECT_EQ(sums, std::vector<int64_t>(32, 45));
}

TEST(WorkerPool, StartsAndStopsWithoutARun) {
  for (int i = 0; i < 50; ++i) WorkerPool pool(5);
}

#if !defined(NDEBUG) && GTEST_HAS_DEATH_TEST
TEST(WorkerPoolDeathTest, ATaskMayNotRunItsOwnPool) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  EXPECT_DEATH(
      {
        WorkerPool pool(2);
        pool.run(2, [&](int64_t, int) { pool.run(2, [](int64_t, int) {}); });
      },
      "its own pool");
}
#endif

}  // namespace
}  // namespace ullage::cpu
