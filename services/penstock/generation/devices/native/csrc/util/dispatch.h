// The build of the kernels that this process uses: every ops_*.cpp calls them through KERNEL.
#pragma once
// Only the ATen operators called by name: ATen/ATen.h has all, and takes ten seconds per file.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <ATen/ops/tensor.h>
#include <torch/library.h>

#include <algorithm>

#include "util/instruction_sets.h"

namespace penstock {

// Set once when the library is loaded, changed only by tests.
extern bool wide;

#define KERNEL(name) (wide ? PENSTOCK_WIDE::name : PENSTOCK_NARROW::name)

inline bool is_bf16(const at::Tensor& x) {
  TORCH_CHECK(x.scalar_type() == at::kBFloat16 || x.scalar_type() == at::kFloat,
              "bfloat16 or float32, not ", x.dtype());
  return x.scalar_type() == at::kBFloat16;
}

// Rows of `width` elements: about this many elements are worth another thread.
constexpr int64_t GRAIN = 16384;
inline int64_t grain(int64_t width) { return std::max<int64_t>(1, GRAIN / width); }

}  // namespace penstock
