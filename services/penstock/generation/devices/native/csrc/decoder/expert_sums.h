// Arguments of the kernel that sums up a row's experts, and the two builds of it.
#pragma once
#include <cstdint>

#include "util/instruction_sets.h"

namespace penstock {

// The products of a row's experts times its shares in them, in their order, and then of one more
// expert.
struct ExpertSumArgs {
  const float* products;  // (any, width)
  const int64_t* places;  // of each expert's product among them
  const float* shares;
  int64_t experts, width;
  // The product of the one more, and the share in it; null: there is none.
  const float* added;
  float added_share;
  float* out;  // (width)
};

#define PENSTOCK_EXPERT_KERNELS               \
  /* Fills numbers [first, last) of `out`. */ \
  void sum_experts(const ExpertSumArgs&, int64_t first, int64_t last);
PENSTOCK_DECLARE(PENSTOCK_EXPERT_KERNELS)
#undef PENSTOCK_EXPERT_KERNELS

}  // namespace penstock
