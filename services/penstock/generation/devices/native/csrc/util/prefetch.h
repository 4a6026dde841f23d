// Memory that a thread will read next, fetched into its second-level cache while the thread waits.
#pragma once
#include <cstdint>

namespace penstock {

class Prefetch {
 public:
  Prefetch() = default;
  Prefetch(const char* from, int64_t bytes) : at_(from), end_(from + bytes) {}

  // One line; whether there was one left.
  bool fetch() {
    if (at_ >= end_) return false;
    __builtin_prefetch(at_, 0, 2);
    at_ += 64;
    return true;
  }
  void fetch(int lines) {
    for (; lines > 0 && fetch(); --lines) {}
  }

 private:
  const char* at_ = nullptr;
  const char* end_ = nullptr;
};

}  // namespace penstock
