// The largest magnitude of a row, for a scale.
#pragma once
#include <algorithm>
#include <cmath>

#include "util/vec.h"

namespace penstock {
namespace NS {

// NaN where there is one.
template <typename T>
static float abs_max(const T* x, int64_t n) {
  vf most = vf{}, sum = vf{};
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    vf v = load(x + i);
    v = v < vf{} ? -v : v;
    most = v > most ? v : most;
    sum += v;
  }
  float result = 0, total = sum_all(sum);
  for (int l = 0; l < L; ++l) result = std::max(result, most[l]);
  for (; i < n; ++i) {
    const float v = std::fabs(to_float(x[i]));
    result = std::max(result, v);
    total += v;
  }
  return total != total ? total : result;
}

}  // namespace NS
}  // namespace penstock
