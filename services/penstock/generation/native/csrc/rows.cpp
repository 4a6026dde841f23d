// Kernels that read and write each row once: rotary embedding with the KV write, RMSNorm with the residual, SwiGLU.
#include <cmath>

#include "kernels.h"
#include "vec.h"

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

template <typename T>
static void rotate_head(const T* x, const T* cos, const T* sin, T* out, int half) {
  int i = 0;
  for (; i + L <= half; i += L) {
    vf a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
    store_all(out + i, a * c - b * s);
    store_all(out + half + i, b * c + a * s);
  }
  for (; i < half; ++i) {
    float a = to_float(x[i]), b = to_float(x[half + i]), c = to_float(cos[i]), s = to_float(sin[i]);
    store(out + i, a * c - b * s);
    store(out + half + i, b * c + a * s);
  }
}

// One row of qkv: normed (q_norm given) and turned q into `q`, turned k and v into their slot of the pool.
template <typename T>
static void rope_row(const RopeArgs& a, int64_t row) {
  const int D = a.head_dim, half = D / 2;
  const T* source = (const T*)a.qkv + row * a.qkv_stride;
  const T* cos = (const T*)a.cos + row * half;
  const T* sin = (const T*)a.sin + row * half;
  const int64_t slot = a.slots[row];
  T normed[MAX_HEAD_DIM];
  for (int h = 0; h < a.num_heads + a.num_kv_heads; ++h) {
    const T* x = source + int64_t(h) * D;
    const bool is_query = h < a.num_heads;
    const T* weight = (const T*)(is_query ? a.q_norm : a.k_norm);
    if (weight != nullptr) {
      std::memcpy(normed, x, sizeof(T) * D);
      add_norm_row<T>(normed, nullptr, weight, normed, D, a.eps);
      x = normed;
    }
    T* target = is_query ? (T*)a.q + (row * a.num_heads + h) * D
                         : (T*)a.keys + (slot * a.num_kv_heads + h - a.num_heads) * D;
    rotate_head(x, cos, sin, target, half);
  }
  const T* v = source + int64_t(a.num_heads + a.num_kv_heads) * D;
  std::memcpy((T*)a.values + slot * a.num_kv_heads * D, v, sizeof(T) * a.num_kv_heads * D);
}

void rope(const RopeArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) a.is_bf16 ? rope_row<bf16>(a, row) : rope_row<float>(a, row);
}

void add_norm(const NormArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    int64_t at = row * a.width;
    if (a.is_bf16)
      add_norm_row<bf16>((bf16*)a.hidden + at, (const bf16*)a.x + at, (const bf16*)a.weight, (bf16*)a.out + at, a.width, a.eps);
    else
      add_norm_row<float>((float*)a.hidden + at, (const float*)a.x + at, (const float*)a.weight, (float*)a.out + at, a.width, a.eps);
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
