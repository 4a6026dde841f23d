// SIMD by the compiler's vector extensions, so that one source serves every instruction set. NS
// names the namespace of the one it is compiled for; a vector is as wide as its registers.
#pragma once
#ifdef __aarch64__
#include <arm_neon.h>
#else
#include <immintrin.h>
#endif

#include <cstdint>
#include <cstring>

namespace penstock {
struct bf16 {
  uint16_t bits;
};
namespace NS {

#ifdef __aarch64__
constexpr int L = 4;
#elif defined(__AVX512F__)
constexpr int L = 16;
#else
constexpr int L = 8;
#endif
typedef float vf __attribute__((vector_size(4 * L)));
typedef int32_t vi __attribute__((vector_size(4 * L)));
typedef uint32_t vu __attribute__((vector_size(4 * L)));
typedef uint16_t vh __attribute__((vector_size(2 * L)));

static inline vf splat(float x) { return vf{} + x; }
// a * b + c, rounded once.
static inline vf fmadd(vf a, vf b, vf c) {
#ifdef __aarch64__
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#elif defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#endif
}

static inline float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}
static inline float to_float(float x) { return x; }

// Round to nearest even, as torch does; NaN stays NaN.
static inline void store(bf16* p, float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, 4);
  p->bits = f != f ? 0x7FC0 : uint16_t((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}
static inline void store(float* p, float f) { *p = f; }

static inline vf load(const float* p) {
  vf v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline vf load(const bf16* p) {
  vh h;
  std::memcpy(&h, p, sizeof(h));
  return (vf)(__builtin_convertvector(h, vu) << 16);
}
static inline vf load(const uint8_t* p) {
#ifdef __aarch64__
  uint8_t bytes[8] = {};
  std::memcpy(bytes, p, L);
  return (vf)vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vld1_u8(bytes)))));
#elif defined(__AVX512F__)
  return (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)));
#else
  return (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#endif
}
static inline void store_all(float* p, vf v) { std::memcpy(p, &v, sizeof(v)); }
#ifdef __aarch64__
// Rounds like store(); the bits of bf16 in the low half of each lane.
static inline vu bf16_bits(vf v) {
  const vu bits = (vu)v, r = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
  return v != v ? vu{} + 0x7FC0 : r;
}
#endif
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
static inline void store_all(bf16* p, vf v) {
  const bfloat16x4_t h = vcvt_bf16_f32((float32x4_t)v);
  std::memcpy(p, &h, sizeof(h));
}
#elif defined(__aarch64__)
static inline void store_all(bf16* p, vf v) {
  const uint16x4_t h = vmovn_u32((uint32x4_t)bf16_bits(v));
  std::memcpy(p, &h, sizeof(h));
}
#elif defined(__AVX512BF16__)
static inline void store_all(bf16* p, vf v) {
  __m256i h = (__m256i)_mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, sizeof(h));
}
#else
// Rounds like store(); the bits of bf16 in the low half of each lane.
static inline __m256i bf16_bits(vf v) {
  const __m256i bits = (__m256i)v,
                odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(
      _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))), 16);
  return _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7FC0),
                            (__m256i)_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q));
}
// Packed by intrinsics, because the compiler narrows vectors one element at a time.
static inline void store_all(bf16* p, vf v) {
  const __m256i r = bf16_bits(v);
  __m128i h = _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
  std::memcpy(p, &h, sizeof(h));
}
#endif
// The value after a trip through T.
static inline vf rounded(vf v, const float*) { return v; }
static inline vf rounded(vf v, const bf16*) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
  return (vf)vshll_n_u16((uint16x4_t)vcvt_bf16_f32((float32x4_t)v), 16);
#elif defined(__aarch64__)
  return (vf)(bf16_bits(v) << 16);
#elif defined(__AVX512BF16__)
  return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)v)), 16);
#else
  return (vf)_mm256_slli_epi32(bf16_bits(v), 16);
#endif
}
// False where a NaN is compared.
static inline bool all_less(vf a, vf b) {
#ifdef __aarch64__
  return vminvq_u32((uint32x4_t)(a < b)) != 0;
#elif defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a, (__m512)b, _CMP_LT_OQ) == 0xFFFF;
#else
  return _mm256_movemask_ps(_mm256_cmp_ps((__m256)a, (__m256)b, _CMP_LT_OQ)) == 0xFF;
#endif
}
// A number kept apart from later operations on it: not contracted with them, nor reordered.
static inline vf apart(vf x) {
#ifdef __aarch64__
  asm("" : "+w"(x));
#else
  asm("" : "+v"(x));
#endif
  return x;
}
static inline float apart(float x) {
#ifdef __aarch64__
  asm("" : "+w"(x));
#else
  asm("" : "+v"(x));
#endif
  return x;
}
static inline float sum_all(vf v) {
  float total = 0;
  for (int l = 0; l < L; ++l) total += v[l];
  return total;
}

// 2^x for x <= 0, relative error below 2e-7; -inf gives 0, NaN stays NaN.
static inline vf exp2_nonpositive(vf x) {
#ifdef __AVX512F__
  __m512 v = _mm512_max_ps(_mm512_set1_ps(-200.0f), (__m512)x);
  __m512 n = _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  vf t = (vf)_mm512_sub_ps(v, n);
#else
  x = x < splat(-126.0f) ? splat(-126.0f) : x;
  vi n = __builtin_convertvector(x - splat(0.5f), vi);
  vf t = x - __builtin_convertvector(n, vf);
#endif
  vf y = splat(1.535336188319500e-4f);
  y = fmadd(y, t, splat(1.339887440266574e-3f));
  y = fmadd(y, t, splat(9.618437357674640e-3f));
  y = fmadd(y, t, splat(5.550332471162809e-2f));
  y = fmadd(y, t, splat(2.402264791363012e-1f));
  y = fmadd(y, t, splat(6.931472028550421e-1f));
  y = fmadd(y, t, splat(1.0f));
#ifdef __AVX512F__
  return (vf)_mm512_scalef_ps((__m512)y, n);
#else
  vi bits = (n + 127) << 23;
  vf p;
  std::memcpy(&p, &bits, sizeof(p));
  return x <= splat(-126.0f) ? vf{} : y * p;
#endif
}

// Through 2^-|x|: no overflow on either side.
static inline vf sigmoid(vf x) {
  const vf log2e = splat(1.44269504088896341f), one = splat(1.0f);
  vf e = exp2_nonpositive((x < vf{} ? x : -x) * log2e);
  return (x < vf{} ? e : one) / (one + e);
}
static inline vf silu(vf x) { return x * sigmoid(x); }
// The approximation of gelu by tanh: (1 + tanh(y)) / 2 is sigmoid(2 y).
static inline vf gelu_tanh(vf x) {
  const vf cubed = x * x * x;
  return x * sigmoid(splat(1.59576912160573072f) * (x + splat(0.044715f) * cubed));
}

}  // namespace NS
}  // namespace penstock
