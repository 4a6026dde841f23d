// Makes a compact panel (compact.h) of a whole one, in two steps: its size is known before it is
// written.
#pragma once
#include <cstdint>

#include "linear/linear.h"
#include "util/instruction_sets.h"

namespace penstock {

struct CompactPlan {
  // Exponents that have a code: these that follow each other, and 0 if they are not CODES.
  int64_t base, exponents;
  int64_t exceptions;
  int64_t begin;  // of the exceptions: byte of the weight
};

#define PENSTOCK_COMPACT_KERNELS                                                            \
  /* `panel`: (granules, PANEL, 4 B) of bfloat16. */                                        \
  CompactPlan plan_compact(const char* panel, int64_t granules);                            \
  /* To the places of panel `number` of `weight`. */                                        \
  void write_compact(const char* panel, int64_t granules, const CompactPlan&, char* weight, \
                     int64_t number);
PENSTOCK_DECLARE(PENSTOCK_COMPACT_KERNELS)
#undef PENSTOCK_COMPACT_KERNELS

}  // namespace penstock
