// Membership in the head of torch.randperm's permutation, without making the permutation: the
// watermark's green lists.
#include <algorithm>

#include "sampling/row_scan.h"

namespace penstock {
namespace NS {
namespace {

#ifdef __aarch64__
constexpr int D = 2;
#elif defined(__AVX512F__)
constexpr int D = 8;
#else
constexpr int D = 4;
#endif
typedef double vd __attribute__((vector_size(8 * D)));
typedef uint32_t vu_half __attribute__((vector_size(4 * D)));

vd rounded_to_integers(vd x) {
#ifdef __aarch64__
  return (vd)vrndnq_f64((float64x2_t)x);
#elif defined(__AVX512F__)
  return (vd)_mm512_roundscale_pd((__m512d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  return (vd)_mm256_round_pd((__m256d)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#endif
}

// MT19937, as at::CPUGeneratorImpl seeds and runs it: numbers in blocks.
struct Twister {
  static constexpr int N = 624, M = 397;
  uint32_t state[N], out[N];

  explicit Twister(uint32_t seed) {
    state[0] = seed;
    for (int i = 1; i < N; ++i)
      state[i] = 1812433253u * (state[i - 1] ^ (state[i - 1] >> 30)) + uint32_t(i);
  }
  static uint32_t twist(uint32_t a, uint32_t b) {
    const uint32_t y = (a & 0x80000000u) | (b & 0x7FFFFFFFu);
    return (y >> 1) ^ (-(y & 1) & 0x9908B0DFu);
  }
  void next_block() {
    for (int i = 0; i < N - M; ++i) state[i] = state[i + M] ^ twist(state[i], state[i + 1]);
    for (int i = N - M; i < N - 1; ++i) state[i] = state[i + M - N] ^ twist(state[i], state[i + 1]);
    state[N - 1] = state[M - 1] ^ twist(state[N - 1], state[0]);
    for (int i = 0; i < N; ++i) {
      uint32_t y = state[i];
      y ^= y >> 11;
      y ^= (y << 7) & 0x9D2C5680u;
      y ^= (y << 15) & 0xEFC60000u;
      out[i] = y ^ (y >> 18);
    }
  }
};

// True when numbers[i] % (n - i) == place - i for some i of [first, end): i and `place` are
// exchanged in that step.
bool is_hit(const uint32_t* numbers, int64_t first, int64_t end, int64_t n, int64_t place) {
  int64_t i = first;
  vd count, wanted;
  for (int l = 0; l < D; ++l) count[l] = double(n - i - l), wanted[l] = double(place - i - l);
  for (; i + D <= end; i += D, count -= double(D), wanted -= double(D)) {
    vu_half half;
    std::memcpy(&half, numbers + (i - first), sizeof(half));
    // Exact: a multiple of `count`, all below 2^53.
    const vd x = __builtin_convertvector(half, vd) - wanted;
    const auto equal = rounded_to_integers(x / count) * count == x;
    bool any = false;
    for (int l = 0; l < D; ++l) any |= equal[l] != 0;
    if (any) return true;
  }
  for (; i < end; ++i)
    if (int64_t(numbers[i - first] % uint32_t(n - i)) == place - i) return true;
  return false;
}

}  // namespace

// randperm exchanges place i with one of [i, n), for i from 0 on: after `count` steps its head is
// final. One id is followed.
bool is_in_head(int64_t n, int64_t count, uint32_t seed, int64_t id) {
  Twister twister(seed);
  const int64_t steps = std::min(count, n - 1);
  int64_t place = id, start = 0;
  for (int64_t base = 0; base < steps; base += Twister::N) {
    twister.next_block();
    for (;;) {
      const int64_t end = std::min({steps, place + 1, base + Twister::N}),
                    first = std::max(start, base);
      if (first < end && is_hit(twister.out + (first - base), first, end, n, place)) return true;
      if (place >= std::min(steps, base + Twister::N)) break;
      start = place + 1;
      place += twister.out[place - base] % uint32_t(n - place);
    }
  }
  return place < count;
}

}  // namespace NS
}  // namespace penstock
