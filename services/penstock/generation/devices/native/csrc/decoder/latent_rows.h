// The turned dims of compressed keys and of their queries.
#pragma once
#include <cstdint>

namespace penstock {

// Turns dim i with dim i + half; of bfloat16 every result is rounded, as torch does.
template <typename T>
inline void turn(T* x, const T* cos, const T* sin, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const T first = x[i], second = x[i + half];
    x[i] = first * cos[i] - second * sin[i];
    x[i + half] = second * cos[i] + first * sin[i];
  }
}

}  // namespace penstock
