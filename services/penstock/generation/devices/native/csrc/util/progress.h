// Progress of a thread in its share of some work. Others take from it when they have done theirs.
#pragma once
#include <atomic>
#include <cstdint>

namespace penstock {

// Tasks taken from a share, by any thread. On a cache line of its own: every task is a write to it.
struct alignas(64) Progress {
  std::atomic<int64_t> next{0};
};

}  // namespace penstock
