// Sums of a row's experts. Each product is rounded before it is added, as torch does.
#include "decoder/expert_sums.h"

#include <algorithm>

namespace penstock {
namespace NS {

void sum_experts(const ExpertSumArgs& a, int64_t first, int64_t last) {
  std::fill(a.out + first, a.out + last, 0.0f);
  for (int64_t i = 0; i < a.experts; ++i) {
    const float *from = a.products + a.places[i] * a.width, share = a.shares[i];
    for (int64_t d = first; d < last; ++d) a.out[d] += share * from[d];
  }
  if (a.added == nullptr) return;
  for (int64_t d = first; d < last; ++d) a.out[d] += a.added_share * a.added[d];
}

}  // namespace NS
}  // namespace penstock
