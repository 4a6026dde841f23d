// Makes compact weights (compact.h) of whole ones.
#include <algorithm>

#include "linear/compact.h"
#include "linear/compact_packing.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

constexpr int NUMBERS = GRANULE_BYTES / 2, EXPONENTS = 256;
// One granule in SAMPLED, and FEWEST_SAMPLED at least, say which exponents have a code.
constexpr int64_t SAMPLED = 8, FEWEST_SAMPLED = 64;

static inline int exponent_of(uint16_t number) { return number >> 7 & 255; }

static const uint16_t* granule_at(const char* panel, int64_t granule) {
  return (const uint16_t*)(panel + granule * GRANULE_BYTES);
}

// The bytes of a granule in a pair, and its codes in the low halves of bytes.
struct Coded {
  alignas(64) uint8_t rest[LINE_BYTES], codes[LINE_BYTES];
  bool is_exception;
};

static inline void code(const uint16_t* numbers, const CompactPlan& plan, Coded& to) {
  // The code of the first exponent that is not 0 by itself.
  const int first = int(CODES - plan.exponents);
#ifdef __AVX512F__
  const __m512i byte = _mm512_set1_epi16(255), low_seven = _mm512_set1_epi8(127),
                one = _mm512_set1_epi8(1);
  const __m512i a = _mm512_loadu_si512(numbers), b = _mm512_loadu_si512(numbers + NUMBERS / 2);
  const __m512i low = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte)),
                high = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const __m512i exponent = _mm512_or_si512(_mm512_add_epi8(high, high),
                                           _mm512_and_si512(_mm512_srli_epi16(low, 7), one)),
                place = _mm512_sub_epi8(exponent, _mm512_set1_epi8(char(plan.base)));
  const __mmask64 zero = first > 0 ? _mm512_testn_epi8_mask(exponent, exponent) : 0,
                  inside = _mm512_cmplt_epu8_mask(place, _mm512_set1_epi8(char(plan.exponents)));
  // The sign of `high`, the mantissa of `low`.
  _mm512_store_si512(to.rest, _mm512_ternarylogic_epi32(low_seven, low, high, 0xCA));
  _mm512_store_si512(to.codes,
                     _mm512_maskz_add_epi8(inside & ~zero, place, _mm512_set1_epi8(char(first))));
  to.is_exception = (inside | zero) != ~__mmask64(0);
#else
  to.is_exception = false;
  for (int output = 0; output < PANEL; ++output)
    for (int i = 0; i < 2; ++i) {
      const uint16_t number = numbers[output * 2 + i];
      const int at = CompactPanel::byte_of(output) + i, exponent = exponent_of(number);
      const int64_t place = exponent - plan.base;
      const bool is_zero = first > 0 && exponent == 0,
                 is_inside = !is_zero && place >= 0 && place < plan.exponents;
      to.rest[at] = uint8_t((number >> 8 & 0x80) | (number & 0x7F));
      to.codes[at] = uint8_t(is_inside ? place + first : 0);
      to.is_exception |= !is_inside && !is_zero;
    }
#endif
}

struct Choice {
  int64_t inside, base;
};
// The window of this many exponents that has the most numbers; of equal ones the lowest.
static Choice best_window(const int64_t (&found)[EXPONENTS], int exponents) {
  int64_t inside = 0;
  Choice best{-1, 0};
  for (int last = 0; last < EXPONENTS; ++last) {
    const int base = last - exponents + 1;
    inside += found[last] - (base > 0 ? found[base - 1] : 0);
    if (base >= 0 && inside > best.inside) best = {inside, base};
  }
  return best;
}

CompactPlan plan_compact(const char* panel, int64_t granules) {
  int64_t found[EXPONENTS] = {};
  const int64_t step = std::clamp<int64_t>(granules / FEWEST_SAMPLED, 1, SAMPLED);
  for (int64_t g = 0; g < granules; g += step) {
    const uint16_t* numbers = granule_at(panel, g);
    for (int i = 0; i < NUMBERS; ++i) ++found[exponent_of(numbers[i])];
  }
  const Choice all = best_window(found, CODES);
  const int64_t zeros = found[0];
  found[0] = 0;
  const Choice others = best_window(found, CODES - 1);
  CompactPlan plan = others.inside + zeros > all.inside ? CompactPlan{others.base, CODES - 1}
                                                        : CompactPlan{all.base, CODES};
  Coded coded;
  for (int64_t g = 0; g < granules; ++g) {
    code(granule_at(panel, g), plan, coded);
    plan.exceptions += coded.is_exception;
  }
  return plan;
}

void write_compact(const char* panel, int64_t granules, const CompactPlan& plan, char* weight,
                   int64_t number) {
  char* to = weight + number * CompactPanel::bytes(granules);
  std::memset(to, 0, LINE_BYTES);
  CompactLine* line = (CompactLine*)to;
  line->exceptions = plan.exceptions, line->begin = plan.begin;
  for (int64_t place = 0; place < plan.exponents; ++place)
    line->set_exponent(int(place + CODES - plan.exponents), int(plan.base + place));
  const CompactPanel written(weight, number, granules);
  char *pair = (char*)written.pairs, *whole = (char*)written.whole;
  int32_t* exception = (int32_t*)written.exceptions;
  Coded coded;
  for (int64_t g = 0; g < granules; ++g) {
    const uint16_t* numbers = granule_at(panel, g);
    code(numbers, plan, coded);
    uint8_t* codes = (uint8_t*)pair + GRANULE_BYTES;
    if (g % 2 == 0) {
      std::memcpy(pair, coded.rest, LINE_BYTES);
      // Of an odd number the last pair has one granule, and zeros.
      std::memset(pair + LINE_BYTES, 0, LINE_BYTES);
      std::memcpy(codes, coded.codes, LINE_BYTES);
    } else {
      std::memcpy(pair + LINE_BYTES, coded.rest, LINE_BYTES);
      for (int i = 0; i < LINE_BYTES; ++i) codes[i] |= uint8_t(coded.codes[i] << 4);
      pair += PAIR_BYTES;
    }
    if (!coded.is_exception) continue;
    *exception++ = int32_t(g);
    std::memcpy(whole, numbers, GRANULE_BYTES);
    whole += GRANULE_BYTES;
  }
  *exception++ = NO_EXCEPTION;
  std::memset(exception, 0, written.whole - (const char*)exception);
}

}  // namespace NS
}  // namespace penstock
