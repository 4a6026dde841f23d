// Arguments of the row-wise kernels, and the two builds of each: dispatch.h picks one at run time.
#pragma once
#include <cstddef>
#include <cstdint>

#include "util/instruction_sets.h"

namespace penstock {

struct NormArgs {
  void* hidden;
  const void* x;
  const void* weight;  // null: there is no norm
  void* out;
  int64_t width, out_stride;  // of `out`'s rows; the others lie side by side
  float eps;
  bool is_bf16;
  // The weights are float whatever the rows are, and the product is rounded once.
  bool rounds_once = false;
  // Of `x` before it is added: a norm (null: none), and a factor.
  const void* x_weight = nullptr;
  float x_factor = 1.0f;
  // `hidden` and `x` are float beside an `out` that is_bf16 tells of. The weights are bf16, or
  // float where rounds_once; nothing but `out` is rounded.
  bool is_float_stream = false;
  // Of the sum of `hidden` and `x`.
  float factor = 1.0f;

  // Nothing but `x` is added and one norm applied, in the rows' dtype.
  bool is_plain() const {
    return weight != nullptr && !is_float_stream && !rounds_once && x_weight == nullptr &&
           x_factor == 1.0f && factor == 1.0f;
  }
};

struct SiluArgs {
  const void* gate_up;
  void* out;
  int64_t width;
  bool is_bf16;
};

struct GateArgs {
  const void *gates, *x;
  void* out;
  int64_t width, gates_stride;
  int64_t stride;  // of the rows of `x` and `out`
  bool is_bf16;
};

#define PENSTOCK_KERNELS                                       \
  void add_norm(const NormArgs&, int64_t first, int64_t last); \
  void silu_mul(const SiluArgs&, int64_t first, int64_t last); \
  void sigmoid_mul(const GateArgs&, int64_t first, int64_t last);
PENSTOCK_DECLARE(PENSTOCK_KERNELS)
#undef PENSTOCK_KERNELS

}  // namespace penstock
