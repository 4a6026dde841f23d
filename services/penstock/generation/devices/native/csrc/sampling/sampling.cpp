// Rows of scores: the highest, sums of exponentials.
#include <algorithm>

#include "sampling/row_scan.h"

namespace penstock {
namespace NS {

float row_max(const float* scores, int64_t vocab) {
  vf a = splat(-INF), b = a;
  vi broken{};
  int64_t i = 0;
  for (; i + 2 * L <= vocab; i += 2 * L) {
    const vf x = load(scores + i), y = load(scores + i + L);
    a = x > a ? x : a;
    b = y > b ? y : b;
    broken |= (x != x) | (y != y);
  }
  for (; i < vocab; i += L) {
    const vf x = load_row(scores, i, vocab);
    a = x > a ? x : a;
    broken |= x != x;
  }
  if (lanes(broken)) return std::numeric_limits<float>::quiet_NaN();
  a = b > a ? b : a;
  float best = a[0];
  for (int l = 1; l < L; ++l) best = std::max(best, a[l]);
  return best;
}

namespace {

// Sum of exp(score - top).
double sum_of_weights(const float* scores, int64_t vocab, float top) {
  const Weights weights(top, 1.0f);
  double sum = 0;
  for (int64_t first = 0; first < vocab; first += BLOCK) {
    vf part{};
    for (int64_t i = first; i < std::min(first + BLOCK, vocab); i += L) {
      const vf x = load_row(scores, i, vocab);
      if (lanes(x > splat(-INF))) part += weights(x);
    }
    sum += sum_all(part);
  }
  return sum;
}

}  // namespace

double log_total(const float* scores, int64_t vocab) {
  const float top = row_max(scores, vocab);
  return top > -INF && top < INF ? top + std::log(sum_of_weights(scores, vocab, top)) : double(top);
}

}  // namespace NS
}  // namespace penstock
