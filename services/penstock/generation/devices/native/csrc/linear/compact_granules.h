// Granules of a compact weight (compact.h) as bfloat16 again, in vectors.
#pragma once
#include <algorithm>
#include <vector>

#include "linear/compact.h"
#include "linear/linear.h"
#include "linear/products.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

static inline vi table_of(const uint8_t (&bytes)[CODES]) {
  vi table;
  for (unsigned at = 0; at < sizeof(vi); at += CODES) std::memcpy((char*)&table + at, bytes, CODES);
  return table;
}
// Of each byte, at most 15, that byte of the table.
static inline vi look_up(vi table, vi codes) {
#ifdef __aarch64__
  return (vi)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#elif defined(__AVX512F__)
  return (vi)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#else
  return (vi)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#endif
}
// Bytes of both by turns, of the first and of the second half of each 16.
static inline vi zip_first(vi low, vi high) {
#ifdef __aarch64__
  return (vi)vzip1q_u8((uint8x16_t)low, (uint8x16_t)high);
#elif defined(__AVX512F__)
  return (vi)_mm512_unpacklo_epi8((__m512i)low, (__m512i)high);
#else
  return (vi)_mm256_unpacklo_epi8((__m256i)low, (__m256i)high);
#endif
}
static inline vi zip_second(vi low, vi high) {
#ifdef __aarch64__
  return (vi)vzip2q_u8((uint8x16_t)low, (uint8x16_t)high);
#elif defined(__AVX512F__)
  return (vi)_mm512_unpackhi_epi8((__m512i)low, (__m512i)high);
#else
  return (vi)_mm256_unpackhi_epi8((__m256i)low, (__m256i)high);
#endif
}

// Granules of a panel, without exceptions.
class PairReader {
 public:
  // Vectors of a granule.
  static constexpr int V = PANEL / L;

  explicit PairReader(const CompactLine& line)
      : low_(table_of(line.low)), high_(table_of(line.high)) {}

  // The first granule of a pair, or the second: `place` is 0 or 1, known where it is compiled.
  __attribute__((always_inline)) void read(const char* pair, int64_t place,
                                           vi (&granule)[V]) const {
    constexpr int REGISTERS = V / 2, BYTES = sizeof(vi);
    const vi mantissa = splat_bits(0x7F7F7F7F);
    for (int r = 0; r < REGISTERS; ++r) {
      const vi both = load_bits(pair + GRANULE_BYTES + r * BYTES),
               codes = (place == 0 ? both : (vi)((vu)both >> 4)) & splat_bits(0x0F0F0F0F),
               rest = load_bits(pair + place * (GRANULE_BYTES / 2) + r * BYTES);
      const vi low = look_up(low_, codes) | (rest & mantissa),
               high = look_up(high_, codes) | (rest & ~mantissa);
      granule[r] = zip_first(low, high), granule[REGISTERS + r] = zip_second(low, high);
    }
  }

 private:
  vi low_, high_;
};

// The exceptions of a panel, in order.
class Exceptions {
 public:
  Exceptions(const CompactPanel& panel, int64_t first) {
    const int64_t place = panel.exception_from(first);
    next_ = panel.exceptions + place;
    whole_ = panel.whole + place * GRANULE_BYTES;
    __builtin_prefetch(whole_), __builtin_prefetch(whole_ + 64);
  }

  // Puts granule `g` in place of what was read, if it is one. All from `first` on are asked for.
  __attribute__((always_inline)) void put(int64_t g, vi (&granule)[PANEL / L]) {
#ifdef __aarch64__
    if (*next_ != g) return;
    std::memcpy(granule, whole_, sizeof(granule));
    ++next_, whole_ += GRANULE_BYTES;
    __builtin_prefetch(whole_), __builtin_prefetch(whole_ + 64);
#else
    // Assembly: of a branch in C++ the compiler makes two ways through all that follows, with a
    // tile's sums in memory. It need not know what is read here: nothing writes to a weight, and
    // else it would store the sums before each of these.
#ifdef __AVX512F__
    asm("cmpl %k[g], (%[next])\n\t"
        "jne 1f\n\t"
        "vmovdqu64 (%[whole]), %[w0]\n\t"
        "vmovdqu64 64(%[whole]), %[w1]\n\t"
        "addq $4, %[next]\n\t"
        "addq $128, %[whole]\n\t"
        // The next one is needed soon, and nothing else reads these lines.
        "prefetcht0 (%[whole])\n\t"
        "prefetcht0 64(%[whole])\n"
        "1:"
        : [w0] "+v"(granule[0]), [w1] "+v"(granule[1]), [next] "+r"(next_), [whole] "+r"(whole_)
        : [g] "r"(g)
        : "cc");
#else
    asm("cmpl %k[g], (%[next])\n\t"
        "jne 1f\n\t"
        "vmovdqu (%[whole]), %[w0]\n\t"
        "vmovdqu 32(%[whole]), %[w1]\n\t"
        "vmovdqu 64(%[whole]), %[w2]\n\t"
        "vmovdqu 96(%[whole]), %[w3]\n\t"
        "addq $4, %[next]\n\t"
        "addq $128, %[whole]\n\t"
        // The next one is needed soon, and nothing else reads these lines.
        "prefetcht0 (%[whole])\n\t"
        "prefetcht0 64(%[whole])\n"
        "1:"
        : [w0] "+x"(granule[0]), [w1] "+x"(granule[1]), [w2] "+x"(granule[2]),
          [w3] "+x"(granule[3]), [next] "+r"(next_), [whole] "+r"(whole_)
        : [g] "r"(g)
        : "cc");
#endif
#endif
  }

 private:
  const int32_t* next_;
  const char* whole_;
};

// `count` granules from `first`, which is even, on: (count, PANEL, 4 B) to `to`.
[[maybe_unused, gnu::noinline]] static void unpack_granules(const CompactPanel& panel,
                                                            int64_t first, int64_t count,
                                                            char* to) {
  const PairReader reader(*panel.line);
  const char* pair = panel.pairs + first / 2 * PAIR_BYTES;
  for (int64_t g = 0; g < count; g += 2, pair += PAIR_BYTES)
#pragma GCC unroll 2
    for (int u = 0; u < 2 && g + u < count; ++u) {
      vi granule[PairReader::V];
      reader.read(pair, u, granule);
      std::memcpy(to + (g + u) * GRANULE_BYTES, granule, sizeof(granule));
    }
  for (int64_t i = panel.exception_from(first); i < panel.line->exceptions; ++i) {
    const int64_t at = panel.exceptions[i] - first;
    if (at >= count) break;
    std::memcpy(to + at * GRANULE_BYTES, panel.whole + i * GRANULE_BYTES, GRANULE_BYTES);
  }
}

// Where a panel begins; for the number of panels the end of the last.
static inline const char* panel_at(const LinearArgs& a, int64_t panel) {
  return a.weight +
         panel * (a.is_compact ? CompactPanel::bytes(a.granules) : a.granules * GRANULE_BYTES);
}
// Where a granule of an even number lies, as it is stored; and the bytes of as many as that.
static inline const char* granule_at(const LinearArgs& a, int64_t panel, int64_t granule) {
  return panel_at(a, panel) +
         (a.is_compact ? LINE_BYTES + granule / 2 * PAIR_BYTES : granule * GRANULE_BYTES);
}
static inline int64_t stored_bytes(const LinearArgs& a, int64_t granules) {
  return a.is_compact ? granules * PAIR_BYTES / 2 : granules * GRANULE_BYTES;
}
// `count` granules of a panel from `first`, which is even, on: (count, PANEL, 4 B), at `memory` if
// the weight is compact, else in the weight itself.
static inline const char* whole_granules(const LinearArgs& a, int64_t panel, int64_t first,
                                         int64_t count, char* memory) {
  if (!a.is_compact) return granule_at(a, panel, first);
  unpack_granules(CompactPanel(a.weight, panel, a.granules), first, count, memory);
  return memory;
}
// A thread's own memory for `granules` of them.
[[maybe_unused]] static char* unpacked_memory(int64_t granules) {
  thread_local std::vector<char> memory;
  const size_t size = granules * GRANULE_BYTES + LINE_BYTES;
  if (memory.size() < size) memory.resize(size);
  return memory.data() + (LINE_BYTES - uintptr_t(memory.data()) % LINE_BYTES) % LINE_BYTES;
}

}  // namespace NS
}  // namespace penstock
