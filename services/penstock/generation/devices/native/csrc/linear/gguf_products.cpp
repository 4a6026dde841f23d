// Products of rows and blocks (gguf_blocks.h). Few rows multiply the codes as they are unpacked.
// For more rows a part of a panel is unpacked once, into bytes and floats in the first-level cache.
// Both have the same sums in the same order, and so the same bits.
#include "linear/gguf_blocks.h"

#include <algorithm>
#include <type_traits>
#include <vector>

#include "linear/gguf_codes.h"

namespace penstock {
namespace NS {
namespace {

constexpr int V = PANEL / L;
#if !defined(__aarch64__) && !defined(__AVX512F__)
#define PENSTOCK_BLOCKS_AVX2
#endif

#ifdef __aarch64__
constexpr int FEW_ROWS = 2, TILE_ROWS = 4, TILE_VECTORS = 4;
#elif defined(__AVX512F__)
constexpr int FEW_ROWS = 4, TILE_ROWS = 12, TILE_VECTORS = 2;
#else
constexpr int FEW_ROWS = 2, TILE_ROWS = 4, TILE_VECTORS = 2;
#endif
// Groups of a part: their codes fill a third of the first-level cache.
constexpr int64_t PART_GROUPS = 16;

// Further bits lie apart from the halves of bytes: the hardware's own prefetch falls behind.
template <BlockTraits T>
constexpr bool HAS_PLANES = T.bits == 5 || T.bits == 6;
constexpr int64_t FETCH_AHEAD = 4 << 10;

// Adds the products of two granules to a sum. IS_BYTES: codes may be above 127.
template <bool IS_BYTES>
static inline vi dot_two(vi sum, vi first, vi second, vi x0, vi x1) {
#ifdef PENSTOCK_BLOCKS_AVX2
  const __m256i ones = _mm256_set1_epi16(1);
  if constexpr (IS_BYTES) {
    // Of a signed code and x: its magnitude times x with its sign, which fits 16 bits.
    const auto one = [&](vi code, vi x) {
      const __m256i w = (__m256i)(code ^ splat_bits(int32_t(0x80808080)));
      return _mm256_madd_epi16(
          _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8((__m256i)x, w)), ones);
    };
    return sum + (vi)one(first, x0) + (vi)one(second, x1);
  }
  static_assert(63 * 127 * 4 < 1 << 15);
  const __m256i both = _mm256_add_epi16(_mm256_maddubs_epi16((__m256i)first, (__m256i)x0),
                                        _mm256_maddubs_epi16((__m256i)second, (__m256i)x1));
  return sum + (vi)_mm256_madd_epi16(both, ones);
#elif defined(__aarch64__)
  if constexpr (IS_BYTES) {
    const vi bias = splat_bits(int32_t(0x80808080));
    sum = (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)(first ^ bias), (int8x16_t)x0);
    return (vi)vdotq_s32((int32x4_t)sum, (int8x16_t)(second ^ bias), (int8x16_t)x1);
  }
  return dot_group(dot_group(sum, first, x0), second, x1);
#else
  return dot_bytes(dot_bytes(sum, first, x0), second, x1);
#endif
}

// What the sum of a scale's inputs begins with: their codes are `zero` too large, unless dot_two
// makes them signed.
template <bool IS_BYTES>
static inline int32_t start_of(int32_t zero, int32_t row_sum) {
#if defined(__AVX512F__) && !defined(__aarch64__)
  return -zero * row_sum;
#else
  return IS_BYTES ? 0 : -zero * row_sum;
#endif
}

// The numbers of a row of x that a group needs.
struct RowGroup {
  const int32_t* x;
  float scale;
  const int32_t* sums;

  RowGroup(const LinearArgs& a, int64_t row, int64_t group) {
    const int64_t groups = a.granules * 8 / GROUP, at = row * groups + group;
    x = (const int32_t*)a.x + row * a.x_stride + group * (GROUP / 4);
    scale = a.row_scale[at], sums = a.row_sum + at * 2;
  }
  int32_t sum() const { return sums[0] + sums[1]; }
  // Of the inputs of scale `s` of `scales`.
  int32_t sum(int s, int scales) const { return scales == 1 ? sum() : sums[s]; }
};

// M rows and a panel, unpacked on the way.
template <BlockTraits T, int M>
static void sum_few(const LinearArgs& a, int64_t row, const char* panel, float (*block)[PANEL]) {
  constexpr bool IS_BYTES = T.most > 127;
  constexpr int STEPS = GROUP / 8 / T.scales;
  const int64_t groups = a.granules * 8 / GROUP;
  vf total[M][V] = {};
  for (int64_t g = 0; g < groups; ++g) {
    const BlockGroup<T> group(panel, g);
    if constexpr (HAS_PLANES<T>)
      for (int64_t i = 0; i < T.group_bytes(); i += 64)
        __builtin_prefetch(group.group + FETCH_AHEAD + i, 0, 2);
    for (int from = 0; from < V; from += TILE_VECTORS)
      for (int s = 0; s < T.scales; ++s) {
        vi sum[M][TILE_VECTORS];
        for (int m = 0; m < M; ++m)
          for (int v = 0; v < TILE_VECTORS; ++v)
            sum[m][v] =
                splat_bits(start_of<IS_BYTES>(T.zero, RowGroup(a, row + m, g).sum(s, T.scales)));
#pragma GCC unroll 4
        for (int u = 0; u < STEPS; ++u) {
          const int step = s * STEPS + u;
          vi first[TILE_VECTORS], second[TILE_VECTORS];
          for (int v = 0; v < TILE_VECTORS; ++v) group.codes(step, from + v, first[v], second[v]);
          for (int m = 0; m < M; ++m) {
            const int32_t* x = RowGroup(a, row + m, g).x + 2 * step;
            const vi x0 = splat_bits(x[0]), x1 = splat_bits(x[1]);
            for (int v = 0; v < TILE_VECTORS; ++v)
              sum[m][v] = dot_two<IS_BYTES>(sum[m][v], first[v], second[v], x0, x1);
          }
        }
        for (int v = 0; v < TILE_VECTORS; ++v) {
          const vf scale = group.scale(s, from + v);
          for (int m = 0; m < M; ++m) {
            vf& to = total[m][from + v];
            const vf whole = __builtin_convertvector(sum[m][v], vf);
            to = fmadd(whole * splat(RowGroup(a, row + m, g).scale), scale, to);
          }
        }
      }
    if constexpr (T.has_offset)
      for (int v = 0; v < V; ++v) {
        const vf offset = group.offset(v);
        for (int m = 0; m < M; ++m) {
          const RowGroup own(a, row + m, g);
          total[m][v] = fmadd(splat(own.scale * float(own.sum())), offset, total[m][v]);
        }
      }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) store_all(&block[m][v * L], total[m][v]);
}

// Groups of a panel as bytes and floats.
struct Unpacked {
  alignas(64) int32_t codes[PART_GROUPS][GROUP / 4][PANEL];
  alignas(64) float scale[PART_GROUPS][2][PANEL], offset[PART_GROUPS][PANEL];
};

template <BlockTraits T>
static void unpack(const char* panel, int64_t first, int64_t count, Unpacked& to) {
  for (int64_t g = 0; g < count; ++g) {
    const BlockGroup<T> group(panel, first + g);
    for (int step = 0; step < GROUP / 8; ++step)
      for (int v = 0; v < V; ++v) {
        vi low, high;
        group.codes(step, v, low, high);
        std::memcpy(&to.codes[g][2 * step][v * L], &low, sizeof(low));
        std::memcpy(&to.codes[g][2 * step + 1][v * L], &high, sizeof(high));
      }
    for (int v = 0; v < V; ++v) {
      for (int s = 0; s < T.scales; ++s) store_all(&to.scale[g][s][v * L], group.scale(s, v));
      if constexpr (T.has_offset) store_all(&to.offset[g][v * L], group.offset(v));
    }
  }
}

// Memory that a part's products fetch meanwhile.
struct Next {
  const char *at, *end;
  void fetch(int64_t bytes) {
    for (const char* stop = std::min(end, at + bytes); at < stop; at += 64)
      __builtin_prefetch(at, 0, 2);
  }
};

// Scales of a group with sums in registers at one time.
template <int SCALES>
constexpr int SCALES_AT_ONCE = TILE_ROWS >= 12 ? SCALES : 1;

// Rows of a task as sum_tile reads them, by tiles and groups: of a group the words of x, (8, M),
// what the sums of its halves begin with, (2, M), and scales and scales times sums as floats, (M)
// each.
struct TileRows {
  static constexpr int WORDS = GROUP / 4 + 4;
  std::vector<int32_t> words;
  // Of what they were made: the most rows of a tile, scales of a group, and the codes' zero.
  int most = 0, scales = 0, zero = 0;

  static int64_t tiles(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

  template <BlockTraits T, int MOST>
  void prepare(const LinearArgs& a, int64_t row, int64_t rows) {
    const int64_t groups = a.granules * 8 / GROUP, count = tiles(rows, MOST);
    most = MOST, scales = T.scales, zero = T.zero;
    if (int64_t(words.size()) < rows * groups * WORDS) words.resize(rows * groups * WORDS);
    for (int64_t t = 0; t < count; ++t) {
      const int64_t first = rows * t / count, M = rows * (t + 1) / count - first;
      int32_t* to = words.data() + first * groups * WORDS;
      for (int64_t g = 0; g < groups; ++g, to += M * WORDS)
        for (int64_t m = 0; m < M; ++m) {
          const RowGroup from(a, row + first + m, g);
          for (int k = 0; k < GROUP / 4; ++k) to[k * M + m] = from.x[k];
          for (int s = 0; s < 2; ++s)
            to[(GROUP / 4 + s) * M + m] =
                T.has_offset ? 0 : start_of<(T.most > 127)>(T.zero, from.sum(s, T.scales));
          const float factor = from.scale * float(from.sum());
          std::memcpy(to + (WORDS - 2) * M + m, &from.scale, 4);
          std::memcpy(to + (WORDS - 1) * M + m, &factor, 4);
        }
    }
  }
};

static inline vf splat_float(const int32_t* word) {
  float f;
  std::memcpy(&f, word, 4);
  return splat(f);
}

// M rows and an unpacked part, added to `block`. `x`: TileRows::words. Offsets come with one scale.
template <bool IS_BYTES, int SCALES, bool HAS_OFFSET, int M>
static void sum_tile(const int32_t* x, int64_t count, const Unpacked& part, Next& next,
                     int64_t group_bytes, float (*block)[PANEL]) {
  constexpr int STEPS = GROUP / 8 / SCALES, AT_ONCE = SCALES_AT_ONCE<SCALES>;
  for (int64_t g = 0; g < count; ++g, x += M * TileRows::WORDS) {
    next.fetch(group_bytes);
    for (int from = 0; from < V; from += TILE_VECTORS)
      for (int first = 0; first < SCALES; first += AT_ONCE) {
        vi sum[AT_ONCE][M][TILE_VECTORS];
#pragma GCC unroll 2
        for (int s = 0; s < AT_ONCE; ++s) {
#pragma GCC unroll 12
          for (int m = 0; m < M; ++m)
            for (int v = 0; v < TILE_VECTORS; ++v)
              sum[s][m][v] = HAS_OFFSET ? vi{} : splat_bits(x[(GROUP / 4 + first + s) * M + m]);
#pragma GCC unroll 4
          for (int u = 0; u < STEPS; ++u) {
            const int step = (first + s) * STEPS + u;
            vi low[TILE_VECTORS], high[TILE_VECTORS];
            for (int v = 0; v < TILE_VECTORS; ++v) {
              low[v] = load_bits((const char*)&part.codes[g][2 * step][(from + v) * L]);
              high[v] = load_bits((const char*)&part.codes[g][2 * step + 1][(from + v) * L]);
            }
#pragma GCC unroll 12
            for (int m = 0; m < M; ++m) {
              const vi x0 = splat_bits(x[2 * step * M + m]),
                       x1 = splat_bits(x[(2 * step + 1) * M + m]);
              for (int v = 0; v < TILE_VECTORS; ++v)
                sum[s][m][v] = dot_two<IS_BYTES>(sum[s][m][v], low[v], high[v], x0, x1);
            }
          }
        }
#pragma GCC unroll 12
        for (int m = 0; m < M; ++m) {
          const vf scale = splat_float(x + (TileRows::WORDS - 2) * M + m);
          for (int v = 0; v < TILE_VECTORS; ++v) {
            const int column = (from + v) * L;
            vf total = load(&block[m][column]);
            for (int s = 0; s < AT_ONCE; ++s)
              total = fmadd(__builtin_convertvector(sum[s][m][v], vf) * scale,
                            load(&part.scale[g][first + s][column]), total);
            if constexpr (HAS_OFFSET)
              total = fmadd(splat_float(x + (TileRows::WORDS - 1) * M + m),
                            load(&part.offset[g][column]), total);
            store_all(&block[m][column], total);
          }
        }
      }
  }
}

typedef void (*Tile)(const int32_t*, int64_t, const Unpacked&, Next&, int64_t, float (*)[PANEL]);

template <BlockTraits T>
constexpr int MOST_ROWS = TILE_ROWS / SCALES_AT_ONCE<T.scales>;

template <BlockTraits T, int M = MOST_ROWS<T>>
static Tile pick_tile(int64_t rows) {
  if constexpr (M == 0)
    return nullptr;
  else
    return rows < M ? pick_tile<T, M - 1>(rows)
                    : sum_tile<(T.most > 127), T.scales, T.has_offset, M>;
}

template <BlockTraits T>
static void sum_many(const LinearArgs& a, const TileRows& x, int64_t rows, const char* panel,
                     float (*block)[PANEL]) {
  static thread_local Unpacked part;
  const int64_t groups = a.granules * 8 / GROUP, tiles = TileRows::tiles(rows, MOST_ROWS<T>);
  const char* end = panel + groups * GROUP / T.inputs * T.block_bytes();
  std::memset(block, 0, rows * sizeof(*block));
  for (int64_t first = 0; first < groups; first += PART_GROUPS) {
    const int64_t count = std::min(PART_GROUPS, groups - first);
    unpack<T>(panel, first, count, part);
    // The panel that follows is nearly always of the same type, or as long.
    Next next{BlockGroup<T>(panel, first + count).group, end + PART_GROUPS * T.group_bytes()};
    for (int64_t t = 0; t < tiles; ++t) {
      const int64_t begin = rows * t / tiles, M = rows * (t + 1) / tiles - begin;
      pick_tile<T>(M)(x.words.data() + (begin * groups + first * M) * TileRows::WORDS, count, part,
                      next, T.group_bytes(), block + begin);
      next.end = next.at;
    }
  }
}

// Rows up to this number are multiplied by sum_few. Codes with further bits take more registers.
template <BlockTraits T>
constexpr int FEW_ROWS_OF = HAS_PLANES<T> ? 2 : FEW_ROWS;

template <BlockTraits T, int M = FEW_ROWS_OF<T>>
static void sum_some(const LinearArgs& a, int64_t row, int64_t rows, const char* panel,
                     float (*block)[PANEL]) {
  if constexpr (M > 0) {
    if (rows == M) return sum_few<T, M>(a, row, panel, block);
    sum_some<T, M - 1>(a, row, rows, panel, block);
  }
}

// Calls `work` with the traits of a type.
template <typename F>
static void with_traits(BlockType type, F work) {
  switch (type) {
#define PENSTOCK_BLOCK_CASE(name) \
  case BlockType::name:           \
    return work(std::integral_constant<BlockType, BlockType::name>{});
    PENSTOCK_BLOCK_CASE(Q4_0)
    PENSTOCK_BLOCK_CASE(Q4_1)
    PENSTOCK_BLOCK_CASE(Q5_0)
    PENSTOCK_BLOCK_CASE(Q5_1)
    PENSTOCK_BLOCK_CASE(Q8_0)
    PENSTOCK_BLOCK_CASE(Q4_K)
    PENSTOCK_BLOCK_CASE(Q5_K)
    PENSTOCK_BLOCK_CASE(Q6_K)
    PENSTOCK_BLOCK_CASE(IQ4_NL)
    PENSTOCK_BLOCK_CASE(IQ4_XS)
    PENSTOCK_BLOCK_CASE(MXFP4)
#undef PENSTOCK_BLOCK_CASE
  }
}

}  // namespace

void sum_blocks(const LinearArgs& a, const LinearTask& task, FinishPanel finish) {
  static thread_local TileRows x;
  const PanelTable table(a.weight);
  const int64_t row = task.first_row, rows = task.last_row - row;
  alignas(64) float block[ROW_BLOCK][PANEL];
  bool is_prepared = false;
  for (int64_t panel = task.first_panel; panel < task.last_panel; ++panel) {
    with_traits(table.type(panel), [&](auto type) {
      constexpr BlockTraits T = traits_of(type());
      const char* bytes = a.weight + table.offset(panel);
      if (rows <= FEW_ROWS_OF<T>) return sum_some<T>(a, row, rows, bytes, block);
      if (!is_prepared || x.most != MOST_ROWS<T> || x.scales != T.scales || x.zero != T.zero)
        x.prepare<T, MOST_ROWS<T>>(a, row, rows);
      is_prepared = true;
      sum_many<T>(a, x, rows, bytes, block);
    });
    finish(a, row, rows, panel, block);
  }
}

}  // namespace NS
}  // namespace penstock
