// How the attention of a step is shared among threads: the tasks of it, and the scratch memory of one thread.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "attention.h"
#include "dispatch.h"
#include "progress.h"

namespace penstock {

// Rows of every sequence and key/value head, the largest task first, so that the last one to end is a small one. Any thread may
// take any task at any time after the step's keys and values are written.
inline std::vector<AttentionTask> attention_tasks(const AttentionArgs& args, int64_t sequences) {
  std::vector<AttentionTask> tasks;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t rows = int64_t(args.query_start[s + 1] - args.query_start[s]) * (args.num_heads / args.num_kv_heads);
    for (int64_t k = 0; k < args.num_kv_heads; ++k)
      for (int64_t first = 0; first < rows; first += MAX_TASK_ROWS) {
        const int count = int(std::min<int64_t>(MAX_TASK_ROWS, rows - first));
        tasks.push_back({int(s), int(k), first, count, int64_t(args.context_lens[s]) * (count + 16)});
      }
  }
  std::stable_sort(tasks.begin(), tasks.end(), [](const auto& x, const auto& y) { return x.cost > y.cost; });
  return tasks;
}

// What attend() needs, of the calling thread.
inline void* attention_scratch() {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory(
      std::aligned_alloc(64, (std::max(avx512::attention_scratch_bytes(), avx2::attention_scratch_bytes()) + 63) / 64 * 64));
  return memory.get();
}

// One thread's part of the tasks: its own, which are those at its number and so many threads further on each time, so that it
// knows the next one; and then what others have left. `progress` is that of all threads.
inline void attend_share(const AttentionArgs& args, const std::vector<AttentionTask>& tasks, Progress* progress, int64_t thread, int64_t threads) {
  void* memory = attention_scratch();
  const int64_t count = tasks.size();
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t owner = (thread + i) % threads;
    for (int64_t task; (task = owner + progress[owner].next.fetch_add(1) * threads) < count;) {
      const bool has_next = i == 0 && task + threads < count;
      KERNEL(attend)(args, tasks[task], has_next ? &tasks[task + threads] : nullptr, memory);
    }
  }
}

}  // namespace penstock
