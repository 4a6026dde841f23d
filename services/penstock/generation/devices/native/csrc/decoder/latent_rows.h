// A token's row of compressed keys and values, and the turned dims of queries.
#pragma once
#include <cstdint>
#include <type_traits>

#include "decoder/rows.h"
#include "util/dispatch.h"

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

// Norms the latent at the beginning of a token's row, and turns the rest, in place.
template <typename T>
inline void finish_row(T* row, const at::Tensor& norm, float eps, const T* cos, const T* sin,
                       int64_t half) {
  constexpr bool is_bf16 = !std::is_same_v<T, float>;
  const int64_t rank = norm.numel();
  KERNEL(add_norm)({.hidden = row,
                    .x = nullptr,
                    .weight = norm.const_data_ptr(),
                    .out = row,
                    .width = rank,
                    .out_stride = rank,
                    .eps = eps,
                    .is_bf16 = is_bf16,
                    .rounds_once = is_bf16 && norm.scalar_type() == at::kFloat},
                   0, 1);
  turn(row + rank, cos, sin, half);
}

}  // namespace penstock
