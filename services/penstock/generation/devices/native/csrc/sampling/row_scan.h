// One pass over a row of scores: the common part of the sampling kernels.
#pragma once
#include <cmath>
#include <limits>

#include "sampling/sampling.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

constexpr float INF = std::numeric_limits<float>::infinity();
// Ids per block: the weights of a block are summed first. The draw finds the block, then the id.
constexpr int BLOCK = 128;

// One bit per lane that is set in a comparison's result.
static inline uint32_t lanes(vi mask) {
#ifdef __aarch64__
  return vaddvq_u32((uint32x4_t)((vu)mask & vu{1, 2, 4, 8}));
#elif defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)mask);
#else
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#endif
}
// The scores of [i, i + L), -inf beyond the end.
static inline vf load_row(const float* scores, int64_t i, int64_t vocab) {
  if (i + L <= vocab) return load(scores + i);
  vf v = splat(-INF);
  for (int64_t l = 0; i + l < vocab; ++l) v[l] = scores[i + l];
  return v;
}

// exp((score - highest) / temperature): 1 for the highest score. The same to the last bit in every
// place that computes it.
struct Weights {
  vf highest, scale;
  Weights(float top, float temperature)
      : highest(splat(top)), scale(splat(float(1.4426950408889634 / temperature))) {}
  // The weight of a score as an exponent of 2, apart: the compiler must not reorder its uses in
  // different ways in different places.
  vf exponent(vf x) const { return apart((x - highest) * scale); }
  vf operator()(vf x) const { return exp2_nonpositive(exponent(x)); }
};

// The scores that a cut leaves, vector by vector.
struct Kept {
  vf at_least, above;
  int64_t last;
  explicit Kept(Cut cut)
      : at_least(splat(cut.lowest)),
        above(splat(std::nextafterf(cut.lowest, INF))),
        last(cut.last) {
    // Beyond the end of a row is -inf, which is never kept.
    if (cut.lowest == -INF) at_least = above = splat(-std::numeric_limits<float>::max());
  }
  vi operator()(vf x, int64_t i) const {
    if (i > last) return x >= above;
    if (i + L <= last + 1) return x >= at_least;
    vf lowest = above;
    for (int64_t l = 0; i + l <= last; ++l) lowest[l] = at_least[l];
    return x >= lowest;
  }
};

}  // namespace NS
}  // namespace penstock
