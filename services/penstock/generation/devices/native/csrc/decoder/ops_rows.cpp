// The operators of row-wise kernels that torch sees (torch.ops.penstock.*).
#include "decoder/rows.h"
#include "util/dispatch.h"

namespace penstock {
namespace {

// Results of `x`'s rows are of its dtype, or of `dtype`: bfloat16 or float of a residual stream in
// float beside weights in bfloat16.
bool is_float_stream(const at::Tensor& x, const at::Tensor& weight,
                     std::optional<at::ScalarType> dtype) {
  return !is_bf16(x) && (is_bf16(weight) || dtype == at::kBFloat16);
}

NormArgs norm_args(const at::Tensor& x, const at::Tensor& weight, at::Tensor& out, double eps) {
  TORCH_CHECK(x.is_contiguous() && weight.is_contiguous() && weight.numel() == x.size(-1));
  const bool floats = is_float_stream(x, weight, out.scalar_type());
  TORCH_CHECK(floats || x.scalar_type() == out.scalar_type());
  TORCH_CHECK(floats || x.scalar_type() == weight.scalar_type() ||
              weight.scalar_type() == at::kFloat);
  return {
      // Where nothing is added it is only read.
      .hidden = const_cast<void*>(x.const_data_ptr()),
      .x = nullptr,
      .weight = weight.const_data_ptr(),
      .out = out.data_ptr(),
      .width = x.size(-1),
      .out_stride = x.size(-1),
      .eps = float(eps),
      .is_bf16 = is_bf16(out),
      .rounds_once = floats ? !is_bf16(weight) : x.scalar_type() != weight.scalar_type(),
      .is_float_stream = floats,
  };
}

void norm_rows(const NormArgs& args, int64_t rows) {
  at::parallel_for(0, rows, grain(args.width),
                   [&](int64_t first, int64_t last) { KERNEL(add_norm)(args, first, last); });
}

at::Tensor add_rms_norm(at::Tensor& hidden, const at::Tensor& x, const at::Tensor& weight,
                        double eps, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK(x.is_contiguous() && hidden.sizes() == x.sizes() &&
              hidden.scalar_type() == x.scalar_type());
  auto out = at::empty_like(hidden, hidden.options().dtype(dtype.value_or(hidden.scalar_type())));
  NormArgs args = norm_args(hidden, weight, out, eps);
  args.x = x.const_data_ptr();
  norm_rows(args, hidden.size(0));
  return out;
}

at::Tensor rms_norm(const at::Tensor& x, const at::Tensor& weight, double eps,
                    std::optional<at::ScalarType> dtype) {
  auto out = at::empty_like(x, x.options().dtype(dtype.value_or(x.scalar_type())));
  norm_rows(norm_args(x, weight, out, eps), x.size(0));
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

at::Tensor sigmoid_mul(const at::Tensor& gates, const at::Tensor& x) {
  TORCH_CHECK(gates.dim() == 2 && gates.sizes() == x.sizes() && gates.stride(1) == 1 &&
              x.is_contiguous() && gates.scalar_type() == x.scalar_type());
  auto out = at::empty_like(x);
  const GateArgs args{
      .gates = gates.const_data_ptr(),
      .x = x.const_data_ptr(),
      .out = out.data_ptr(),
      .width = x.size(1),
      .gates_stride = gates.stride(0),
      .stride = x.size(1),
      .is_bf16 = is_bf16(x),
  };
  at::parallel_for(0, x.size(0), grain(args.width),
                   [&](int64_t first, int64_t last) { KERNEL(sigmoid_mul)(args, first, last); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "add_rms_norm(Tensor(a!) hidden, Tensor x, Tensor weight, float eps, ScalarType? dtype=None) "
      "-> Tensor");
  m.def("rms_norm(Tensor x, Tensor weight, float eps, ScalarType? dtype=None) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def("sigmoid_mul(Tensor gates, Tensor x) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("add_rms_norm", add_rms_norm);
  m.impl("rms_norm", rms_norm);
  m.impl("silu_mul", silu_mul);
  m.impl("sigmoid_mul", sigmoid_mul);
}

}  // namespace penstock
