// Products of heads, each with a weight of its own, in one parallel region:
// torch.ops.penstock.head_products.
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <vector>

#include "linear/head_work.h"
#include "linear/packed_rows.h"

namespace penstock {
namespace {

// `out` (T, heads, outputs) is filled by x (T, heads, inputs), both views with numbers side by side
// in a head. `weights`: the packed weight of each head, all of one size, one after another.
void head_products(const at::Tensor& x, const at::Tensor& weights, at::Tensor& out) {
  const Format format = is_bf16(x) ? Format::BF16 : Format::F32;
  TORCH_CHECK(x.dim() == 3 && out.dim() == 3 && x.stride(2) == 1 && out.stride(2) == 1 &&
                  x.size(0) == out.size(0) && x.size(1) == out.size(1) &&
                  x.scalar_type() == out.scalar_type(),
              "rows and outputs are of the same heads and dtype");
  const int64_t rows = x.size(0), heads = x.size(1), inputs = x.size(2), outputs = out.size(2),
                granule = granule_inputs(format);
  TORCH_CHECK(inputs % granule == 0 && x.stride(0) % granule == 0 && x.stride(1) % granule == 0 &&
                  (uintptr_t)x.const_data_ptr() % 4 == 0,
              "a head's inputs are whole granules");
  TORCH_CHECK(out.stride(1) >= outputs && (rows < 2 || out.stride(0) >= heads * outputs),
              "outputs overlap");
  TORCH_CHECK(weights.is_contiguous() && weights.scalar_type() == at::kByte &&
                  weights.numel() == heads * HeadProducts::weight_bytes(format, inputs, outputs),
              "the weights have the wrong size");
  if (rows == 0) return;
  const int64_t threads = at::get_num_threads();
  const HeadProducts products(
      format, {(void*)x.const_data_ptr(), x.stride(0), x.stride(1)}, weights.const_data_ptr(),
      {out.data_ptr(), out.stride(0), out.stride(1)}, heads, inputs, outputs);
  std::vector<Progress> progress(threads);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread)
      multiply_heads(products, rows, progress.data(), thread, threads);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("head_products(Tensor x, Tensor weights, Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("head_products", head_products); }

}  // namespace penstock
