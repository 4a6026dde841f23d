// The operators of row-wise kernels that torch sees (torch.ops.penstock.*).
#include "decoder/rows.h"
#include "util/dispatch.h"

namespace penstock {
namespace {

at::Tensor add_rms_norm(at::Tensor& hidden, const at::Tensor& x, const at::Tensor& weight,
                        double eps) {
  TORCH_CHECK(hidden.is_contiguous() && x.is_contiguous() && hidden.sizes() == x.sizes() &&
              weight.is_contiguous());
  TORCH_CHECK(hidden.scalar_type() == x.scalar_type() && weight.numel() == hidden.size(-1) &&
              (hidden.scalar_type() == weight.scalar_type() || weight.scalar_type() == at::kFloat));
  auto out = at::empty_like(hidden);
  const NormArgs args{
      .hidden = hidden.data_ptr(),
      .x = x.const_data_ptr(),
      .weight = weight.const_data_ptr(),
      .out = out.data_ptr(),
      .width = hidden.size(-1),
      .out_stride = hidden.size(-1),
      .eps = float(eps),
      .is_bf16 = is_bf16(hidden),
      .rounds_once = hidden.scalar_type() != weight.scalar_type(),
  };
  at::parallel_for(0, hidden.size(0), grain(args.width),
                   [&](int64_t first, int64_t last) { KERNEL(add_norm)(args, first, last); });
  return out;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == x.size(-1) &&
              (x.scalar_type() == weight.scalar_type() || weight.scalar_type() == at::kFloat));
  auto out = at::empty_like(x);
  // Nothing is added, so x is only read.
  const NormArgs args{
      .hidden = const_cast<void*>(x.const_data_ptr()),
      .x = nullptr,
      .weight = weight.const_data_ptr(),
      .out = out.data_ptr(),
      .width = x.size(-1),
      .out_stride = x.size(-1),
      .eps = float(eps),
      .is_bf16 = is_bf16(x),
      .rounds_once = x.scalar_type() != weight.scalar_type(),
  };
  at::parallel_for(0, x.size(0), grain(args.width),
                   [&](int64_t first, int64_t last) { KERNEL(add_norm)(args, first, last); });
  return out;
}

at::Tensor silu_mul(const at::Tensor& gate_up) {
  TORCH_CHECK(gate_up.is_contiguous() && gate_up.size(1) % 2 == 0);
  auto out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
  const SiluArgs args{
      .gate_up = gate_up.const_data_ptr(),
      .out = out.data_ptr(),
      .width = out.size(1),
      .is_bf16 = is_bf16(gate_up),
  };
  at::parallel_for(0, out.size(0), grain(2 * args.width),
                   [&](int64_t first, int64_t last) { KERNEL(silu_mul)(args, first, last); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("add_rms_norm(Tensor(a!) hidden, Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
}

}  // namespace penstock
