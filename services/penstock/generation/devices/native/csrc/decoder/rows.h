// Arguments of the row-wise kernels, and the two builds of each: dispatch.h picks one at run time.
#pragma once
#include <cstddef>
#include <cstdint>

namespace penstock {

struct NormArgs {
  void* hidden;
  const void* x;
  const void* weight;
  void* out;
  int64_t width, out_stride;  // of `out`'s rows; the others lie side by side
  float eps;
  bool is_bf16;
};

struct SiluArgs {
  const void* gate_up;
  void* out;
  int64_t width;
  bool is_bf16;
};

#define PENSTOCK_KERNELS                                       \
  void add_norm(const NormArgs&, int64_t first, int64_t last); \
  void silu_mul(const SiluArgs&, int64_t first, int64_t last);
namespace avx512 {
PENSTOCK_KERNELS
}
namespace avx2 {
PENSTOCK_KERNELS
}
#undef PENSTOCK_KERNELS

}  // namespace penstock
