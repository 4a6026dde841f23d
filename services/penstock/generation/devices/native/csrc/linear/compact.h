// bfloat16 weights in some three quarters of their bytes, without loss. The exponents of a panel
// are nearly all among 16 that follow each other, or among 15 and 0: four bits say which. A weight
// has its panels, of one size, and behind them their exceptions: so both are read from end to end.
// A panel is
//
//   line        what its codes mean, and where its exceptions are (64 B)
//   pairs       of granules (linear.h): 64 bytes of each with the numbers' signs and mantissas, and
//               64 with their codes, those of the first granule in the low halves
//
// and its exceptions are
//
//   numbers     of the granules with another exponent, ascending, and NO_EXCEPTION, (any) int32;
//               whole lines
//   whole       these granules as bfloat16, (any, 32, 4 B)
//
// The bytes of a granule lie as AVX-512 puts the low and the high bytes of its two vectors
// together: number b (of 2) of output o is byte `byte_of(o) + b`.
#pragma once
#include <cstdint>
#include <cstring>

namespace penstock {

constexpr int64_t GRANULE_BYTES = 128, PAIR_BYTES = 192, LINE_BYTES = 64;
constexpr int CODES = 16;
constexpr int32_t NO_EXCEPTION = INT32_MAX;

// The line at the beginning of a panel.
struct CompactLine {
  // Of each code, the exponent's lowest bit as bit 7, and its others as bits 0 to 6.
  uint8_t low[CODES], high[CODES];
  // Exceptions, and the byte of the weight at which they begin.
  int64_t exceptions, begin;

  void set_exponent(int code, int exponent) {
    low[code] = uint8_t(exponent << 7), high[code] = uint8_t(exponent >> 1);
  }
};
static_assert(sizeof(CompactLine) <= LINE_BYTES);

// A panel's parts.
struct CompactPanel {
  const CompactLine* line;
  const char* pairs;
  const int32_t* exceptions;
  const char* whole;

  CompactPanel(const char* weight, int64_t panel, int64_t granules)
      : line((const CompactLine*)(weight + panel * bytes(granules))),
        pairs((const char*)line + LINE_BYTES),
        exceptions((const int32_t*)(weight + line->begin)),
        whole((const char*)exceptions + number_bytes(line->exceptions)) {}

  static int64_t bytes(int64_t granules) { return LINE_BYTES + (granules + 1) / 2 * PAIR_BYTES; }
  static int64_t number_bytes(int64_t exceptions) {
    return ((exceptions + 1) * 4 + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
  }
  static int64_t exception_bytes(int64_t exceptions) {
    return number_bytes(exceptions) + exceptions * GRANULE_BYTES;
  }
  static int byte_of(int output) { return output % 16 / 4 * 16 + output / 16 * 8 + output % 4 * 2; }

  // Place of the first exception from granule `first` on.
  int64_t exception_from(int64_t first) const {
    int64_t low = 0, high = first == 0 ? 0 : line->exceptions;
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      exceptions[middle] < first ? low = middle + 1 : high = middle;
    }
    return low;
  }
};

// Numbers of an output of a panel: (granules, 4 B).
void unpack_column(const CompactPanel& panel, int64_t granules, int column, char* to);

}  // namespace penstock
