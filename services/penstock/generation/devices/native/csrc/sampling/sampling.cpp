// Rows of scores: the highest, sums of exponentials, ranks.
#include <algorithm>

#include "sampling/row_scan.h"

namespace penstock {
namespace NS {

ArgMax argmax(const float* scores, int64_t vocab) {
  constexpr int64_t PART = 4096;
  ArgMax best{-INF, 0};
  int64_t part = 0;
  vi broken{};
  for (int64_t first = 0; first < vocab; first += PART) {
    const int64_t end = std::min(first + PART, vocab);
    vf a = splat(-INF), b = a;
    int64_t i = first;
    for (; i + 2 * L <= end; i += 2 * L) {
      const vf x = load(scores + i), y = load(scores + i + L);
      a = x > a ? x : a;
      b = y > b ? y : b;
      broken |= (x != x) | (y != y);
    }
    for (; i < end; i += L) {
      const vf x = load_row(scores, i, end);
      a = x > a ? x : a;
      broken |= x != x;
    }
    a = b > a ? b : a;
    for (int l = 0; l < L; ++l)
      if (a[l] > best.score) best.score = a[l], part = first;
  }
  if (lanes(broken)) return {std::numeric_limits<float>::quiet_NaN(), 0};
  best.id = std::find(scores + part, scores + vocab, best.score) - scores;
  if (best.id == vocab) best.id = 0;
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
  const float top = argmax(scores, vocab).score;
  return top > -INF && top < INF ? top + std::log(sum_of_weights(scores, vocab, top)) : double(top);
}

int64_t num_higher(const float* scores, int64_t vocab, float than) {
  vi found{};
  for (int64_t i = 0; i < vocab; i += L) found -= load_row(scores, i, vocab) > splat(than);
  int64_t sum = 0;
  for (int l = 0; l < L; ++l) sum += found[l];
  return sum;
}

void log_softmax(float* scores, int64_t vocab) {
  const float top = argmax(scores, vocab).score;
  // A row that no number can come of: NaN everywhere, as torch has it.
  const bool is_fine = top > -INF && top < INF;
  const float rest = is_fine ? float(std::log(sum_of_weights(scores, vocab, top)))
                             : std::numeric_limits<float>::quiet_NaN();
  int64_t i = 0;
  for (; i + L <= vocab; i += L)
    store_all(scores + i, (load(scores + i) - splat(top)) - splat(rest));
  for (; i < vocab; ++i) scores[i] = (scores[i] - top) - rest;
}

}  // namespace NS
}  // namespace penstock
