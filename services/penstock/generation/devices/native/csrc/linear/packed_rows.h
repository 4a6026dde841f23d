// Rows of a packed weight, for an embedding that shares it with the head.
#pragma once
#include <ATen/core/Tensor.h>

namespace penstock {

// (count, inputs): rows `ids` of a packed weight of `outputs` rows in bfloat16 or float32.
// IndexError for an id beyond them.
at::Tensor packed_rows(const at::Tensor& weight, const int64_t* ids, int64_t count, int64_t inputs,
                       int64_t outputs, bool bf16);

}  // namespace penstock
