// Products in bfloat16 and int8 by tile registers. In bfloat16 no other instruction gives their
// sums: so where there are tiles, they make the products of any number of rows, and the result of a
// row depends on no other. Sums of int8 are whole numbers, the same by any instruction.
#pragma once
#include "util/tiles.h"
#ifdef PENSTOCK_TILES
#include <algorithm>
#include <cstring>

#include "linear/compact_granules.h"
#include "linear/products.h"

namespace penstock {
namespace NS {

// Rows of int8 up to which the memory sets the pace, with tiles or without.
constexpr int64_t FEW_ROWS = 12;

// True where a task's sums are made here.
static inline bool is_tiled(Format format, int64_t rows) {
  return tiles && (format == Format::BF16 || (format == Format::INT8 && rows > FEW_ROWS));
}

// Rows that have their sums in registers beside a panel: two tiles of rows times two of columns.
constexpr int64_t BLOCK_ROWS = 2 * TILE_ROWS;
// Granules that are summed before the next rows have their turn: they stay in the second-level
// cache. Whole tiles.
constexpr int64_t TILED_PART = 1024;
static_assert(TILED_PART % TILE_WORDS == 0 && PANEL == 2 * TILE_WORDS);

// Registers: sums of rows and columns, rows, columns.
constexpr int SUM = 0, ROWS = 4, COLUMNS = 6;

template <bool IS_BF16, int C, int A, int B>
static inline void add_product() {
  if constexpr (IS_BF16)
    add_bf16_product<C, A, B>();
  else
    add_byte_product<C, A, B>();
}

// `count` rows, in one tile of rows or two.
static TileShapes shapes_of(int64_t count) {
  TileShapes shapes;
  const int64_t upper = std::min<int64_t>(count, TILE_ROWS), lower = count - upper;
  shapes.set(SUM, upper), shapes.set(SUM + 1, upper), shapes.set(ROWS, upper);
  if (lower > 0)
    shapes.set(SUM + 2, lower), shapes.set(SUM + 3, lower), shapes.set(ROWS + 1, lower);
  shapes.set(COLUMNS, TILE_WORDS), shapes.set(COLUMNS + 1, TILE_WORDS);
  return shapes;
}

// Sixteen granules of up to 32 rows. Strides are in bytes.
template <bool IS_BF16, bool IS_TWO>
static inline void add_words(const char* x, int64_t stride, const char* w) {
  constexpr int64_t LINE = PANEL * 4;
  load_tile<COLUMNS>(w, LINE);
  load_tile<COLUMNS + 1>(w + LINE / 2, LINE);
  load_tile<ROWS>(x, stride);
  add_product<IS_BF16, SUM, ROWS, COLUMNS>();
  add_product<IS_BF16, SUM + 1, ROWS, COLUMNS + 1>();
  if constexpr (IS_TWO) {
    load_tile<ROWS + 1>(x + TILE_ROWS * stride, stride);
    add_product<IS_BF16, SUM + 2, ROWS + 1, COLUMNS>();
    add_product<IS_BF16, SUM + 3, ROWS + 1, COLUMNS + 1>();
  }
}

// The last granules, fewer than sixteen, with zeros behind them.
template <bool IS_BF16, bool IS_TWO>
static void add_rest(const char* x, int64_t stride, int64_t rows, const char* w, int64_t granules) {
  alignas(64) int32_t x_words[BLOCK_ROWS][TILE_WORDS] = {}, w_words[TILE_WORDS][PANEL] = {};
  for (int64_t r = 0; r < rows; ++r) std::memcpy(x_words[r], x + r * stride, granules * 4);
  std::memcpy(w_words, w, granules * sizeof(w_words[0]));
  add_words<IS_BF16, IS_TWO>((const char*)x_words, sizeof(x_words[0]), (const char*)w_words);
}

// The sums of up to 32 rows over the granules from `first` up to `last`.
template <bool IS_BF16, bool IS_TWO>
static void add_block(const LinearArgs& a, int64_t row, int64_t rows, const char* w, int64_t first,
                      int64_t last, float (*block)[PANEL]) {
  constexpr int64_t STRIDE = PANEL * 4;
  const int64_t stride = a.x_stride * 4, whole = (last - first) / TILE_WORDS;
  const char* x = (const char*)a.x + (row * a.x_stride + first) * 4;
  float (*lower)[PANEL] = block + TILE_ROWS;
  if (first == 0) {
    clear_tile<SUM>(), clear_tile<SUM + 1>();
    if constexpr (IS_TWO) clear_tile<SUM + 2>(), clear_tile<SUM + 3>();
  } else {
    load_tile<SUM>(block, STRIDE), load_tile<SUM + 1>(&block[0][TILE_WORDS], STRIDE);
    if constexpr (IS_TWO)
      load_tile<SUM + 2>(lower, STRIDE), load_tile<SUM + 3>(&lower[0][TILE_WORDS], STRIDE);
  }
  for (int64_t i = 0; i < whole; ++i, x += TILE_WORDS * 4, w += TILE_WORDS * STRIDE)
    add_words<IS_BF16, IS_TWO>(x, stride, w);
  if (const int64_t rest = (last - first) % TILE_WORDS)
    add_rest<IS_BF16, IS_TWO>(x, stride, rows, w, rest);
  store_tile<SUM>(block, STRIDE), store_tile<SUM + 1>(&block[0][TILE_WORDS], STRIDE);
  if constexpr (IS_TWO)
    store_tile<SUM + 2>(lower, STRIDE), store_tile<SUM + 3>(&lower[0][TILE_WORDS], STRIDE);
}

// Calls `finish` with the rows of every panel and their results, (rows, PANEL).
template <bool IS_BF16, typename F>
static void sum_tiled(const LinearArgs& a, const LinearTask& task, F finish) {
  alignas(64) float blocks[ROW_BLOCK][PANEL];
  const int64_t all = task.last_row - task.first_row;
  // The shapes stay as they are while blocks have as many rows.
  int64_t shaped = 0;
  char* unpacked = a.is_compact ? unpacked_memory(TILED_PART) : nullptr;
  for (int64_t panel = task.first_panel; panel < task.last_panel; ++panel)
    for (int64_t first = 0, last; first < a.granules; first = last) {
      last = std::min(first + TILED_PART, a.granules);
      const char* w = whole_granules(a, panel, first, last - first, unpacked);
      for (int64_t begin = 0; begin < all; begin += BLOCK_ROWS) {
        const int64_t row = task.first_row + begin, rows = std::min(BLOCK_ROWS, all - begin);
        if (rows != shaped) set_shapes(shapes_of(rows)), shaped = rows;
        const auto add = rows > TILE_ROWS ? add_block<IS_BF16, true> : add_block<IS_BF16, false>;
        add(a, row, rows, w, first, last, blocks + begin);
        if (last < a.granules) continue;
        if constexpr (!IS_BF16) scale_rows(a, row, rows, panel, blocks + begin);
        finish(a, row, rows, panel, blocks + begin);
      }
    }
  release_tiles();
}

}  // namespace NS
}  // namespace penstock
#endif
