// Products of stored numbers, by the instructions for them.
#pragma once
#include "linear/linear.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

static inline vi load_bits(const char* p) {
  vi v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}
static inline vi splat_bits(int32_t x) { return vi{} + x; }

// Four products of bytes, `u` unsigned and `s` signed, added to each sum.
static inline vi dot_bytes(vi sum, vi u, vi s) {
#ifdef __ARM_FEATURE_MATMUL_INT8
  return (vi)vusdotq_s32((int32x4_t)sum, (uint8x16_t)u, (int8x16_t)s);
#elif defined(__aarch64__)
  // Both signed: `u` less 128, and the 128 back.
  const int8x16_t signed_u = (int8x16_t)(u ^ splat_bits(int32_t(0x80808080)));
  const int32x4_t rest = vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(-128), (int8x16_t)s);
  return (vi)vsubq_s32(vdotq_s32((int32x4_t)sum, signed_u, (int8x16_t)s), rest);
#elif defined(__AVX512VNNI__)
  return (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)u, (__m512i)s);
#else
  // Goes through 16 bits: the instruction for bytes saturates.
  const __m256i even = _mm256_set1_epi32(0x00FF00FF);
  __m256i u0 = _mm256_and_si256((__m256i)u, even), u1 = _mm256_srli_epi16((__m256i)u, 8);
  __m256i s0 = _mm256_srai_epi16(_mm256_slli_epi16((__m256i)s, 8), 8),
          s1 = _mm256_srai_epi16((__m256i)s, 8);
  return sum + (vi)_mm256_madd_epi16(u0, s0) + (vi)_mm256_madd_epi16(u1, s1);
#endif
}

// Sums of a group of int4: products of `u`, at most 15, and `s`, at least -127; one starts from
// `offset`. With AVX2 a group's GROUP / 4 products of bytes fit into 16 bits.
#if defined(__aarch64__) || defined(__AVX512F__)
static inline vi start_group(int32_t offset) { return splat_bits(offset); }
static inline vi dot_group(vi sum, vi u, vi s) {
#ifdef __aarch64__
  return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)u, (int8x16_t)s);
#else
  return dot_bytes(sum, u, s);
#endif
}
static inline vi end_group(vi sum, int32_t) { return sum; }
#else
// Keeps the compiler from summing in another order, for which it would have to put many products
// aside at once: it has too few registers.
static inline vi in_order(vi sum) { return (vi)apart((vf)sum); }
static_assert(GROUP / 4 * 2 * 15 * 127 < 1 << 15);
static inline vi start_group(int32_t) { return vi{}; }
static inline vi dot_group(vi sum, vi u, vi s) {
  return in_order((vi)_mm256_add_epi16((__m256i)sum, _mm256_maddubs_epi16((__m256i)u, (__m256i)s)));
}
static inline vi end_group(vi sum, int32_t offset) {
  return (vi)_mm256_madd_epi16((__m256i)sum, _mm256_set1_epi16(1)) + splat_bits(offset);
}
#endif

// The result of an int8 sum; its x is 128 too large.
static inline vf scaled_int8(const LinearArgs& a, int64_t row, int64_t column, vi sum) {
  const vi offset = load_bits((const char*)(a.column_sum + column));
  const vf value = __builtin_convertvector(sum - (offset << 7), vf);
  return value * splat(a.row_scale[row]) * load((const float*)a.column_scale + column);
}

// The same for the sums of rows and a panel, in their place.
[[maybe_unused]] static void scale_rows(const LinearArgs& a, int64_t row, int64_t rows,
                                        int64_t panel, float (*block)[PANEL]) {
  for (int64_t r = 0; r < rows; ++r)
    for (int v = 0; v < PANEL; v += L)
      store_all(&block[r][v], scaled_int8(a, row + r, panel * PANEL + v, (vi)load(&block[r][v])));
}

}  // namespace NS
}  // namespace penstock
