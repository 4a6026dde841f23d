// The attention of a step, shared among threads: its tasks, and the scratch memory of one thread.
#pragma once
#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>
#include <vector>

#include "attention/attention.h"
#include "util/dispatch.h"
#include "util/progress.h"

namespace penstock {

// Key/value heads of a task of few rows: adjacent ones in memory together, if every thread still
// has an equal share.
inline int64_t heads_together(const AttentionArgs& args, int64_t rows, int64_t sequences,
                              int64_t threads) {
  for (int64_t heads = std::min<int64_t>(args.num_kv_heads, KERNEL(most_heads)(args, rows));
       heads > 1; --heads) {
    const int64_t tasks = sequences * (args.num_kv_heads / heads);
    if (args.num_kv_heads % heads == 0 && (tasks % threads == 0 || tasks >= 8 * threads))
      return heads;
  }
  return 1;
}

// Most rows of a task. Where sequences and key/value heads are fewer than threads, their rows are
// divided: each thread reads all keys then, but none is idle.
inline int64_t rows_of_task(const AttentionArgs& args, int64_t rows, int64_t sequences,
                            int64_t threads) {
  constexpr int64_t LEAST = 8;
  const int64_t alike = sequences * args.num_kv_heads;
  if (alike >= threads || rows <= LEAST) return MAX_TASK_ROWS;
  const int64_t parts = threads / alike, each = (rows + parts - 1) / parts;
  return std::min<int64_t>(MAX_TASK_ROWS, (each + LEAST - 1) / LEAST * LEAST);
}

// Rows of every sequence and key/value head, the largest task first, so that the last one to end is
// a small one. Any thread may take any task at any time after the step's keys and values are
// written.
inline std::vector<AttentionTask> attention_tasks(const AttentionArgs& args, int64_t sequences,
                                                  int64_t threads) {
  std::vector<AttentionTask> tasks;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t rows = int64_t(args.query_start[s + 1] - args.query_start[s]) *
                         (args.num_heads / args.num_kv_heads);
    const int64_t heads = heads_together(args, rows, sequences, threads),
                  most = rows_of_task(args, rows, sequences, threads);
    for (int64_t k = 0; k < args.num_kv_heads; k += heads)
      for (int64_t first = 0; first < rows; first += most) {
        const int count = int(std::min<int64_t>(most, rows - first));
        tasks.push_back({
            .seq = int(s),
            .kv_head = int(k),
            .first = first,
            .count = count,
            .heads = int(heads),
            .cost = int64_t(args.context_lens[s]) * (count + 16) * heads,
        });
      }
  }
  std::stable_sort(tasks.begin(), tasks.end(),
                   [](const auto& x, const auto& y) { return x.cost > y.cost; });
  return tasks;
}

// Tasks with one of these `count` rows of the step, which ascend.
inline std::vector<AttentionTask> tasks_of(const AttentionArgs& args,
                                           const std::vector<AttentionTask>& tasks,
                                           const int64_t* rows, int64_t count) {
  const int64_t group = args.num_heads / args.num_kv_heads;
  std::vector<AttentionTask> found;
  std::copy_if(
      tasks.begin(), tasks.end(), std::back_inserter(found), [&](const AttentionTask& task) {
        const int64_t start = args.query_start[task.seq], first = start + task.first / group,
                      last = start + (task.first + task.count - 1) / group;
        const int64_t* row = std::lower_bound(rows, rows + count, first);
        return row < rows + count && *row <= last;
      });
  return found;
}

// True when no sequence reads keys that another one writes in this step, and a task has all rows of
// its heads: then a task may write its keys and values itself, just before it reads them.
inline bool can_write_alone(const AttentionArgs& args, const std::vector<AttentionTask>& tasks,
                            const int64_t* slots, int64_t sequences, int64_t blocks) {
  for (const AttentionTask& task : tasks)
    if (task.count != (args.query_start[task.seq + 1] - args.query_start[task.seq]) *
                          (args.num_heads / args.num_kv_heads))
      return false;
  // Writer of each block, -1 between calls: a step pays for the blocks that it names, not for the
  // pool.
  thread_local std::vector<int32_t> writer;
  if (int64_t(writer.size()) < blocks) writer.resize(blocks, -1);
  bool is_alone = true;
  for (int64_t s = 0; s < sequences; ++s)
    for (int64_t row = args.query_start[s]; row < args.query_start[s + 1]; ++row) {
      int32_t& by = writer[slots[row] / args.block_size];
      is_alone = is_alone && (by < 0 || by == s);
      by = int32_t(s);
    }
  for (int64_t s = 0; s < sequences && is_alone; ++s) {
    const int32_t* table = args.block_tables + s * args.table_stride;
    // Blocks behind the window take no weight. They may be others' by now.
    const int64_t rows = args.query_start[s + 1] - args.query_start[s],
                  first = args.window > 0
                              ? std::max<int64_t>(0, args.context_lens[s] - rows - args.window + 1)
                              : 0;
    for (int64_t b = first / args.block_size;
         b * args.block_size < args.context_lens[s] && is_alone; ++b)
      is_alone = writer[table[b]] < 0 || writer[table[b]] == s;
  }
  for (int64_t row = args.query_start[0]; row < args.query_start[sequences]; ++row)
    writer[slots[row] / args.block_size] = -1;
  return is_alone;
}

// Scratch memory of the calling thread for attend().
inline void* attention_scratch() {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory(
      std::aligned_alloc(64, (std::max(PENSTOCK_WIDE::attention_scratch_bytes(),
                                       PENSTOCK_NARROW::attention_scratch_bytes()) +
                              63) /
                                 64 * 64));
  return memory.get();
}

// One thread's part of the tasks. Its own are at its number and then every `threads` further on, so
// that it knows the next one. After them it takes the rest of the other threads' tasks. `progress`
// is that of all threads. `rope`: what a task may write before it reads; null: nothing.
inline void attend_share(const AttentionArgs& args, const RopeArgs* rope,
                         const std::vector<AttentionTask>& tasks, Progress* progress,
                         Prefetch& prefetch, int64_t thread, int64_t threads) {
  void* memory = attention_scratch();
  const int64_t count = tasks.size();
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t owner = (thread + i) % threads;
    for (int64_t number; (number = owner + progress[owner].next.fetch_add(1) * threads) < count;) {
      const AttentionTask& task = tasks[number];
      const bool has_next = i == 0 && number + threads < count;
      if (rope != nullptr)
        KERNEL(rope)(*rope, args.query_start[task.seq], args.query_start[task.seq + 1],
                     task.kv_head, task.kv_head + task.heads);
      KERNEL(attend)(args, task, has_next ? &tasks[number + threads] : nullptr, prefetch, memory);
    }
  }
}

}  // namespace penstock
