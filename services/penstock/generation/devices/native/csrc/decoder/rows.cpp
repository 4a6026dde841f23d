// Kernels that read and write each row once: RMSNorm with the residual, SwiGLU.
#include <cmath>

#include "decoder/rows.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// hidden += x, out = norm(hidden) * weight, with transformers' roundings.
template <typename T>
static void add_norm_row(T* hidden, const T* x, const T* weight, T* out, int64_t n, float eps) {
  vf squares = vf{};
  int64_t i = 0;
  float rest = 0;
  for (; i + L <= n; i += L) {
    vf h = load(hidden + i);
    if (x != nullptr) {
      h = rounded(h + load(x + i), hidden);
      store_all(hidden + i, h);
    }
    squares += h * h;
  }
  for (; i < n; ++i) {
    float h = to_float(hidden[i]);
    if (x != nullptr) {
      store(hidden + i, h + to_float(x[i]));
      h = to_float(hidden[i]);
    }
    rest += h * h;
  }
  float scale = 1.0f / std::sqrt((sum_all(squares) + rest) / float(n) + eps);
  i = 0;
  for (; i + L <= n; i += L)
    store_all(out + i, rounded(load(hidden + i) * splat(scale), hidden) * load(weight + i));
  for (; i < n; ++i) {
    T normed;
    store(&normed, to_float(hidden[i]) * scale);
    store(out + i, to_float(normed) * to_float(weight[i]));
  }
}

template <typename T>
static void silu_mul_row(const T* gate, const T* up, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + L <= n; i += L) store_all(out + i, rounded(silu(load(gate + i)), gate) * load(up + i));
  for (; i < n; ++i) {
    float g = to_float(gate[i]);
    T silu;
    store(&silu, g / (1.0f + std::exp(-g)));
    store(out + i, to_float(silu) * to_float(up[i]));
  }
}

void add_norm(const NormArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    int64_t at = row * a.width, to = row * a.out_stride;
    if (a.is_bf16)
      add_norm_row<bf16>((bf16*)a.hidden + at, a.x == nullptr ? nullptr : (const bf16*)a.x + at,
                         (const bf16*)a.weight, (bf16*)a.out + to, a.width, a.eps);
    else
      add_norm_row<float>((float*)a.hidden + at, a.x == nullptr ? nullptr : (const float*)a.x + at,
                          (const float*)a.weight, (float*)a.out + to, a.width, a.eps);
  }
}

void silu_mul(const SiluArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    if (a.is_bf16) {
      const bf16* gate = (const bf16*)a.gate_up + row * 2 * a.width;
      silu_mul_row<bf16>(gate, gate + a.width, (bf16*)a.out + row * a.width, a.width);
    } else {
      const float* gate = (const float*)a.gate_up + row * 2 * a.width;
      silu_mul_row<float>(gate, gate + a.width, (float*)a.out + row * a.width, a.width);
    }
  }
}

}  // namespace NS
}  // namespace penstock
