// Threads that go through the stages of a forward pass together: waiting at a barrier between
// stages costs far less than waking threads.
#pragma once
#ifndef __aarch64__
#include <immintrin.h>
#endif

#include <atomic>
#include <cstdint>

#include "util/prefetch.h"

namespace penstock {

class Barrier {
 public:
  // One of the threads sets their number, before any of them waits.
  void set_threads(int threads) { threads_ = threads; }
  int threads() const { return threads_; }

  // No thread goes on before all are here; each then sees the writes of the others. Waits a few µs
  // in a loop that fetches lines of `prefetch`, then yields the core: another program may delay the
  // other thread.
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
      if (!prefetch.fetch()) pause();
    }
    while (round_.load(std::memory_order_acquire) == round)
      round_.wait(round, std::memory_order_acquire);
  }

 private:
  // A moment for the core's other thread.
  static void pause() {
#ifdef __aarch64__
    asm volatile("isb" ::: "memory");
#else
    _mm_pause();
#endif
  }

  static constexpr int SPINS = 4000;
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace penstock
