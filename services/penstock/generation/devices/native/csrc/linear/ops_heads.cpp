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
  const bool bf16 = is_bf16(x);
  const Format format = bf16 ? Format::BF16 : Format::F32;
  TORCH_CHECK(x.dim() == 3 && out.dim() == 3 && x.stride(2) == 1 && out.stride(2) == 1 &&
                  x.size(0) == out.size(0) && x.size(1) == out.size(1) &&
                  x.scalar_type() == out.scalar_type(),
              "rows and outputs are of the same heads and dtype");
  const int64_t rows = x.size(0), heads = x.size(1), inputs = x.size(2), outputs = out.size(2),
                granule = granule_inputs(format), granules = granules_of(format, inputs),
                panels = (outputs + PANEL - 1) / PANEL, bytes = granules * PANEL * 4 * panels;
  TORCH_CHECK(inputs % granule == 0 && x.stride(0) % granule == 0 && x.stride(1) % granule == 0 &&
                  (uintptr_t)x.const_data_ptr() % 4 == 0,
              "a head's inputs are whole granules");
  TORCH_CHECK(out.stride(1) >= outputs && (rows < 2 || out.stride(0) >= heads * outputs),
              "outputs overlap");
  TORCH_CHECK(weights.is_contiguous() && weights.scalar_type() == at::kByte &&
                  weights.numel() == heads * bytes,
              "the weights have the wrong size");
  if (rows == 0) return;
  const int64_t threads = at::get_num_threads(), size = x.element_size();
  const HeadProducts products{
      .args =
          {
              .format = format,
              .x = x.const_data_ptr(),
              .x_stride = x.stride(0) / granule,
              .weight = (const char*)weights.const_data_ptr(),
              .granules = granules,
              .bias = nullptr,
              .row_scale = nullptr,
              .column_scale = nullptr,
              .scale_is_bytes = false,
              .column_sum = nullptr,
              .column_offset = nullptr,
              .row_sum = nullptr,
              .out = out.data_ptr(),
              .width = outputs,
              .out_stride = out.stride(0),
              .out_bf16 = bf16,
              .gate = Gate::NONE,
          },
      .x_step = x.stride(1) * size,
      .weight_step = bytes,
      .out_step = out.stride(1) * size,
      .heads = heads,
      .panels = panels,
  };
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
