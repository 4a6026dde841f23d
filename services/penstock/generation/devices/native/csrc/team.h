// Threads that go through the stages of a forward pass together: a barrier between stages costs far less than waking threads.
#pragma once
#include <immintrin.h>

#include <atomic>
#include <cstdint>

#include "ahead.h"

namespace penstock {


class Team {
 public:
  // To be said by one of them, before anybody waits.
  void gather(int threads) { threads_ = threads; }
  int threads() const { return threads_; }

  // Nobody goes on before everybody is here, and sees what the others wrote. Waits a few µs in a loop that fetches what is
  // `ahead`, then lets go of the core: what holds the other up may be another program.
  void wait(Ahead& ahead) {
    const uint32_t round = round_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == threads_) {
      arrived_.store(0, std::memory_order_relaxed);
      round_.fetch_add(1, std::memory_order_release);
      round_.notify_all();
      return;
    }
    for (int spin = 0; spin < SPINS; ++spin) {
      if (round_.load(std::memory_order_acquire) != round) return;
      if (!ahead.fetch()) _mm_pause();
    }
    while (round_.load(std::memory_order_acquire) == round) round_.wait(round, std::memory_order_acquire);
  }

 private:
  static constexpr int SPINS = 4000;
  int threads_ = 1;
  alignas(64) std::atomic<int> arrived_{0};
  alignas(64) std::atomic<uint32_t> round_{0};
};

}  // namespace penstock
