// The operators of tokens' vectors for each layer that torch sees (torch.ops.penstock.*).
#include "decoder/token_inputs.h"
#include "util/dispatch.h"

namespace penstock {
namespace {

at::Tensor gelu_times(const at::Tensor& gates, const at::Tensor& x) {
  TORCH_CHECK(gates.dim() == 2 && gates.is_contiguous() && gates.sizes() == x.sizes() &&
              x.stride(1) == 1 && gates.scalar_type() == x.scalar_type());
  auto out = at::empty_like(gates);
  const GeluTimesArgs args{
      .gates = gates.const_data_ptr(),
      .x = x.const_data_ptr(),
      .out = out.data_ptr(),
      .width = gates.size(1),
      .gates_stride = gates.size(1),
      .x_stride = x.stride(0),
      .out_stride = gates.size(1),
      .x_rows = nullptr,
      .is_bf16 = is_bf16(gates),
  };
  at::parallel_for(0, gates.size(0), grain(args.width),
                   [&](int64_t first, int64_t last) { KERNEL(gelu_times)(args, first, last); });
  return out;
}

at::Tensor token_inputs(const at::Tensor& products, const at::Tensor& rows,
                        const at::Tensor& weight, double eps, double product_factor,
                        double row_factor, double factor) {
  TORCH_CHECK(products.dim() == 2 && products.is_contiguous() && rows.is_contiguous() &&
              products.sizes() == rows.sizes() && products.scalar_type() == rows.scalar_type());
  TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == at::kFloat && weight.numel() > 0 &&
              products.size(1) % weight.numel() == 0);
  auto out = at::empty_like(products);
  const TokenInputArgs args{
      .products = products.const_data_ptr(),
      .rows = rows.const_data_ptr(),
      .out = out.data_ptr(),
      .weight = weight.const_data_ptr<float>(),
      .width = products.size(1),
      .dim = weight.numel(),
      .eps = float(eps),
      .product_factor = float(product_factor),
      .row_factor = float(row_factor),
      .factor = float(factor),
      .is_bf16 = is_bf16(products),
  };
  at::parallel_for(0, products.size(0), grain(args.width),
                   [&](int64_t first, int64_t last) { KERNEL(token_inputs)(args, first, last); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("gelu_times(Tensor gates, Tensor x) -> Tensor");
  m.def(
      "token_inputs(Tensor products, Tensor rows, Tensor weight, float eps, float product_factor, "
      "float row_factor, float factor) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("gelu_times", gelu_times);
  m.impl("token_inputs", token_inputs);
}

}  // namespace penstock
