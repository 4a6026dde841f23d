// Products of several rows when no instruction multiplies the stored numbers (AVX2): they are
// converted to an instruction's input once, for all rows of a task. A part of a panel becomes units
// of 32 bits (a float, two integers of 16 bits, or four bytes of int4), which stay in the
// first-level cache; so do the rows in int8 and bfloat16. Then a tile of more rows has room in the
// registers beside half a panel. float32 gains only from that tile: its weight is read in place.
// The sums have the order of linear.cpp's, and so their bits.
#pragma once
#if !defined(__aarch64__) && !defined(__AVX512F__)
#define PENSTOCK_EXPANDS
#include <algorithm>
#include <vector>

#include "linear/compact_granules.h"
#include "linear/group_scales.h"
#include "linear/products.h"

namespace penstock {
namespace NS {

// True if it pays for a task: four rows of float32 are two whole tiles of linear.cpp, and no slower
// there; rows of bfloat16 become twice as long, which gains too little with few panels.
static inline bool is_expanded(Format format, int64_t rows, int64_t panels) {
  if (format == Format::F32) return rows >= 5;
  if (format == Format::GGUF) return false;
  return format == Format::BF16 ? rows >= 4 && panels >= 3 : rows >= 3;
}
// Vectors of half a panel, and the rows that have their sums in registers beside them.
constexpr int W = HALF / L, WIDE_TILE = 6;
// Half a panel's fill a quarter of the first-level cache, which two threads of a core share.
constexpr int64_t UNITS_OF_PART = 128;
// Panels for which the rows of a task are expanded once. Their sums fill some half of the
// second-level cache where a task has all of its rows.
constexpr int64_t PANELS_AT_ONCE = 8;
// Few rows wait for the memory, which is fastest where a weight is read from end to end. In float32
// no rows are expanded, so its panels can have their turns one by one.
static inline int64_t panels_of_turn(Format format, int64_t rows) {
  return format == Format::F32 && rows <= 16 ? 1 : PANELS_AT_ONCE;
}
// Granules by which a part is longer or shorter: whole groups of int4, whole turns of the loops.
constexpr int UNITS_AT_ONCE = 8;

static inline vi interleave_low(vi a, vi b) {
  return (vi)_mm256_permute2x128_si256(_mm256_unpacklo_epi32((__m256i)a, (__m256i)b),
                                       _mm256_unpackhi_epi32((__m256i)a, (__m256i)b), 0x20);
}
static inline vi interleave_high(vi a, vi b) {
  return (vi)_mm256_permute2x128_si256(_mm256_unpacklo_epi32((__m256i)a, (__m256i)b),
                                       _mm256_unpackhi_epi32((__m256i)a, (__m256i)b), 0x31);
}

// Formats as units: those of a granule of the weight, and of one of x unless it is a unit itself.

struct F32Units {
  static constexpr int COUNT = 1;
  static constexpr bool EXPANDS_WEIGHT = false, EXPANDS_ROWS = false;
  typedef vf Sum;
  static inline Sum dot(Sum sum, vi x, vi w) { return sum + (vf)x * (vf)w; }
};

// The first of two numbers, and the second.
struct BF16Units : F32Units {
  static constexpr int COUNT = 2;
  static constexpr bool EXPANDS_WEIGHT = true, EXPANDS_ROWS = true;
  static inline void of_weight(vi w, vi (&units)[COUNT]) {
    units[0] = w << 16, units[1] = w & int32_t(0xFFFF0000);
  }
  static inline void of_row(vi x, vi (&units)[COUNT]) { of_weight(x, units); }
};

// The bytes of even numbers and those of odd ones, each in 16 bits.
struct INT8Units {
  static constexpr int COUNT = 2;
  static constexpr bool EXPANDS_WEIGHT = true, EXPANDS_ROWS = true;
  typedef vi Sum;
  static inline void of_weight(vi w, vi (&units)[COUNT]) {
    units[0] = (vi)_mm256_srai_epi16(_mm256_slli_epi16((__m256i)w, 8), 8);
    units[1] = (vi)_mm256_srai_epi16((__m256i)w, 8);
  }
  static inline void of_row(vi x, vi (&units)[COUNT]) {
    units[0] = x & 0x00FF00FF, units[1] = (vi)_mm256_srli_epi16((__m256i)x, 8);
  }
  static inline Sum dot(Sum sum, vi x, vi w) {
    return in_order(sum + (vi)_mm256_madd_epi16((__m256i)x, (__m256i)w));
  }
};

struct INT4Units {
  static constexpr int COUNT = 2;
  static constexpr bool EXPANDS_WEIGHT = true, EXPANDS_ROWS = false;
  static inline void of_weight(vi w, vi (&units)[COUNT]) {
    units[0] = w & 0x0F0F0F0F, units[1] = (w >> 4) & 0x0F0F0F0F;
  }
};

// The bytes after this part of the weight: fetched during the sums, when the memory would have
// nothing to do.
struct Ahead {
  const char *next, *end;
  template <int LINES>
  void fetch() {
    if (next >= end) return;
    for (int i = 0; i < LINES; ++i) __builtin_prefetch(next + i * 64, 0, 2);
    next += LINES * 64;
  }
};

// `w`: (granules, PANEL) granules, as (2, units, HALF) units.
template <class U>
static void expand_weight(const char* w, int64_t granules, char* to) {
  for (int64_t g = 0; g < granules; ++g, w += PANEL * 4)
    for (int v = 0; v < 2 * W; ++v) {
      vi units[U::COUNT];
      U::of_weight(load_bits(w + v * L * 4), units);
      for (int u = 0; u < U::COUNT; ++u)
        std::memcpy(to + (((v / W) * granules + g) * U::COUNT + u) * HALF * 4 + v % W * sizeof(vi),
                    &units[u], sizeof(vi));
    }
}

// The same of granules of a compact weight from `first` on.
template <class U>
static void expand_compact(const LinearArgs& a, int64_t panel, int64_t first, int64_t granules,
                           char* to) {
  const CompactPanel from(a.weight, panel, a.granules);
  const PairReader reader(*from.line);
  Exceptions exceptions(from, first);
  const char* pair = from.pairs + first / 2 * PAIR_BYTES;
  const auto granule = [&](int64_t g, int place) __attribute__((always_inline)) {
    vi w[2 * W];
    reader.read(pair, place, w);
    exceptions.put(first + g, w);
    for (int v = 0; v < 2 * W; ++v) {
      vi units[U::COUNT];
      U::of_weight(w[v], units);
      for (int u = 0; u < U::COUNT; ++u)
        std::memcpy(to + (((v / W) * granules + g) * U::COUNT + u) * HALF * 4 + v % W * sizeof(vi),
                    &units[u], sizeof(vi));
    }
  };
  int64_t g = 0;
  for (; g + 2 <= granules; g += 2, pair += PAIR_BYTES) granule(g, 0), granule(g + 1, 1);
  if (g < granules) granule(g, 0);
}

template <class U>
static void expand_row(const int32_t* x, int64_t granules, int32_t* to) {
  for (int64_t g = 0; g < granules; g += L) {
    const int64_t count = std::min<int64_t>(L, granules - g);
    vi bits = {}, units[2], pairs[2];
    std::memcpy(&bits, x + g, count == L ? sizeof(vi) : count * 4);
    U::of_row(bits, units);
    pairs[0] = interleave_low(units[0], units[1]), pairs[1] = interleave_high(units[0], units[1]);
    std::memcpy(to + 2 * g, pairs, sizeof(pairs));
  }
}

// Rows of a part, as units.
struct UnitRows {
  const int32_t* x;
  int64_t stride;
};

// The sums of M rows and half a panel, over a part. `w`: (units, HALF), or half of the columns of
// the panel itself.
template <class U, int M>
__attribute__((noinline)) static void add_half(UnitRows rows, const char* w, int64_t units,
                                               bool is_first, Ahead& ahead, float (*block)[PANEL]) {
  typedef typename U::Sum Sum;
  Sum sum[M][W];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < W; ++v) sum[m][v] = is_first ? Sum{} : (Sum)load(&block[m][v * L]);
  const auto unit = [&](int64_t k) __attribute__((always_inline)) {
    vi weight[W];
    for (int v = 0; v < W; ++v)
      weight[v] = load_bits(w + (k * (U::EXPANDS_WEIGHT ? HALF : PANEL) + v * L) * 4);
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m) {
      const vi x = vi{} + rows.x[m * rows.stride + k];
      for (int v = 0; v < W; ++v) sum[m][v] = U::dot(sum[m][v], x, weight[v]);
    }
  };
  const int64_t whole = units / UNITS_AT_ONCE * UNITS_AT_ONCE;
  for (int64_t k = 0; k < whole; k += UNITS_AT_ONCE) {
    ahead.fetch<UNITS_AT_ONCE / U::COUNT>();
    // Two: with eight float32's tile takes a sixth longer in the first-level cache.
#pragma GCC unroll 2
    for (int u = 0; u < UNITS_AT_ONCE; ++u) unit(k + u);
  }
  for (int64_t k = whole; k < units; ++k) unit(k);
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < W; ++v) store_all(&block[m][v * L], (vf)sum[m][v]);
}

// As add_half, for groups of int4 from `group` on, and the outputs from `column` of `panel` on.
template <class S, int M>
__attribute__((noinline)) static void add_groups(const LinearArgs& a, int64_t row, UnitRows rows,
                                                 const char* w, int64_t group, int64_t count,
                                                 int64_t panel, int column, Ahead& ahead,
                                                 float (*block)[PANEL]) {
  const int64_t groups = a.granules * 8 / GROUP;
  if (group == 0)
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < W; ++v) store_all(&block[m][v * L], vf{});
  for (int64_t g = group; g < group + count; ++g) {
    ahead.fetch<UNITS_AT_ONCE / INT4Units::COUNT>();
    vi sum[M][W] = {};
#pragma GCC unroll 8
    for (int k = 0; k < GROUP / 4; ++k, w += HALF * 4) {
      vi weight[W];
      for (int v = 0; v < W; ++v) weight[v] = load_bits(w + v * L * 4);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const vi x = vi{} + rows.x[m * rows.stride + (g - group) * (GROUP / 4) + k];
        for (int v = 0; v < W; ++v) sum[m][v] = dot_group(sum[m][v], weight[v], x);
      }
    }
    const typename S::template Group<W> scales(a, groups, panel, g, column);
    for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * groups + g;
      const int32_t start = S::start(a.row_sum[at]);
      vf total[W];
      for (int v = 0; v < W; ++v) {
        const vf whole = __builtin_convertvector(end_group(sum[m][v], start), vf);
        total[v] = scales.add(load(&block[m][v * L]), whole, a.row_scale[at], a.row_sum[at], v);
      }
      for (int v = 0; v < W; ++v) store_all(&block[m][v * L], total[v]);
    }
  }
}

// A run of rows of a product.
struct Run {
  int64_t row, rows;
};

template <int M, typename F>
static inline void with_tile(int64_t rows, F call) {
  if constexpr (M > 0) {
    if (rows < M)
      with_tile<M - 1>(rows, call);
    else
      call.template operator()<M>();
  }
}

// A part of a panel, for all rows; `units` are its weight.
template <class U>
static void add_units(Run run, UnitRows x, int64_t, int64_t from, int64_t count, const char* units,
                      Ahead ahead, float (*block)[PANEL]) {
  const int64_t tiles = (run.rows + WIDE_TILE - 1) / WIDE_TILE, all = count * U::COUNT;
  for (int half = 0; half < 2; ++half)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = run.rows * t / tiles, last = run.rows * (t + 1) / tiles;
      with_tile<WIDE_TILE>(last - first, [&]<int M>() {
        add_half<U, M>({x.x + first * x.stride, x.stride},
                       units + half * (U::EXPANDS_WEIGHT ? all : 1) * HALF * 4, all, from == 0,
                       ahead, (float (*)[PANEL])(block[first] + half * HALF));
      });
    }
}

template <class S>
static void add_int4(const LinearArgs& a, Run run, UnitRows x, int64_t panel, int64_t from,
                     int64_t count, const char* units, Ahead ahead, float (*block)[PANEL]) {
  constexpr int STEPS = GROUP / 8;
  const int64_t tiles = (run.rows + WIDE_TILE - 1) / WIDE_TILE, group = from / STEPS;
  for (int half = 0; half < 2; ++half)
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t first = run.rows * t / tiles, last = run.rows * (t + 1) / tiles;
      with_tile<WIDE_TILE>(last - first, [&]<int M>() {
        add_groups<S, M>(a, run.row + first, {x.x + first * x.stride, x.stride},
                         units + half * count * INT4Units::COUNT * HALF * 4, group, count / STEPS,
                         panel, half * HALF, ahead, (float (*)[PANEL])(block[first] + half * HALF));
      });
    }
}

// The rows of a task from granule `from` on, as units.
template <class U>
static UnitRows unit_rows(const LinearArgs& a, const LinearTask& task, int64_t from,
                          int64_t count) {
  const int32_t* x = (const int32_t*)a.x + task.first_row * a.x_stride;
  if constexpr (!U::EXPANDS_ROWS) {
    return {x + from * U::COUNT, a.x_stride};
  } else {
    // An odd number of cache lines (`spread`), with room for a whole vector at the end.
    constexpr int64_t STRIDE = UNITS_OF_PART + 16;
    thread_local std::vector<int32_t> expanded;
    const int64_t rows = task.last_row - task.first_row;
    expanded.resize(rows * STRIDE);
    for (int64_t r = 0; r < rows; ++r)
      expand_row<U>(x + r * a.x_stride + from, count, expanded.data() + r * STRIDE);
    return {expanded.data(), STRIDE};
  }
}

// The sums of a task, with `add` for those of a part and `finish` for a panel's at the end.
template <class U, typename A, typename F>
static void sum_units(const LinearArgs& a, const LinearTask& task, A add, F finish) {
  constexpr int64_t MOST = UNITS_OF_PART / U::COUNT;
  const int64_t rows = task.last_row - task.first_row, parts = (a.granules + MOST - 1) / MOST;
  const auto begin = [&](int64_t p) {
    return p < parts ? a.granules * p / parts / UNITS_AT_ONCE * UNITS_AT_ONCE : a.granules;
  };
  alignas(64) char units[(UNITS_OF_PART + UNITS_AT_ONCE * U::COUNT) * PANEL * 4];
  alignas(64) float blocks[PANELS_AT_ONCE][ROW_BLOCK][PANEL];
  for (int64_t first = task.first_panel, last; first < task.last_panel; first = last) {
    last = std::min(first + panels_of_turn(a.format, rows), task.last_panel);
    for (int64_t p = 0; p < parts; ++p) {
      const int64_t from = begin(p), count = begin(p + 1) - from;
      const UnitRows x = unit_rows<U>(a, task, from, count);
      for (int64_t panel = first; panel < last; ++panel) {
        const char* next = panel + 1 < last ? granule_at(a, panel + 1, from)
                           : p + 1 < parts  ? granule_at(a, first, begin(p + 1))
                                            : panel_at(a, last);
        const char* w = granule_at(a, panel, from);
        if constexpr (U::EXPANDS_WEIGHT) {
          a.is_compact ? expand_compact<U>(a, panel, from, count, units)
                       : expand_weight<U>(w, count, units);
          w = units;
        }
        add(Run{task.first_row, rows}, x, panel, from, count, w,
            Ahead{next, next + stored_bytes(a, count)}, blocks[panel - first]);
        if (p + 1 == parts) finish(panel, blocks[panel - first]);
      }
    }
  }
}

static void scale_units(const LinearArgs& a, const LinearTask& task, int64_t panel,
                        float (*block)[PANEL]) {
  for (int column = 0; column < PANEL; column += L) {
    const vf unit = units_of(a, panel, column);
    for (int64_t row = 0; row < task.last_row - task.first_row; ++row)
      store_all(&block[row][column], load(&block[row][column]) * unit);
  }
}

// Calls `finish` with every panel and its results, (rows, PANEL).
template <typename F>
static void sum_expanded(const LinearArgs& a, const LinearTask& task, F finish) {
  switch (a.format) {
    case Format::F32:
      return sum_units<F32Units>(a, task, add_units<F32Units>, finish);
    case Format::BF16:
      return sum_units<BF16Units>(a, task, add_units<BF16Units>, finish);
    case Format::INT8:
      return sum_units<INT8Units>(a, task, add_units<INT8Units>, [&](int64_t panel, auto block) {
        scale_rows(a, task.first_row, task.last_row - task.first_row, panel, block);
        finish(panel, block);
      });
    default: {
      const auto add = a.scale_is_bytes             ? add_int4<ByteScales>
                       : a.column_offset == nullptr ? add_int4<Scales>
                                                    : add_int4<OffsetScales>;
      sum_units<INT4Units>(
          a, task, [&](auto... of_part) { add(a, of_part...); },
          [&](int64_t panel, auto block) {
            if (a.scale_is_bytes) scale_units(a, task, panel, block);
            finish(panel, block);
          });
    }
  }
}

}  // namespace NS
}  // namespace penstock
#endif
