// Products of attention in bfloat16 by tile registers: scores of keys, and values times weights, of
// any rows. Their sums are not those of other instructions: so where there are tiles they make all
// of them, in the order of dims and of keys, and a row has the same bits with any rows beside it.
#pragma once
#include "util/tiles.h"
#ifdef PENSTOCK_TILES
#include "attention/attention_tile.h"

namespace penstock {
namespace NS {

static_assert(TILE_WORDS == L && TILE % (2 * TILE_ROWS) == 0);
// Pairs of keys that are summed apart; a tile's first key has whole sums before it.
static_assert(KEYS_OF_SUM == 2 * TILE_WORDS);
constexpr int WORDS_OF_TILE = TILE / 2;  // pairs of keys

// True where all products of such heads are made here.
static inline bool has_tile_products(const AttentionArgs& a) {
  return tiles && a.is_bf16 && a.key_scales == nullptr && a.head_dim % (2 * TILE_WORDS) == 0 &&
         a.value_dim % TILE_ROWS == 0;
}

// Many rows: lanes are rows, as in attention_prefill.h. Registers: sums of two tiles of keys or
// dims by two of rows; the two of keys or dims; the two of rows.
constexpr int SUM_TILES = 0, SIDE_TILES = 4, ROW_TILES = 6;

static inline void set_prefill_shapes() {
  TileShapes shapes;
  for (int tile = 0; tile < 8; ++tile) shapes.set(tile, TILE_ROWS);
  set_shapes(shapes);
}

// C[m][v] (+)= sum_k A[m][k] * B[k][v] of two tiles of rows m, unless ONE, and V (1 or 2) of lanes.
// A has `a_row` units a row, B and C have W lanes.
template <bool ADD, bool ONE, int V>
static inline void tile_block(const int32_t* a, int64_t a_row, const int32_t* b, int64_t W,
                              int words, float* c) {
  const int64_t a_bytes = a_row * 4, bytes = W * 4;
  float* lower = c + TILE_ROWS * W;
  if constexpr (ADD) {
    load_tile<SUM_TILES>(c, bytes);
    if constexpr (V == 2) load_tile<SUM_TILES + 1>(c + L, bytes);
    if constexpr (!ONE) load_tile<SUM_TILES + 2>(lower, bytes);
    if constexpr (!ONE && V == 2) load_tile<SUM_TILES + 3>(lower + L, bytes);
  } else {
    clear_tile<SUM_TILES>();
    if constexpr (V == 2) clear_tile<SUM_TILES + 1>();
    if constexpr (!ONE) clear_tile<SUM_TILES + 2>();
    if constexpr (!ONE && V == 2) clear_tile<SUM_TILES + 3>();
  }
  for (int k = 0; k < words; k += TILE_WORDS) {
    load_tile<SIDE_TILES>(a + k, a_bytes);
    load_tile<ROW_TILES>(b + k * W, bytes);
    add_bf16_product<SUM_TILES, SIDE_TILES, ROW_TILES>();
    if constexpr (V == 2) {
      load_tile<ROW_TILES + 1>(b + k * W + L, bytes);
      add_bf16_product<SUM_TILES + 1, SIDE_TILES, ROW_TILES + 1>();
    }
    if constexpr (!ONE) {
      load_tile<SIDE_TILES + 1>(a + TILE_ROWS * a_row + k, a_bytes);
      add_bf16_product<SUM_TILES + 2, SIDE_TILES + 1, ROW_TILES>();
      if constexpr (V == 2) add_bf16_product<SUM_TILES + 3, SIDE_TILES + 1, ROW_TILES + 1>();
    }
  }
  store_tile<SUM_TILES>(c, bytes);
  if constexpr (V == 2) store_tile<SUM_TILES + 1>(c + L, bytes);
  if constexpr (!ONE) store_tile<SUM_TILES + 2>(lower, bytes);
  if constexpr (!ONE && V == 2) store_tile<SUM_TILES + 3>(lower + L, bytes);
}

// The same of M rows, whole tiles, and V vectors of lanes.
template <bool ADD, int V>
static void tile_product(const int32_t* a, int64_t a_row, const int32_t* b, int M, int words,
                         float* c) {
  constexpr int W = V * L, STEP = V == 1 ? 1 : 2;
  for (int m = 0; m < M; m += 2 * TILE_ROWS)
    for (int v = 0; v < V; v += STEP) {
      const int32_t* rows = a + m * a_row;
      float* to = c + m * W + v * L;
      m + TILE_ROWS < M ? tile_block<ADD, false, STEP>(rows, a_row, b + v * L, W, words, to)
                        : tile_block<ADD, true, STEP>(rows, a_row, b + v * L, W, words, to);
    }
}

// Whole tiles' worth of `count`.
static inline int whole_tiles(int count) { return (count + TILE_ROWS - 1) / TILE_ROWS * TILE_ROWS; }

// Scores of `n` keys, [key][unit of dims]; rows of their last tile behind them are nobody's.
template <int V>
static void tile_scores(const int32_t* k, const int32_t* q, int n, int units, float* s) {
  tile_product<false, V>(k, units, q, whole_tiles(n), units, s);
}

// Values as [dim][pair of keys]; of keys that are not there 0.
static void load_values_across(const Rows<bf16>& rows, int DV, int32_t* to) {
  const int pairs = whole_tiles((rows.n + 1) / 2);
  for (int first = 0; first < pairs; first += TILE_WORDS)
    for (int d = 0; d < DV; d += L) {
      __m512i r[L];
      for (int i = 0; i < L; ++i) {
        const int t = 2 * (first + i);
        if (t >= rows.n) {
          r[i] = _mm512_setzero_si512();
          continue;
        }
        // The missing half of the last pair repeats a key, for a weight of 0.
        const bf16 *x = rows.v[t] + d, *y = rows.v[std::min(t + 1, rows.n - 1)] + d;
        r[i] = _mm512_or_si512(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)x)),
            _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)y)), 16));
      }
      transpose(r);
      for (int i = 0; i < L; ++i)
        _mm512_store_si512((__m512i*)(to + (d + i) * WORDS_OF_TILE + first), r[i]);
    }
}

// Adds values times weights of `n` keys, [pair of keys][lane].
template <int V>
static void add_tile_values(const int32_t* v, int32_t* p, int n, int DV, float* o) {
  constexpr int W = V * L;
  const int pairs = (n + 1) / 2, words = whole_tiles(pairs);
  std::memset(p + pairs * W, 0, sizeof(int32_t) * (words - pairs) * W);
  tile_product<true, V>(v, WORDS_OF_TILE, p, DV, words, o);
}

// Few rows: keys in place in the pool, as in attention_decode_bf16.h. Registers: scores of a run of
// keys, twice; keys; queries; outputs of 16 dims, twice; weights; values.
constexpr int SCORE_TILES = 0, KEY_TILE = 2, QUERY_TILE = 3, OUT_TILES = 4, WEIGHT_TILE = 6,
              VALUE_TILE = 7;

// Of `rows` rows, with `lanes` in the scores.
static inline void set_decode_shapes(int rows, int lanes) {
  TileShapes shapes;
  shapes.set(SCORE_TILES, TILE_ROWS, lanes), shapes.set(SCORE_TILES + 1, TILE_ROWS, lanes);
  shapes.set(KEY_TILE, TILE_ROWS), shapes.set(QUERY_TILE, TILE_WORDS, lanes);
  shapes.set(OUT_TILES, rows), shapes.set(OUT_TILES + 1, rows), shapes.set(WEIGHT_TILE, rows);
  shapes.set(VALUE_TILE, TILE_WORDS);
  set_shapes(shapes);
}

// Scores of a run of 16 keys, [key][lane]. `stride`: bytes from a key to the next.
template <int WHICH, int LANES>
static inline void tile_run(const char* keys, int64_t stride, const int32_t* q, int units,
                            float* s) {
  clear_tile<SCORE_TILES + WHICH>();
  for (int u = 0; u < units; u += TILE_WORDS) {
    load_tile<KEY_TILE>(keys + u * 4, stride);
    load_tile<QUERY_TILE>(q + u * LANES, LANES * 4);
    add_bf16_product<SCORE_TILES + WHICH, KEY_TILE, QUERY_TILE>();
  }
  store_tile<SCORE_TILES + WHICH>(s, LANES * 4);
}

// Adds weights, [row][pair of keys], times values, [pair of keys][2 * L dims], to outputs of 2 * L
// dims, `stride` floats a row.
static inline void add_decode_values(const int32_t* weights, const int32_t* values, int words,
                                     float* o, int64_t stride) {
  load_tile<OUT_TILES>(o, stride * 4), load_tile<OUT_TILES + 1>(o + L, stride * 4);
  for (int k = 0; k < words; k += TILE_WORDS) {
    load_tile<WEIGHT_TILE>(weights + k, WORDS_OF_TILE * 4);
    load_tile<VALUE_TILE>(values + k * 2 * L, 2 * L * 4);
    add_bf16_product<OUT_TILES, WEIGHT_TILE, VALUE_TILE>();
    load_tile<VALUE_TILE>(values + k * 2 * L + L, 2 * L * 4);
    add_bf16_product<OUT_TILES + 1, WEIGHT_TILE, VALUE_TILE>();
  }
  store_tile<OUT_TILES>(o, stride * 4), store_tile<OUT_TILES + 1>(o + L, stride * 4);
}

}  // namespace NS
}  // namespace penstock
#endif
