// What the bytes of gguf_blocks.h mean: codes as integers, scales and offsets as floats.
#pragma once
#include "linear/gguf_blocks.h"
#include "linear/products.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// Numbers of the tables, larger by the zero of their types.
constexpr uint8_t IQ4_CODES[16] = {1,   24,  45,  63,  79,  93,  106, 118,
                                   129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t FP4_CODES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};

constexpr const uint8_t* table_of(Codes codes) {
  return codes == Codes::IQ4 ? IQ4_CODES : FP4_CODES;
}

// Each byte of `index`, at most 15, as the table has it.
static inline vi look_up(const uint8_t* table, vi index) {
#ifdef __aarch64__
  return (vi)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index);
#elif defined(__AVX512F__)
  return (vi)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)table)),
                                 (__m512i)index);
#else
  return (vi)_mm256_shuffle_epi8(
      _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)table)), (__m256i)index);
#endif
}

static inline vf load_halves(const char* p) {
#ifdef __aarch64__
  float16x4_t h;
  std::memcpy(&h, p, sizeof(h));
  return (vf)vcvt_f32_f16(h);
#elif defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#else
  return (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#endif
}

template <typename B>
static inline vf load_bytes(const char* p) {
#ifdef __aarch64__
  typedef B bytes __attribute__((vector_size(L)));
  bytes b;
  std::memcpy(&b, p, sizeof(b));
  return __builtin_convertvector(b, vf);
#elif defined(__AVX512F__)
  const __m128i b = _mm_loadu_si128((const __m128i*)p);
  return (vf)_mm512_cvtepi32_ps(std::is_signed_v<B> ? _mm512_cvtepi8_epi32(b)
                                                    : _mm512_cvtepu8_epi32(b));
#else
  const __m128i b = _mm_loadl_epi64((const __m128i*)p);
  return (vf)_mm256_cvtepi32_ps(std::is_signed_v<B> ? _mm256_cvtepi8_epi32(b)
                                                    : _mm256_cvtepu8_epi32(b));
#endif
}

// 2 ** (e - 128) of each byte e: half of E8M0's number, since FP4's table has doubled ones.
static inline vf load_exponents(const char* p) {
  const vi e = __builtin_convertvector(load_bytes<uint8_t>(p), vi);
  return (vf)(e < 2 ? (e + 1) << 21 : (e - 1) << 23);
}

// One group of a panel: its bytes, those of its block, and half of its codes or its scales in the
// outputs from v * L on.
template <BlockTraits T>
struct BlockGroup {
  static constexpr int64_t ROW = PANEL * 4;
  const char *head, *group;

  BlockGroup(const char* panel, int64_t number) {
    constexpr int64_t GROUPS = T.inputs / GROUP;
    head = panel + number / GROUPS * T.block_bytes();
    group = head + T.head_bytes() + number % GROUPS * T.group_bytes();
  }

  // The codes of inputs 8 * step to 8 * step + 3, and of the next four.
  inline void codes(int step, int v, vi& first, vi& second) const {
    if constexpr (T.bits == 8) {
      first = load_bits(group + 2 * step * ROW + v * 4 * L);
      second = load_bits(group + (2 * step + 1) * ROW + v * 4 * L);
    } else {
      const vi low = splat_bits(0x0F0F0F0F), both = load_bits(group + step * ROW + v * 4 * L);
      first = both & low, second = (vi)((vu)both >> 4) & low;
    }
    const char* planes = group + GROUP / 2 * PANEL;
    if constexpr (T.bits == 5) {
      const vu word = (vu)load_bits(planes + v * 4 * L);
      first |= placed(word, 2 * step, 0x10101010);
      second |= placed(word, 2 * step + 1, 0x10101010);
    }
    if constexpr (T.bits == 6) {
      const vu word = (vu)load_bits(planes + step / 2 * ROW + v * 4 * L);
      first |= placed(word, step % 2 * 4, 0x30303030);
      second |= placed(word, step % 2 * 4 + 2, 0x30303030);
    }
    if constexpr (T.codes != Codes::WHOLE)
      first = look_up(table_of(T.codes), first), second = look_up(table_of(T.codes), second);
  }
  inline vf scale(int s, int v) const {
    const char* p = group + T.code_bytes() + (s * PANEL + v * L) * T.scale_bytes();
    if constexpr (T.kind == Scales::HALVES) return load_halves(p);
    if constexpr (T.kind == Scales::EXPONENTS) return load_exponents(p);
    const vf unit = load_halves(head + v * 2 * L);
    return (T.has_offset ? load_bytes<uint8_t>(p) : load_bytes<int8_t>(p)) * unit;
  }
  inline vf offset(int v) const {
    const char* p = group + T.code_bytes() + (T.scales * PANEL + v * L) * T.scale_bytes();
    if constexpr (T.kind == Scales::HALVES) return load_halves(p);
    return load_bytes<uint8_t>(p) * -load_halves(head + 2 * PANEL + v * 2 * L);
  }

 private:
  // Bits from `bit` on of each byte as those from 4 on.
  static inline vi placed(vu word, int bit, int32_t mask) {
    return (vi)(bit < 4 ? word << (4 - bit) : word >> (bit - 4)) & splat_bits(mask);
  }
};

}  // namespace NS
}  // namespace penstock
