// Products of several weights in one parallel region.
#pragma once
#include <utility>
#include <vector>

#include "linear/linear_work.h"

namespace penstock {

// Products of several weights with the rows of each, as tasks shared by threads.
class ManyProducts {
 public:
  explicit ManyProducts(int64_t threads) : threads_(threads), progress_(threads) {}

  void add(const LinearArgs& args, int64_t rows, int64_t panels) {
    const LinearShare share(args, rows, panels, threads_);
    for (int64_t i = 0; i < share.blocks * share.parts; ++i)
      tasks_.emplace_back(int32_t(args_.size()), share.task(i));
    args_.push_back(args);
  }
  // One thread's part: a run of the tasks, which are in the order of the weights, then the rest of
  // other threads' tasks.
  void run(int64_t thread) {
    const int64_t count = tasks_.size();
    for (int64_t i = 0; i < threads_; ++i) {
      const int64_t owner = (thread + i) % threads_, first = count * owner / threads_,
                    end = count * (owner + 1) / threads_;
      for (int64_t task; (task = first + progress_[owner].next.fetch_add(1)) < end;)
        KERNEL(multiply)(args_[tasks_[task].first], tasks_[task].second);
    }
  }

 private:
  int64_t threads_;
  std::vector<LinearArgs> args_;
  std::vector<std::pair<int32_t, LinearTask>> tasks_;
  std::vector<Progress> progress_;
};

}  // namespace penstock
