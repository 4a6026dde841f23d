// The kernels of sampling: each works on one row of V fp32 scores and keeps its data in a scratch
// of its thread, so that a row's result is independent of the batch and of the number of threads.
#pragma once
#include <cstdint>
#include <vector>

#include "util/instruction_sets.h"

namespace penstock {

struct Entry {
  float score, weight;
  int32_t id;
};
struct SamplingScratch {
  std::vector<Entry> entries, others;
  std::vector<double> sums;
  std::vector<float> maxima, ordered;
};

// Arguments of the warpers; off: infinite top_p, top_k and min_p of 0.
struct DrawArgs {
  const float* scores;
  int64_t vocab;
  float temperature;
  int64_t top_k;
  double top_p;
  double min_p;
  double uniform;
};
// The scores that the warpers leave: those above `lowest`, and the equal ones up to the id `last`.
struct Cut {
  float lowest;
  int64_t last;
};
struct Drawn {
  int64_t id;  // -1: the row has a NaN, +inf or nothing finite
  Cut cut;
  double log_total;  // log(sum(exp(score / temperature))) of the scores that are left
};

#define PENSTOCK_SAMPLING_KERNELS                                                       \
  /* NaN where the row has one. */                                                      \
  float row_max(const float* scores, int64_t vocab);                                    \
  double log_total(const float* scores, int64_t vocab);                                 \
  Drawn draw(const DrawArgs&, SamplingScratch&);                                        \
  void warp(float* scores, const DrawArgs&, int64_t keep, SamplingScratch&);            \
  int64_t top_noisy(const float* scores, int64_t vocab, uint64_t stream, int64_t count, \
                    double* keys, int64_t* ids);                                        \
  bool is_in_head(int64_t n, int64_t count, uint32_t seed, int64_t id);
PENSTOCK_DECLARE(PENSTOCK_SAMPLING_KERNELS)
#undef PENSTOCK_SAMPLING_KERNELS

}  // namespace penstock
