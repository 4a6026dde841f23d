// Work of attention on one tile of keys and values, for both uses of SIMD lanes: products and
// loading.
//
// A unit is 32 bits: a float, a pair of bf16 (vdpbf16ps, bfdot), or four int8 (vpdpbusd, usdot).
// All sums are in the order of keys or of dims, by the same operations for any number and place of
// rows: this is compiled without reassociation or contraction, and only fmadd multiplies and adds
// at once.
#pragma once
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "attention/attention.h"
#include "util/rotate.h"
#include "util/turned_block.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

constexpr int TILE = 64;  // keys
constexpr int SUMS =
    16;  // partial sums of a row's weights, by key % SUMS: the lanes of attention_decode.h
enum class Mode { FLOATS, PAIRS, QUADS };
constexpr int per_unit(Mode mode) { return mode == Mode::QUADS ? 4 : mode == Mode::PAIRS ? 2 : 1; }
// 16-bit integers as two int8: 256 * high + low.
constexpr int LEVELS = 127 * 256, POSITIVE_LEVELS = 255 * 256;
constexpr float NEGLIGIBLE = 1e-30f;  // below it everything is 0: its inverse would overflow

#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
constexpr bool HAS_UNITS = true;
static inline bool any(vi x) { return vmaxvq_u32((uint32x4_t)x) != 0; }
static inline vf dot_pairs(vf acc, vi a, vi b) {
  return (vf)vbfdotq_f32((float32x4_t)acc, (bfloat16x8_t)a, (bfloat16x8_t)b);
}
static inline vi dot_quads(vi acc, vi positive, vi any) {
  return (vi)vusdotq_s32((int32x4_t)acc, (uint8x16_t)positive, (int8x16_t)any);
}
static inline vi pack_pairs(vf lo, vf hi) {
  const bfloat16x8_t both =
      vcvtq_high_bf16_f32(vcvtq_low_bf16_f32((float32x4_t)lo), (float32x4_t)hi);
  const uint16x8_t bits = (uint16x8_t)both;
  return (vi)vzip1q_u16(bits, vextq_u16(bits, bits, 4));
}
static inline vi nearest(vf x) { return (vi)vcvtnq_s32_f32((float32x4_t)x); }
static inline void store_bytes(void* p, vi x) {
  const int16x4_t halves = vmovn_s32((int32x4_t)x);
  const int8x8_t bytes = vmovn_s16(vcombine_s16(halves, halves));
  std::memcpy(p, &bytes, 4);
}
#elif defined(__AVX512BF16__)
constexpr bool HAS_UNITS = true;
static inline bool any(vi x) { return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) != 0; }
static inline vf dot_pairs(vf acc, vi a, vi b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
static inline vi dot_quads(vi acc, vi positive, vi any) {
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)positive, (__m512i)any);
}
static inline vi pack_pairs(vf lo, vf hi) {
  __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)lo));
  __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)hi));
  return (vi)_mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}
// Rounds like store().
static inline __m256i rounded_bits(vf x) {
  const vu bits = (vu)x, nearest_bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return _mm512_cvtepi32_epi16((__m512i)(x != x ? vu{} + 0x7FC0 : nearest_bits));
}
// Rows become columns.
static inline void transpose(__m512i (&r)[16]) {
  __m512i t[16];
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
  for (int i = 0; i < 4; ++i) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 8; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
  }
}
static inline vi nearest(vf x) { return (vi)_mm512_cvtps_epi32((__m512)x); }
static inline void store_bytes(void* p, vi x) {
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8((__m512i)x));
}
#else
constexpr bool HAS_UNITS = false;
#ifdef __aarch64__
static inline bool any(vi x) { return vmaxvq_u32((uint32x4_t)x) != 0; }
#else
static inline bool any(vi x) { return _mm256_movemask_ps((__m256)x) != 0; }
#endif
static inline vf dot_pairs(vf acc, vi, vi) { return acc; }
static inline vi dot_quads(vi acc, vi, vi) { return acc; }
static inline vi pack_pairs(vf, vf) { return vi{}; }
static inline vi nearest(vf) { return vi{}; }
static inline void store_bytes(void*, vi) {}
#endif
static inline vf to_floats(vi x) { return __builtin_convertvector(x, vf); }

// A (scalars, broadcast): unit k of row m at m * a_row + k * a_k. B (vectors): unit k at k * b_k.
// In QUADS one side has 16 bits: the low bytes lie a_low, or b_low, further on, and are 0 for the
// side of 8 bits.
struct Sides {
  const int32_t* a;
  int64_t a_row, a_k, a_low;
  const int32_t* b;
  int64_t b_k, b_low;
};

// Result of a sum of QUADS: C gets put(m, v, sum, old). The other modes need nothing.
struct AsItIs {
  vf operator()(int, int, vi, vf old) const { return old; }
};

// C[m][v] (+)= sum_k A[m][k] * B[k][v] of M rows and V vectors.
template <Mode MODE, bool A_POSITIVE, int M, int V, typename Put>
static inline void micro(const Sides& s, int m0, int K, float* C, int64_t c_row, bool add,
                         const Put& put) {
  using Sum = std::conditional_t<MODE == Mode::QUADS, vi, vf>;
  Sum acc[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) {
      acc[m][v] = Sum{};
      if constexpr (MODE != Mode::QUADS)
        if (add) acc[m][v] = *(const vf*)(C + (m0 + m) * c_row + v * L);
    }
  for (int low = 0; low < (MODE == Mode::QUADS ? 2 : 1); ++low) {
    const int32_t *a = s.a + m0 * s.a_row + low * s.a_low, *B = s.b + low * s.b_low;
    if constexpr (MODE == Mode::QUADS)
      if (low)
        for (int m = 0; m < M; ++m)
          for (int v = 0; v < V; ++v) acc[m][v] = acc[m][v] << 8;
    for (int k = 0; k < K; ++k) {
      vi b[V];
      for (int v = 0; v < V; ++v) b[v] = *(const vi*)(B + k * s.b_k + v * L);
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        vi x = vi{} + a[m * s.a_row + k * s.a_k];
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) {
          if constexpr (MODE == Mode::QUADS)
            acc[m][v] = A_POSITIVE ? dot_quads(acc[m][v], x, b[v]) : dot_quads(acc[m][v], b[v], x);
          else if constexpr (MODE == Mode::PAIRS)
            acc[m][v] = dot_pairs(acc[m][v], b[v], x);
          else
            acc[m][v] = fmadd((vf)b[v], (vf)x, acc[m][v]);
        }
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) {
      vf* c = (vf*)(C + (m0 + m) * c_row + v * L);
      if constexpr (MODE == Mode::QUADS)
        *c = put(m0 + m, v, acc[m][v], add ? *c : vf{});
      else
        *c = acc[m][v];
    }
}

template <Mode MODE, bool A_POSITIVE, int V, typename Put>
static void product(const Sides& s, int M, int K, float* C, int64_t c_row, bool add,
                    const Put& put) {
  // Up to four vectors: the number of sums at once fills the registers, beside V vectors and a
  // scalar. With more (scores of a decode step) fewer rows gain nothing. Each sum is the same with
  // any step.
#if defined(__AVX512F__) || defined(__aarch64__)
  constexpr int STEP = V == 1 ? 12 : V == 2 ? 8 : 6;
#else
  constexpr int STEP = V == 1 ? 12 : V == 2 ? 6 : 3;
#endif
  int m = 0;
  for (; m + STEP <= M; m += STEP) micro<MODE, A_POSITIVE, STEP, V>(s, m, K, C, c_row, add, put);
  for (; m + 2 <= M; m += 2) micro<MODE, A_POSITIVE, 2, V>(s, m, K, C, c_row, add, put);
  for (; m < M; ++m) micro<MODE, A_POSITIVE, 1, V>(s, m, K, C, c_row, add, put);
}

// Places of the keys and values of a tile; S is the type that the pool stores.
template <typename S>
struct Rows {
  const S* k[TILE];
  const S* v[TILE];
  alignas(64) float k_scale[TILE] = {};
  alignas(64) float v_scale[TILE] = {};
  int n = 0;

  // Into the cache: row t of the rows that find() found, if there is one. Blocks lie anywhere, so
  // no hardware guesses the next one. (Inline, because the compiler takes a function that only
  // prefetches to have no effect, and drops its calls.)
  __attribute__((always_inline)) void fetch(int t, int head_dim) const {
    if (t >= n) return;
    for (int64_t at = 0; at < int64_t(sizeof(S)) * head_dim; at += 64) {
      __builtin_prefetch((const char*)k[t] + at);
      __builtin_prefetch((const char*)v[t] + at);
    }
  }
  void find(const AttentionArgs& a, const int32_t* table, int64_t kv_head, int64_t t0, int count) {
    n = count;
    int64_t block = t0 / a.block_size, offset = t0 % a.block_size;
    for (int t = 0; t < n; ++t, ++offset) {
      if (offset == a.block_size) offset = 0, ++block;
      const int64_t slot = int64_t(table[block]) * a.block_size + offset,
                    at = slot * a.slot_stride + kv_head * a.head_dim;
      k[t] = (const S*)a.keys + at;
      v[t] = (const S*)a.values + at;
      if constexpr (std::is_same_v<S, int8_t>) {
        const int64_t scale = slot * a.scale_stride + kv_head;
        k_scale[t] = a.key_scales[scale], v_scale[t] = a.value_scales[scale];
      }
    }
  }
};

static inline float stored(const float* p, int d, float) { return p[d]; }
static inline float stored(const bf16* p, int d, float) { return to_float(p[d]); }
static inline float stored(const int8_t* p, int d, float scale) { return float(p[d]) * scale; }

// Keys as [key][unit of dims]. QUADS: with 128 added, which makes them positive.
template <typename S, Mode MODE>
static void load_keys(const Rows<S>& rows, int D, int32_t* k) {
  for (int t = 0; t < rows.n; ++t) {
    int32_t* to = k + t * (D / per_unit(MODE));
    if constexpr (MODE == Mode::FLOATS) {
      for (int d = 0; d < D; ++d) ((float*)to)[d] = stored(rows.k[t], d, rows.k_scale[t]);
    } else {
      std::memcpy(to, rows.k[t], sizeof(S) * D);
      if constexpr (MODE == Mode::QUADS)
        for (int u = 0; u < D / 4; ++u) to[u] ^= int32_t(0x80808080);
    }
  }
}

// Values as [unit of keys][dim]. The missing part of the last unit repeats a key, for a weight of
// 0.
template <typename S, Mode MODE>
static void load_values(const Rows<S>& rows, int D, int32_t* v, const Rows<S>* next = nullptr) {
  constexpr int PER = per_unit(MODE);
  for (int t = 0; t < rows.n; t += PER) {
    int32_t* to = v + (t / PER) * D;
    const S* from[PER];
    for (int i = 0; i < PER; ++i) {
      from[i] = rows.v[std::min(t + i, rows.n - 1)];
      if (next && (t + i) % 4 == 0) next->fetch((t + i) / 4, D);
    }
    if constexpr (MODE == Mode::FLOATS) {
      for (int d = 0; d < D; ++d) ((float*)to)[d] = stored(from[0], d, rows.v_scale[t]);
    } else if constexpr (MODE == Mode::PAIRS) {
      const uint16_t *x = (const uint16_t*)from[0], *y = (const uint16_t*)from[1];
      for (int d = 0; d < D; ++d) to[d] = int32_t(uint32_t(x[d]) | uint32_t(y[d]) << 16);
    } else {
      const uint8_t *x = (const uint8_t*)from[0], *y = (const uint8_t*)from[1],
                    *z = (const uint8_t*)from[2], *w = (const uint8_t*)from[3];
      for (int d = 0; d < D; ++d)
        to[d] = int32_t(x[d] | uint32_t(y[d]) << 8 | uint32_t(z[d]) << 16 | uint32_t(w[d]) << 24);
    }
  }
}

// A query as units; QUADS: high bytes, then `low` units further on the low ones. Returns its step
// (QUADS; else 1), and in `bias` what the keys' 128 add to a product.
template <typename T, Mode MODE>
static float load_query(const T* q, int D, int32_t* to, int64_t stride, int64_t low,
                        int32_t& bias) {
  if constexpr (MODE == Mode::FLOATS) {
    for (int d = 0; d < D; ++d) {
      float f = to_float(q[d]);
      std::memcpy(to + d * stride, &f, 4);
    }
  } else if constexpr (MODE == Mode::PAIRS) {
    for (int d = 0; d < D / 2; ++d) std::memcpy(to + d * stride, q + 2 * d, 4);
  } else {
    alignas(64) float x[MAX_HEAD_DIM] = {};
    alignas(64) int32_t parts[2][MAX_HEAD_DIM / 4];
    for (int d = 0; d < D; ++d) x[d] = to_float(q[d]);
    // Magnitudes compare as their bits do, and so do infinity and NaN, which are above all others.
    vi bits = vi{}, total = vi{};
    for (int d = 0; d < D; d += L) {
      vi b = (vi) * (const vf*)(x + d) & 0x7fffffff;
      bits = b > bits ? b : bits;
    }
    int32_t top = 0;
    for (int l = 0; l < L; ++l) top = std::max(top, bits[l]);
    float most;
    std::memcpy(&most, &top, 4);
    const bool broken = !(most < INFINITY), none = !(most > NEGLIGIBLE);
    const float step = none ? 1.0f : most * (1.0f / LEVELS);
    const vf inverse = splat(none || broken ? 0.0f : 1.0f / step);
    for (int d = 0; d < D; d += L) {
      vi whole = broken ? vi{} : nearest(*(const vf*)(x + d) * inverse), high = (whole + 128) >> 8;
      total += whole;
      store_bytes((int8_t*)parts[0] + d, high);
      store_bytes((int8_t*)parts[1] + d, whole);
    }
    for (int u = 0; u < D / 4; ++u)
      to[u * stride] = parts[0][u], to[u * stride + low] = parts[1][u];
    bias = 0;
    for (int l = 0; l < L; ++l) bias += 128 * total[l];
    return broken ? NAN : step;
  }
  return 1.0f;
}

// Block of the pool's heads that is turned, 1 for none.
static inline int64_t block_of(const AttentionArgs& a) {
  return a.key_scales == nullptr ? 1 : turned_head(a.head_dim);
}
// A query or an output turned as the pool's heads are; `to` may be `x`.
template <typename T>
static void turn(const T* x, int D, int64_t block, float* to) {
  rotate(x, D, block, to);
  const float by = 1.0f / turned_by_rest(block);
  for (int d = 0; d < D; ++d) to[d] *= by;
}

// load_query of a row of `a`, turned if the keys are.
template <typename T, Mode MODE>
static float load_row(const AttentionArgs& a, const T* q, int32_t* to, int64_t stride, int64_t low,
                      int32_t& bias) {
  // No pairs are of int8.
  if constexpr (MODE != Mode::PAIRS)
    if (const int64_t block = block_of(a); block > 1) {
      alignas(64) float turned[MAX_HEAD_DIM];
      turn(q, a.head_dim, block, turned);
      return load_query<float, MODE>(turned, a.head_dim, to, stride, low, bias);
    }
  return load_query<T, MODE>(q, a.head_dim, to, stride, low, bias);
}

// A row's output (D), turned back if the values are turned. Changes `o`.
template <typename T>
static void store_output(float* o, int D, int64_t block, T* to) {
  if (block > 1) turn(o, D, block, o);
  for (int d = 0; d < D; ++d) store(to + d, o[d]);
}

constexpr float LOG2E = 1.44269504088896341f;

// Gemma 2's scores: cap * tanh(score * by), where `by` is the factor on scores through the cap.
// Softmax's own factor on them is log2(e) then.
static inline vf capped(vf score, vf by, vf cap) {
  const vf y = score * by, one = splat(1.0f);
  const vf e = exp2_nonpositive((y < vf{} ? y : -y) * splat(2 * LOG2E));
  const vf magnitude = cap * ((one - e) / (one + e));
  return y < vf{} ? -magnitude : magnitude;
}
// Factor of softmax on the scores of a row with a query stored in `step`s: into powers of 2.
static inline float softmax_scale(const AttentionArgs& a, float step) {
  return a.softcap > 0 ? LOG2E : a.scale * LOG2E * step;
}
static inline float cap_scale(const AttentionArgs& a, float step) {
  return a.softcap > 0 ? a.scale * step / a.softcap : 0.0f;
}
// The highest score of a row before its first key, and its weight: its head's sink.
static inline float first_high(const AttentionArgs& a, int64_t head, float scale) {
  return a.sinks == nullptr ? -INFINITY : a.sinks[head] * LOG2E / scale;
}
static inline float first_sum(const AttentionArgs& a) { return a.sinks == nullptr ? 0.0f : 1.0f; }
// The slope of a row's head, on scores that softmax multiplies by `scale`.
static inline float slope_of(const AttentionArgs& a, int64_t head, float scale) {
  return a.slopes == nullptr ? 0.0f : a.slopes[head] * LOG2E / scale;
}
// Scores of keys at `pos` with their slopes, from the row's position on: `visible` is one more.
static inline vf sloped(vf score, vf slope, vi pos, vi visible) {
  return fmadd(to_floats(pos - visible + 1), slope, score);
}

// Tiles begin at multiples of TILE, with any rows in the task, so that a row's sums are cut at the
// same keys everywhere; the first one may leave out keys that no row sees any more: as many as
// lanes (attention_decode.h) and tile registers (attention_tiles.h) sum apart, or twice as many.
constexpr int KEYS_OF_SUM = 32;
static_assert(KEYS_OF_SUM % SUMS == 0 && TILE % KEYS_OF_SUM == 0);
static inline int64_t first_key(int64_t oldest) { return oldest - oldest % KEYS_OF_SUM; }
static inline int keys_from(int64_t t0, int64_t end) {
  return int(std::min<int64_t>(TILE - t0 % TILE, end - t0));
}

}  // namespace NS
}  // namespace penstock
