// Arguments of the gated delta rule's kernels (delta.cpp).
#pragma once
#include <cstddef>
#include <cstdint>

#include "util/instruction_sets.h"

namespace penstock {

// Rows that a head takes through its columns together.
constexpr int DELTA_RUN = 64;

struct DeltaArgs {
  // (rows, channels + values) and (rows, 2 value_heads): what the convolution reads and the gates
  // of the result; b and a.
  const void *mixed, *numbers;
  int64_t mixed_stride, numbers_stride;
  // (kernel, channels), (value_heads) each, (value_dim).
  const float *conv, *decay, *bias, *norm;
  float eps;
  bool is_bf16;
  int key_heads, value_heads, key_dim, value_dim, kernel;
  // By slot: (kernel - 1, channels) rows before, of the rows' dtype; (value_heads, key_dim,
  // value_dim).
  void* before;
  float* states;
  int64_t before_stride, state_stride;
  // By sequence: its slot, where its rows begin (one more than sequences), the number of them that
  // its state is kept after, and 1 for a sequence that begins with them.
  const int64_t* slots;
  const int32_t* query_start;
  const int64_t *kept, *is_new;
  // (rows, channels), and (rows, values).
  float *turned, *summed;
  void* out;
  int64_t out_stride;

  int64_t keys() const { return int64_t(key_heads) * key_dim; }
  int64_t values() const { return int64_t(value_heads) * value_dim; }
  int64_t channels() const { return 2 * keys() + values(); }
  // Heads of queries, of keys and of values.
  int turned_heads() const { return 2 * key_heads + value_heads; }
};

// convolve_head: the convolution of one head's channels over a sequence's rows; queries and keys
// get the length 1. delta_head: one value head of a sequence, with its norm and gate.
#define PENSTOCK_KERNELS                                                \
  void convolve_head(const DeltaArgs&, int64_t sequence, int64_t head); \
  void delta_head(const DeltaArgs&, int64_t sequence, int64_t head);
PENSTOCK_DECLARE(PENSTOCK_KERNELS)
#undef PENSTOCK_KERNELS

}  // namespace penstock
