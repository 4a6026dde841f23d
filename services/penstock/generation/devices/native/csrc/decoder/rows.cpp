// Kernels that read and write each row once: RMSNorm with the residual, SwiGLU.
#include <cmath>
#include <cstring>
#include <type_traits>

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

// Factor of a norm of `n` numbers, from their squares.
static float norm_scale(vf squares, float rest, int64_t n, float eps) {
  return 1.0f / std::sqrt((sum_all(squares) + rest) / float(n) + eps);
}
template <typename T>
static float norm_scale_of(const T* x, int64_t n, float eps) {
  vf squares = vf{};
  int64_t i = 0;
  float rest = 0;
  for (; i + L <= n; i += L) squares += load(x + i) * load(x + i);
  for (; i < n; ++i) rest += to_float(x[i]) * to_float(x[i]);
  return norm_scale(squares, rest, n, eps);
}

// A normed number times its weight: through T before the product where the weight is a T, else
// only after it.
template <typename T>
static vf weighted(vf x, const T* weight, const T* through) {
  return rounded(rounded(x, through) * load(weight), through);
}
static vf weighted(vf x, const float* weight, const bf16* through) {
  return rounded(x * load(weight), through);
}
template <typename T, typename W>
static float weighted(float x, const W* weight, const T*) {
  T value;
  if constexpr (std::is_same_v<T, W>) {
    store(&value, x);
    x = to_float(value);
  }
  store(&value, x * to_float(*weight));
  return to_float(value);
}

// A sum in T, times a factor.
template <typename T>
static vf times(vf sum, float factor, const T* through) {
  return factor == 1.0f ? sum : rounded(sum, through) * splat(factor);
}
template <typename T>
static float times(float sum, float factor, const T*) {
  if (factor == 1.0f) return sum;
  T value;
  store(&value, sum);
  return to_float(value) * factor;
}

// add_norm_row of layers that norm or multiply the addend, or have no norm before it.
// W: type of the weights.
template <typename T, typename W>
static void add_norm_row_of(const NormArgs& a, T* hidden, const T* x, T* out) {
  const int64_t n = a.width;
  const W *weight = (const W*)a.weight, *x_weight = (const W*)a.x_weight;
  int64_t i = 0;
  if (x != nullptr) {
    const float by = x_weight != nullptr ? norm_scale_of(x, n, a.eps) : a.x_factor;
    for (; i + L <= n; i += L) {
      const vf value = load(x + i) * splat(by);
      const vf added =
          x_weight != nullptr ? weighted(value, x_weight + i, hidden) : rounded(value, hidden);
      store_all(hidden + i, times(load(hidden + i) + apart(added), a.factor, hidden));
    }
    for (; i < n; ++i) {
      T value;
      store(&value, to_float(x[i]) * by);
      const float added = x_weight != nullptr ? weighted(to_float(x[i]) * by, x_weight + i, hidden)
                                              : to_float(value);
      store(hidden + i, times(to_float(hidden[i]) + apart(added), a.factor, hidden));
    }
  }
  if (weight == nullptr) {
    std::memcpy(out, hidden, sizeof(T) * n);
    return;
  }
  const float scale = norm_scale_of(hidden, n, a.eps);
  for (i = 0; i + L <= n; i += L)
    store_all(out + i, weighted(load(hidden + i) * splat(scale), weight + i, hidden));
  for (; i < n; ++i) store(out + i, weighted(to_float(hidden[i]) * scale, weight + i, hidden));
}

// The norm of a stream in float: hidden += x, out = norm(hidden) * weight.
// W: type of the weights. O: of `out`.
template <typename W, typename O>
static void add_norm_stream_row(const NormArgs& a, float* hidden, const float* x, O* out) {
  const int64_t n = a.width;
  const W *weight = (const W*)a.weight, *x_weight = (const W*)a.x_weight;
  vf squares = vf{};
  float rest = 0;
  int64_t i = 0;
  if (x != nullptr) {
    const float by = x_weight != nullptr ? norm_scale_of(x, n, a.eps) : a.x_factor;
    for (; i + L <= n; i += L) {
      vf value = load(x + i) * splat(by);
      if (x_weight != nullptr) value = value * load(x_weight + i);
      const vf sum = (load(hidden + i) + apart(value)) * splat(a.factor);
      store_all(hidden + i, sum);
      squares += sum * sum;
    }
    for (; i < n; ++i) {
      float value = x[i] * by;
      if (x_weight != nullptr) value = value * to_float(x_weight[i]);
      hidden[i] = (hidden[i] + apart(value)) * a.factor;
      rest += hidden[i] * hidden[i];
    }
  }
  if (weight == nullptr) {
    for (i = 0; i + L <= n; i += L) store_all(out + i, load(hidden + i));
    for (; i < n; ++i) store(out + i, hidden[i]);
    return;
  }
  const float scale =
      x == nullptr ? norm_scale_of(hidden, n, a.eps) : norm_scale(squares, rest, n, a.eps);
  for (i = 0; i + L <= n; i += L)
    store_all(out + i, load(hidden + i) * splat(scale) * load(weight + i));
  for (; i < n; ++i) store(out + i, hidden[i] * scale * to_float(weight[i]));
}

template <typename O>
static void add_norm_stream(const NormArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    float* hidden = (float*)a.hidden + row * a.width;
    const float* x = a.x == nullptr ? nullptr : (const float*)a.x + row * a.width;
    O* out = (O*)a.out + row * a.out_stride;
    a.rounds_once ? add_norm_stream_row<float>(a, hidden, x, out)
                  : add_norm_stream_row<bf16>(a, hidden, x, out);
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

template <typename T>
static void add_norm_rows_of(const NormArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    T *hidden = (T*)a.hidden + row * a.width, *out = (T*)a.out + row * a.out_stride;
    const T* x = a.x == nullptr ? nullptr : (const T*)a.x + row * a.width;
    a.rounds_once ? add_norm_row_of<T, float>(a, hidden, x, out)
                  : add_norm_row_of<T, T>(a, hidden, x, out);
  }
}

void add_norm(const NormArgs& a, int64_t first, int64_t last) {
  if (a.is_float_stream) {
    a.is_bf16 ? add_norm_stream<bf16>(a, first, last) : add_norm_stream<float>(a, first, last);
    return;
  }
  if (!a.is_plain()) {
    a.is_bf16 ? add_norm_rows_of<bf16>(a, first, last) : add_norm_rows_of<float>(a, first, last);
    return;
  }
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

template <typename T>
static void sigmoid_mul_row(const T* gates, const T* x, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + L <= n; i += L)
    store_all(out + i, rounded(sigmoid(load(gates + i)), gates) * load(x + i));
  for (; i < n; ++i) {
    T gate;
    store(&gate, 1.0f / (1.0f + std::exp(-to_float(gates[i]))));
    store(out + i, to_float(gate) * to_float(x[i]));
  }
}

void sigmoid_mul(const GateArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t at = row * a.stride, from = row * a.gates_stride;
    if (a.is_bf16)
      sigmoid_mul_row<bf16>((const bf16*)a.gates + from, (const bf16*)a.x + at, (bf16*)a.out + at,
                            a.width);
    else
      sigmoid_mul_row<float>((const float*)a.gates + from, (const float*)a.x + at,
                             (float*)a.out + at, a.width);
  }
}

}  // namespace NS
}  // namespace penstock
