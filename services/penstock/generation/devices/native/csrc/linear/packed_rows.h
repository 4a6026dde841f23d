// A packed weight as a tensor: its panels, and its rows for an embedding that shares it with the
// head.
#pragma once
#include <ATen/core/Tensor.h>

#include "linear/linear.h"

namespace penstock {

// Panels of a weight with `width` results; gated: half of its outputs. -1: it has another size.
int64_t panels_of(const at::Tensor& weight, Format format, int64_t inputs, int64_t granules,
                  int64_t width, bool gated);

// True for a weight that compact.h describes: any other has its panels whole.
bool is_compact(const at::Tensor& weight, Format format, int64_t granules, int64_t panels);

// (count, inputs): rows `ids` of a packed weight of `outputs` rows in bfloat16 or float32.
// IndexError for an id beyond them.
at::Tensor packed_rows(const at::Tensor& weight, const int64_t* ids, int64_t count, int64_t inputs,
                       int64_t outputs, bool bf16);
// The same of a weight in blocks (gguf_blocks.h): its numbers in that dtype.
at::Tensor block_rows(const at::Tensor& weight, const int64_t* ids, int64_t count, int64_t inputs,
                      int64_t outputs, bool bf16);

}  // namespace penstock
