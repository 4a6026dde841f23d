// The heads of a gated delta rule, shared among threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "decoder/delta.h"

namespace penstock {

// Heads of one sequence that a thread takes together.
struct HeadTask {
  int64_t sequence, first, last;
};

// Rows of a sequence from which on each of its heads is a task; and how many tasks there are for a
// thread, if the heads are enough.
constexpr int64_t LONG_ROWS = 8, TASKS_EACH = 4;

// All heads of all sequences, those of many rows first: a prompt beside sequences of one row takes
// most of the time, so threads could not share it by numbers of sequences.
inline std::vector<HeadTask> head_tasks(const int32_t* starts, int64_t sequences, int64_t heads,
                                        int64_t threads) {
  if (sequences == 0) return {};
  const int64_t wanted = TASKS_EACH * threads,
                parts = std::clamp<int64_t>((wanted + sequences - 1) / sequences, 1, heads);
  std::vector<HeadTask> tasks;
  for (const bool is_long : {true, false})
    for (int64_t s = 0; s < sequences; ++s) {
      if ((starts[s + 1] - starts[s] >= LONG_ROWS) != is_long) continue;
      const int64_t count = is_long ? heads : parts;
      for (int64_t part = 0; part < count; ++part)
        tasks.push_back({s, heads * part / count, heads * (part + 1) / count});
    }
  return tasks;
}

// Calls `work` with sequences and heads until no task is left; any number of threads may.
template <typename F>
void take_heads(const std::vector<HeadTask>& tasks, std::atomic<int64_t>& next, F work) {
  for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < int64_t(tasks.size());)
    for (int64_t head = tasks[i].first; head < tasks[i].last; ++head) work(tasks[i].sequence, head);
}

}  // namespace penstock
