// What an embedding that shares its weight with the head looks up.
#pragma once
#include <ATen/ATen.h>

namespace penstock {

// (N, inputs): rows `ids` (N, int64) of a packed weight in bfloat16 or float32 with so many outputs. IndexError for an id beyond them.
at::Tensor packed_rows(const at::Tensor& weight, const at::Tensor& ids, int64_t inputs, int64_t outputs, bool bf16);

}  // namespace penstock
