// Products of heads with a weight of its own each, all of one size, shared by threads.
#pragma once
#include "linear/linear_work.h"

namespace penstock {

struct HeadProducts {
  // Of the first head; the others lie these bytes further on.
  LinearArgs args;
  int64_t x_step, weight_step, out_step;
  int64_t heads, panels;
};

// One thread's part: a run of the tasks, which are in the order of the heads, then the rest of
// other threads' tasks. `progress` is that of all threads.
inline void multiply_heads(const HeadProducts& of, int64_t rows, Progress* progress, int64_t thread,
                           int64_t threads) {
  const LinearShare share(of.args, rows, of.panels, threads);
  const int64_t each = share.blocks * share.parts, count = each * of.heads;
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t owner = (thread + i) % threads, first = count * owner / threads,
                  end = count * (owner + 1) / threads;
    for (int64_t task; (task = first + progress[owner].next.fetch_add(1)) < end;) {
      const int64_t head = task / each;
      LinearArgs args = of.args;
      args.x = (const char*)args.x + head * of.x_step;
      args.weight += head * of.weight_step;
      args.out = (char*)args.out + head * of.out_step;
      KERNEL(multiply)(args, share.task(task % each));
    }
  }
}

}  // namespace penstock
