// Rotary embedding with the norm of the heads before it and the write of keys and values after it,
// each row read once.
#include <cmath>
#include <type_traits>

#include "attention/attention.h"
#include "util/rotate.h"
#include "util/turned_block.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// RMSNorm of a head with transformers' roundings. No weight: all are 1.
template <typename T, typename W>
static void norm_head(const T* x, const W* weight, T* out, int n, float eps) {
  vf squares = vf{};
  float rest = 0;
  int i = 0;
  for (; i + L <= n; i += L) squares += load(x + i) * load(x + i);
  for (; i < n; ++i) rest += to_float(x[i]) * to_float(x[i]);
  const float scale = 1.0f / std::sqrt((sum_all(squares) + rest) / float(n) + eps);
  i = 0;
  if (weight == nullptr) {
    for (; i + L <= n; i += L) store_all(out + i, load(x + i) * splat(scale));
    for (; i < n; ++i) store(out + i, to_float(x[i]) * scale);
    return;
  }
  if constexpr (!std::is_same_v<T, W>) {
    // Rounded once, after the product with a weight in float.
    for (; i + L <= n; i += L) store_all(out + i, load(x + i) * splat(scale) * load(weight + i));
    for (; i < n; ++i) store(out + i, to_float(x[i]) * scale * to_float(weight[i]));
    return;
  }
  for (; i + L <= n; i += L)
    store_all(out + i, rounded(load(x + i) * splat(scale), x) * load(weight + i));
  for (; i < n; ++i) {
    T normed;
    store(&normed, to_float(x[i]) * scale);
    store(out + i, to_float(normed) * to_float(weight[i]));
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

// Symmetric int8: x is out * the returned scale, to half a scale. A head that is not finite has the
// scale NaN.
template <typename T>
static float quantise_numbers(const T* x, int8_t* out, int n) {
  vi bits = vi{};
  int32_t rest = 0;
  int i = 0;
  // Magnitudes compare as their bits do, and so do infinity and NaN, which are above all others.
  auto magnitude = [](float f) {
    int32_t b;
    std::memcpy(&b, &f, 4);
    return b & 0x7fffffff;
  };
  for (; i + L <= n; i += L) {
    vi b = (vi)load(x + i) & 0x7fffffff;
    bits = b > bits ? b : bits;
  }
  for (; i < n; ++i) rest = std::max(rest, magnitude(to_float(x[i])));
  for (int l = 0; l < L; ++l) rest = std::max(rest, bits[l]);
  float most;
  std::memcpy(&most, &rest, 4);
  if (!(most < INFINITY)) {
    std::memset(out, 0, n);
    return NAN;
  }
  const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
  for (i = 0; i < n; ++i) out[i] = int8_t(std::nearbyint(to_float(x[i]) * inverse));
  return most / 127.0f;
}

// The same of the head's turned blocks.
template <typename T>
static float quantise_head(const T* x, int8_t* out, int n) {
  const int64_t block = turned_head(n);
  if (block == 1) return quantise_numbers(x, out, n);
  alignas(64) float turned[MAX_HEAD_DIM];
  rotate(x, n, block, turned);
  return quantise_numbers(turned, out, n) * (1.0f / turned_by(block));
}

// A head of one row of qkv, normed (`weight` given) and turned into `out`.
template <typename T>
static void turn_head(const RopeArgs& a, int64_t row, int head, const void* weight, T* out) {
  const int D = a.head_dim, half = D / 2;
  const T* x = (const T*)a.qkv + row * a.qkv_stride + int64_t(head) * D;
  T normed[MAX_HEAD_DIM];
  if (weight != nullptr) {
    a.norms_round_once ? norm_head(x, (const float*)weight, normed, D, a.eps)
                       : norm_head(x, (const T*)weight, normed, D, a.eps);
    x = normed;
  }
  const int64_t at = (a.positions == nullptr ? row : a.positions[row]) * half;
  rotate_head(x, (const T*)a.cos + at, (const T*)a.sin + at, out, half);
}

// One row: q into `q`, k and v of these key/value heads into their slot of the pool.
template <typename T>
static void rope_row(const RopeArgs& a, int64_t row, int first_head, int last_head) {
  const int D = a.head_dim, group = a.num_heads / a.num_kv_heads;
  for (int h = first_head * group; h < last_head * group; ++h)
    turn_head<T>(a, row, h, a.q_norm, (T*)a.q + (row * a.num_heads + h) * D);
  if (a.parts == 1) return;
  const int first_value = a.num_heads + (a.parts == 2 ? 0 : a.num_kv_heads);
  for (int h = first_head; h < last_head; ++h) {
    const int64_t at = a.slots[row] * a.slot_stride + int64_t(h) * D;
    const T* v = (const T*)a.qkv + row * a.qkv_stride + int64_t(first_value + h) * D;
    T normed[MAX_HEAD_DIM];
    if (a.norms_values) {
      norm_head(v, (const T*)nullptr, normed, D, a.eps);
      v = normed;
    }
    if (a.key_scales == nullptr) {
      turn_head<T>(a, row, a.num_heads + h, a.k_norm, (T*)a.keys + at);
      std::memcpy((T*)a.values + at, v, sizeof(T) * D);
      continue;
    }
    const int64_t scale = a.slots[row] * a.scale_stride + h;
    T turned[MAX_HEAD_DIM];
    turn_head<T>(a, row, a.num_heads + h, a.k_norm, turned);
    a.key_scales[scale] = quantise_head(turned, (int8_t*)a.keys + at, D);
    a.value_scales[scale] = quantise_head(v, (int8_t*)a.values + at, D);
    // Attention looks for NaN in the scores only.
    if (std::isnan(a.value_scales[scale])) a.key_scales[scale] = NAN;
  }
}

void rope(const RopeArgs& a, int64_t first, int64_t last, int first_head, int last_head) {
  for (int64_t row = first; row < last; ++row)
    a.is_bf16 ? rope_row<bf16>(a, row, first_head, last_head)
              : rope_row<float>(a, row, first_head, last_head);
}

float store_head(const void* x, int8_t* to, int dims, bool is_bf16) {
  return is_bf16 ? quantise_head((const bf16*)x, to, dims)
                 : quantise_head((const float*)x, to, dims);
}

}  // namespace NS
}  // namespace penstock
