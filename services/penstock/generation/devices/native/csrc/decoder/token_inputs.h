// Arguments of the kernels of tokens' vectors for each layer (layers/token_inputs.py), and the
// builds of each.
#pragma once
#include <cstdint>

#include "util/instruction_sets.h"

namespace penstock {

// out = gelu(gates) * x, row by row.
struct GeluTimesArgs {
  const void *gates, *x;
  void* out;
  int64_t width, gates_stride, x_stride, out_stride;
  const int64_t* x_rows;  // row of `x` of each row; null: its own
  bool is_bf16;
};

// A row of products becomes the vectors of all layers, in place or in `out`: of each layer's `dim`
// numbers the norm, joined with those of the table's row.
struct TokenInputArgs {
  const void *products, *rows;
  void* out;
  const float* weight;  // (dim), of the norm
  int64_t width, dim;   // of a row, and of a layer's part of it
  float eps;
  // Of the product before its norm, of the table's row, and of their sum.
  float product_factor, row_factor, factor;
  bool is_bf16;
};

#define PENSTOCK_TOKEN_KERNELS                                        \
  void gelu_times(const GeluTimesArgs&, int64_t first, int64_t last); \
  void token_inputs(const TokenInputArgs&, int64_t first, int64_t last);
PENSTOCK_DECLARE(PENSTOCK_TOKEN_KERNELS)
#undef PENSTOCK_TOKEN_KERNELS

}  // namespace penstock
