// Threads that go through the stages of a forward pass together: waiting at a barrier between
// stages costs far less than waking threads.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <cstdint>

#include "util/prefetch.h"

namespace penstock {

class Barrier {
 public:
  // One of the threads says how many they are, before any of them waits.
  void set_threads(int threads) { threads_ = threads; }
  int threads() const { return threads_; }

  // No thread goes on before all are here; each then sees the writes of the others. Waits a few µs
  // in a loop that fetches lines of `prefetch`, then lets go of the core: another program may hold
  // the other thread up.
  void wait(Prefetch& prefetch) {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spin = 0; spin < SPINS; ++spin) {
      if (round_.load(std::memory_order_acquire) != round) return;
      if (!prefetch.fetch()) _mm_pause();
    }
    while (round_.load(std::memory_order_acquire) == round)
      round_.wait(round, std::memory_order_acquire);
  }

 private:
  static constexpr int SPINS = 4000;
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace penstock
