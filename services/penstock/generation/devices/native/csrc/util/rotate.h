// Blocks of a row turned by a Hadamard matrix, before the row is rounded: an outlier is spread over
// its block, and the scale of the row becomes finer. The product of two rows turned in the same way
// is that of the rows, times the block.
#pragma once
#include <cstdint>
#include <utility>

#include "util/vec.h"

namespace penstock {
namespace NS {

// Sums and differences of the lanes S apart; the sum is where the lower of the two was.
template <int S, int... l>
static inline vf exchange_lanes(vf v, std::integer_sequence<int, l...>) {
  const vi other = {(l ^ S)...}, sign = {((l & S) != 0 ? INT32_MIN : 0)...};
  return __builtin_shuffle(v, other) + (vf)((vi)v ^ sign);
}

// The stages within vectors and then between them: sums have one order with any instruction set.
template <int S, int N>
static inline void rotate_vectors(vf (&v)[N]) {
  if constexpr (S < L) {
    for (int i = 0; i < N; ++i)
      v[i] = exchange_lanes<S>(v[i], std::make_integer_sequence<int, L>{});
  } else {
    for (int i = 0; i < N; ++i)
      if ((i & (S / L)) == 0) {
        const vf low = v[i], high = v[i + S / L];
        v[i] = low + high, v[i + S / L] = low - high;
      }
  }
  if constexpr (S * 2 < N * L) rotate_vectors<S * 2>(v);
}

template <int BLOCK, typename T>
static float rotate_blocks(const T* x, int64_t n, float* out) {
  constexpr int N = BLOCK / L;
  vf most = {}, sum = {};
  for (int64_t i = 0; i < n; i += BLOCK) {
    vf v[N];
#pragma GCC unroll 16
    for (int k = 0; k < N; ++k) v[k] = load(x + i + k * L);
    rotate_vectors<1>(v);
#pragma GCC unroll 16
    for (int k = 0; k < N; ++k) {
      store_all(out + i + k * L, v[k]);
      const vf size = v[k] < vf{} ? -v[k] : v[k];
      most = size > most ? size : most;
      sum += size;
    }
  }
  const float total = sum_all(sum);
  if (total != total) return total;
  float result = 0;
  for (int l = 0; l < L; ++l) result = result < most[l] ? most[l] : result;
  return result;
}

// Turns the blocks of a row into `out`, which may be the row; `block` is one of turned_block.h. The
// largest magnitude of the result, NaN where there is one.
template <typename T>
static float rotate(const T* x, int64_t n, int64_t block, float* out) {
  if (block == 256) return rotate_blocks<256>(x, n, out);
  if (block == 128) return rotate_blocks<128>(x, n, out);
  if (block == 64) return rotate_blocks<64>(x, n, out);
  return block == 32 ? rotate_blocks<32>(x, n, out) : rotate_blocks<16>(x, n, out);
}

}  // namespace NS
}  // namespace penstock
