// x times a packed weight. An output is one sum over the inputs in their order, or in that of the
// tile registers (tiled.h), with any rows computed beside it: the result of a row depends neither
// on the batch nor on the number of threads.
#include "linear/linear.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <vector>

#include "linear/compact_granules.h"
#include "linear/expanded.h"
#include "linear/gguf_blocks.h"
#include "linear/group_scales.h"
#include "linear/products.h"
#include "linear/tiled.h"
#include "util/abs_max.h"
#include "util/rotate.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// Vectors of a panel, and the rows that have their sums in registers beside them.
constexpr int V = PANEL / L;
#ifdef __aarch64__
constexpr int TILE = 3;
#elif defined(__AVX512F__)
constexpr int TILE = 12;
#else
constexpr int TILE = 2;
#endif

#ifdef PENSTOCK_EXPANDS
int64_t panels_at_once(Format format, int64_t rows) {
  if (format == Format::GGUF) return rows > 2 ? BLOCK_PANELS_AT_ONCE : 1;
  return is_expanded(format, rows, PANELS_AT_ONCE) ? panels_of_turn(format, rows) : 1;
}
#else
int64_t panels_at_once(Format format, int64_t rows) {
  return format == Format::GGUF && rows > 2 ? BLOCK_PANELS_AT_ONCE : 1;
}
#endif

struct F32 {
  typedef vf Sum;
  static inline Sum dot(Sum sum, int32_t x, vi w) {
    float f;
    std::memcpy(&f, &x, 4);
    return sum + splat(f) * (vf)w;
  }
};

struct BF16 {
  typedef vf Sum;
  static inline Sum dot(Sum sum, int32_t x, vi w) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)splat_bits(x), (bfloat16x8_t)w);
#elif defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)splat_bits(x), (__m512bh)w);
#else
    const vi both = splat_bits(x), high = splat_bits(int32_t(0xFFFF0000));
    sum += (vf)(both << 16) * (vf)(w << 16);
    return sum + (vf)(both & high) * (vf)(w & high);
#endif
  }
};

struct INT8 {
  typedef vi Sum;
  static inline Sum dot(Sum sum, int32_t x, vi w) { return dot_bytes(sum, splat_bits(x), w); }
};

// From this number of rows on, software prefetches the weight into the second-level cache,
// FETCH_AHEAD bytes ahead. With fewer rows the hardware's own prefetch keeps up with the memory,
// and any other disturbs it; with more, a granule takes so long that it falls behind.
constexpr int FETCHING_ROWS = 6;
constexpr int64_t FETCH_AHEAD = 8 << 10;

// Inline always: GCC leaves out calls of a function that does nothing else.
__attribute__((always_inline)) static inline void fetch(const char* weight, int64_t bytes) {
  // The last line first: in the order of the weight it disturbs the hardware's own prefetch.
  for (int64_t i = bytes - 64; i >= 0; i -= 64) __builtin_prefetch(weight + FETCH_AHEAD + i, 0, 2);
}

// Lines that a row of results fetches while no products run, when the memory would have nothing to
// do.
struct Beyond {
  static constexpr int64_t BYTES = 4 * 64;
  const char* weight;  // null: nothing

  void fetch_next() {
    if (weight == nullptr) return;
    fetch(weight, BYTES);
    weight += BYTES;
  }
};

constexpr int UNROLL = 8;
// Granules that are summed before the next rows have their turn: they stay in the second-level
// cache. A multiple of an int4 group's, as UNROLL is.
constexpr int64_t PART = 1024;

// A part of the granules of a panel, which is summed before the next tile of rows has its turn.
struct Part {
  const char* w;
  int64_t first, last;
  bool is_last;
  bool is_new;  // no tile has read it yet
  // Of a compact weight, for the tile that reads it: the panel; null for the others, that read `w`.
  const CompactPanel* compact;
  char* kept;  // null: there are no others
};

template <class F, int M>
static inline void add_up(const int32_t* x, int64_t stride, const Part& part,
                          typename F::Sum (&sum)[M][V]) {
  const int64_t granules = part.last - part.first, whole = granules / UNROLL * UNROLL;
  auto granule = [&](int64_t g) __attribute__((always_inline)) {
    vi w[V];
    for (int v = 0; v < V; ++v) w[v] = load_bits(part.w + g * PANEL * 4 + v * 4 * L);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] = F::dot(sum[m][v], x[m * stride + g], w[v]);
  };
  for (int64_t g = 0; g < whole; g += UNROLL) {
    if (M >= FETCHING_ROWS && part.is_new) fetch(part.w + g * PANEL * 4, UNROLL * PANEL * 4);
#pragma GCC unroll 8
    for (int u = 0; u < UNROLL; ++u) granule(g + u);
  }
  for (int64_t g = whole; g < granules; ++g) granule(g);
}

// bfloat16 of a compact weight: its granules are read in vectors as they are multiplied. KEEPS: and
// are put to `kept`, where the next tiles read them.
template <bool KEEPS>
struct CompactBF16 : BF16 {
  template <int M>
  __attribute__((always_inline)) static void add_up(const int32_t* x, int64_t stride,
                                                    const Part& part, vf (&sum)[M][V]);
};

template <bool KEEPS>
template <int M>
void CompactBF16<KEEPS>::add_up(const int32_t* x, int64_t stride, const Part& part,
                                vf (&sum)[M][V]) {
  const CompactPanel& panel = *part.compact;
  const PairReader reader(*panel.line);
  Exceptions exceptions(panel, part.first);
  // Of their own: what is written to `kept` might change those of `part`.
  const int64_t first = part.first, last = part.last;
  char* kept = part.kept;
  const char* pair = panel.pairs + first / 2 * PAIR_BYTES;
  x -= first;
  const auto granule = [&](int64_t g, int place) __attribute__((always_inline)) {
    vi w[V];
    reader.read(pair, place, w);
    exceptions.put(g, w);
    if constexpr (KEEPS)
      for (int v = 0; v < V; ++v, kept += sizeof(vi)) std::memcpy(kept, &w[v], sizeof(vi));
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sum[m][v] = dot(sum[m][v], x[m * stride + g], w[v]);
  };
  int64_t g = first;
  // One pair in a turn: with more the compiler puts sums aside for vectors that it reads early.
#pragma GCC unroll 1
  for (; g + 2 <= last; g += 2, pair += PAIR_BYTES) {
    if constexpr (M >= FETCHING_ROWS) fetch(pair, PAIR_BYTES);
    granule(g, 0), granule(g + 1, 1);
  }
  if (g < last) granule(g, 0);
}

template <class F>
constexpr bool IS_COMPACT = false;
template <bool KEEPS>
constexpr bool IS_COMPACT<CompactBF16<KEEPS>> = true;

// Sums of a tile: 32-bit floats or integers, as its format has them, and the scaled result in their
// place at the end.
template <class F, int M>
static void tile(const LinearArgs& a, int64_t row, int64_t panel, const Part& part,
                 float (*block)[PANEL]) {
  typedef typename F::Sum Sum;
  const int32_t* x = (const int32_t*)a.x + row * a.x_stride + part.first;
  Sum sum[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) sum[m][v] = part.first == 0 ? Sum{} : (Sum)load(&block[m][v * L]);
  if constexpr (IS_COMPACT<F>)
    F::template add_up<M>(x, a.x_stride, part, sum);
  else
    add_up<F, M>(x, a.x_stride, part, sum);
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) {
      vf value = (vf)sum[m][v];
      if constexpr (std::is_same_v<Sum, vi>)
        if (part.is_last) value = scaled_int8(a, row + m, panel * PANEL + v * L, sum[m][v]);
      store_all(&block[m][v * L], value);
    }
}

// int4: two granules' worth of inputs lie in one, the first in the low halves of its bytes. A group
// is summed in integers; what S (group_scales.h) takes off its numbers, or adds, is times the sum
// of the row's group.
template <class S>
struct INT4 {
  template <int M>
  static void tile(const LinearArgs& a, int64_t row, int64_t panel, const Part& part,
                   float (*block)[PANEL]);
};

// Rows with results that stay in registers from group to group.
constexpr int KEPT_ROWS = L == 8 ? 1 : TILE / 4;

template <class S>
template <int M>
void INT4<S>::tile(const LinearArgs& a, int64_t row, int64_t panel, const Part& part,
                   float (*block)[PANEL]) {
  constexpr int STEPS = GROUP / 8;
  const int64_t groups = a.granules / STEPS, first_group = part.first / STEPS,
                last_group = part.last / STEPS;
  const vi low = splat_bits(0x0F0F0F0F);
  constexpr bool KEEPS = M <= KEPT_ROWS;
  vf kept[KEEPS ? M : 1][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) {
      const vf start = part.first == 0 ? vf{} : load(&block[m][v * L]);
      if constexpr (KEEPS)
        kept[m][v] = start;
      else if (part.first == 0)
        store_all(&block[m][v * L], start);
    }
  for (int64_t group = first_group; group < last_group; ++group) {
    if (M >= FETCHING_ROWS && part.is_new)
      fetch(part.w + (group - first_group) * STEPS * PANEL * 4, STEPS * PANEL * 4);
    vi sum[M][V];
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v)
        sum[m][v] = start_group(S::start(a.row_sum[(row + m) * groups + group]));
#pragma GCC unroll 4
    for (int u = 0; u < STEPS; ++u) {
      const int64_t g = group * STEPS + u;
      vi first[V], second[V];
      for (int v = 0; v < V; ++v) {
        vi both = load_bits(part.w + (g - part.first) * PANEL * 4 + v * 4 * L);
        first[v] = both & low;
        second[v] = (vi)((vu)both >> 4) & low;
      }
#pragma GCC unroll 12
      for (int m = 0; m < M; ++m) {
        const int32_t* x = (const int32_t*)a.x + (row + m) * a.x_stride + 2 * g;
        vi x0 = splat_bits(x[0]), x1 = splat_bits(x[1]);
        for (int v = 0; v < V; ++v)
          sum[m][v] = dot_group(dot_group(sum[m][v], first[v], x0), second[v], x1);
      }
    }
    const typename S::template Group<V> scales(a, groups, panel, group, 0);
    for (int m = 0; m < M; ++m) {
      const int64_t at = (row + m) * groups + group;
      for (int v = 0; v < V; ++v) {
        const vi whole = end_group(sum[m][v], S::start(a.row_sum[at]));
        vf total = KEEPS ? kept[KEEPS ? m : 0][v] : load(&block[m][v * L]);
        total = scales.add(total, __builtin_convertvector(whole, vf), a.row_scale[at],
                           a.row_sum[at], v);
        if constexpr (KEEPS)
          kept[m][v] = total;
        else
          store_all(&block[m][v * L], total);
      }
    }
  }
  if constexpr (KEEPS)
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < V; ++v) store_all(&block[m][v * L], kept[m][v]);
  if constexpr (S::HAS_UNITS)
    if (part.is_last)
      for (int v = 0; v < V; ++v) {
        const vf unit = units_of(a, panel, v * L);
        for (int m = 0; m < M; ++m) store_all(&block[m][v * L], load(&block[m][v * L]) * unit);
      }
}

typedef void (*Tile)(const LinearArgs&, int64_t, int64_t, const Part&, float (*)[PANEL]);

template <class F>
constexpr bool IS_INT4 = false;
template <class S>
constexpr bool IS_INT4<INT4<S>> = true;

template <class F, int M>
static Tile pick(int rows) {
  if constexpr (M == 0)
    return nullptr;
  else {
    if (rows < M) return pick<F, M - 1>(rows);
    if constexpr (IS_INT4<F>)
      return F::template tile<M>;
    else
      return tile<F, M>;
  }
}
static Tile pick(const LinearArgs& a, const Part& part, int rows) {
  if (part.compact != nullptr)
    return part.kept != nullptr ? pick<CompactBF16<true>, TILE>(rows)
                                : pick<CompactBF16<false>, TILE>(rows);
  switch (a.format) {
    case Format::F32:
      return pick<F32, TILE>(rows);
    case Format::BF16:
      return pick<BF16, TILE>(rows);
    case Format::INT8:
      return pick<INT8, TILE>(rows);
    default:
      if (a.scale_is_bytes) return pick<INT4<ByteScales>, TILE>(rows);
      return a.column_offset == nullptr ? pick<INT4<Scales>, TILE>(rows)
                                        : pick<INT4<OffsetScales>, TILE>(rows);
  }
}

// The outputs of gates and the values that they gate, both through T already.
template <Gate GATE, typename T>
static inline vf gated(vf gate, vf value, const T* through) {
  if constexpr (GATE == Gate::SILU) return rounded(silu(gate), through) * value;
  if constexpr (GATE == Gate::GELU_TANH) return rounded(gelu_tanh(gate), through) * value;
  if constexpr (GATE == Gate::CLAMPED) {
    // gpt-oss's numbers.
    const vf most = splat(7.0f), least = splat(-7.0f), one = splat(1.0f);
    const vf low = gate > most ? most : gate;
    value = value > most ? most : value;
    value = value < least ? least : value;
    return rounded(value + one, through) * rounded(low * sigmoid(low * splat(1.702f)), through);
  }
  return value;
}

// Stores a panel's sums; `bias` and the widths are the same for all rows.
template <typename T, Gate GATE>
static void store_rows(const LinearArgs& a, const float (*block)[PANEL], int64_t row, int64_t rows,
                       int64_t panel, Beyond beyond) {
  constexpr bool GATED = GATE != Gate::NONE;
  constexpr int COLUMNS = GATED ? PANEL / 2 : PANEL, N = COLUMNS / L;
  const int64_t first = panel * COLUMNS;
  const int count = int(std::min<int64_t>(COLUMNS, a.width - first));
  vf bias[V] = {};
  if (a.bias != nullptr)
    for (int v = 0; v < V; ++v) bias[v] = load(a.bias + panel * PANEL + v * L);
  T* out = (T*)a.out + row * a.out_stride + first;
  for (int64_t r = 0; r < rows; ++r, out += a.out_stride) {
    beyond.fetch_next();
    vf value[V];
    for (int v = 0; v < V; ++v) value[v] = load(block[r] + v * L) + bias[v];
    if constexpr (GATED)
      for (int v = 0; v < N; ++v)
        value[v] = gated<GATE>(rounded(value[v], out), rounded(value[v + N], out), out);
    if (count == COLUMNS) {
      for (int v = 0; v < N; ++v) store_all(out + v * L, value[v]);
    } else {
      float values[COLUMNS];
      for (int v = 0; v < N; ++v) store_all(values + v * L, value[v]);
      for (int c = 0; c < count; ++c) store(out + c, values[c]);
    }
  }
}

typedef void (*Store)(const LinearArgs&, const float (*)[PANEL], int64_t, int64_t, int64_t, Beyond);

template <typename T>
static Store pick_store(Gate gate) {
  switch (gate) {
    case Gate::NONE:
      return store_rows<T, Gate::NONE>;
    case Gate::SILU:
      return store_rows<T, Gate::SILU>;
    case Gate::GELU_TANH:
      return store_rows<T, Gate::GELU_TANH>;
    default:
      return store_rows<T, Gate::CLAMPED>;
  }
}

static constexpr auto COLUMN_NUMBERS = [] {
  std::array<int32_t, PANEL> numbers{};
  for (int i = 0; i < PANEL; ++i) numbers[i] = i;
  return numbers;
}();

// Instead of store_rows, where only the highest output of a row is wanted.
static void update_argmax(const LinearArgs& a, const float (*block)[PANEL], int64_t row,
                          int64_t rows, int64_t panel, Beyond beyond) {
  const vi width = vi{} + int32_t(std::min<int64_t>(PANEL, a.width - panel * PANEL)),
           number = vi{} + int32_t(panel);
  vf bias[V] = {};
  if (a.bias != nullptr)
    for (int v = 0; v < V; ++v) bias[v] = load(a.bias + panel * PANEL + v * L);
  for (int64_t r = 0; r < rows; ++r) {
    beyond.fetch_next();
    for (int v = 0; v < V; ++v) {
      const int64_t at = (row + r) * PANEL + v * L;
      const vf value = load(block[r] + v * L) + bias[v], best = load(a.highest + at);
      // Nearly always; numbers that are not stored need no place in the first-level cache, which
      // the weight has just filled.
      if (all_less(value, best)) continue;
      const vi column = load_bits((const char*)(COLUMN_NUMBERS.data() + v * L)),
               first = load_bits((const char*)(a.highest_panel + at));
      const vi is_better =
          ((value > best) | ((value == best) & (number < first)) | (value != value)) &
          (column < width);
      store_all(a.highest + at, is_better ? value : best);
      const vi chosen = is_better ? number : first;
      std::memcpy(a.highest_panel + at, &chosen, sizeof(chosen));
    }
  }
}

// Adds an adapter's part of half a panel to the sums of M rows. A row's sum goes on in the order of
// the ranks, with any rows beside it.
template <class F, int M>
static void expand(const char* b, int64_t count, const int32_t* shrunk, int64_t stride,
                   float (*block)[PANEL], int column) {
  constexpr int W = HALF / L;
  vf sum[M][W];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < W; ++v) sum[m][v] = load(&block[m][column + v * L]);
  for (int64_t g = 0; g < count; ++g) {
    vi w[W];
    for (int v = 0; v < W; ++v) w[v] = load_bits(b + g * HALF * 4 + v * 4 * L);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m)
      for (int v = 0; v < W; ++v) sum[m][v] = F::dot(sum[m][v], shrunk[m * stride + g], w[v]);
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < W; ++v) store_all(&block[m][column + v * L], sum[m][v]);
}

typedef void (*Expand)(const char*, int64_t, const int32_t*, int64_t, float (*)[PANEL], int);

template <class F, int M>
static Expand pick_expand(int64_t rows) {
  if constexpr (M == 0)
    return nullptr;
  else
    return rows < M ? pick_expand<F, M - 1>(rows) : expand<F, M>;
}

// The adapters' part of a tile: runs of rows with the same adapter share the reads of it.
static void add_adapters(const AdapterRows& a, int64_t row, int64_t rows, int64_t panel,
                         float (*block)[PANEL]) {
  for (int64_t first = 0, last; first < rows; first = last) {
    const int32_t adapter = a.adapter[row + first];
    last = first + 1;
    while (last < rows && last < first + TILE && a.adapter[row + last] == adapter) ++last;
    if (adapter < 0 || a.matrices[adapter].ranks == 0) continue;
    const AdapterMatrices& matrices = a.matrices[adapter];
    const Expand add =
        a.is_bf16 ? pick_expand<BF16, TILE>(last - first) : pick_expand<F32, TILE>(last - first);
    const int32_t* shrunk = (const int32_t*)a.shrunk + (row + first) * a.stride;
    for (int h = 0; h < PANEL / HALF; ++h) {
      const AdapterHalf& half = matrices.halves[panel * (PANEL / HALF) + h];
      if (half.count > 0)
        add(matrices.b + half.offset, half.count, shrunk + half.first, a.stride, block + first,
            h * HALF);
    }
  }
}

// Rows that a tile should have: with fewer its sums are too few to hide how long a product takes.
constexpr int64_t ENOUGH_ROWS = 5;

// The first row of tile `t` of `tiles`. The first tile waits for the memory; with more rows the
// memory has more time for the weight. So it gets the rows that the others, which find the weight
// in the cache, can spare.
static int64_t first_of(int64_t rows, int64_t t, int64_t tiles) {
  if (t == 0 || tiles == 1) return rows * t / tiles;
  const int64_t first =
      std::max(rows / tiles, std::min<int64_t>(TILE, rows - ENOUGH_ROWS * (tiles - 1)));
  return first + (rows - first) * (t - 1) / (tiles - 1);
}

// Finishes rows of one panel after their sums: adapters, and then the results.
static void finish_rows(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel,
                        float (*block)[PANEL], Beyond beyond) {
  if (a.adapters != nullptr) add_adapters(*a.adapters, row, rows, panel, block);
  if (a.highest != nullptr) {
    update_argmax(a, block, row, rows, panel, beyond);
    return;
  }
  const Store put = a.out_bf16 ? pick_store<bf16>(a.gate) : pick_store<float>(a.gate);
  put(a, block, row, rows, panel, beyond);
}

#ifdef PENSTOCK_EXPANDS
static void multiply_expanded(const LinearArgs& a, const LinearTask& task) {
  sum_expanded(a, task, [&](int64_t panel, float (*block)[PANEL]) {
    finish_rows(a, task.first_row, task.last_row - task.first_row, panel, block, Beyond{nullptr});
  });
}
#endif

static void finish_panel(const LinearArgs& a, int64_t row, int64_t rows, int64_t panel,
                         float (*block)[PANEL]) {
  finish_rows(a, row, rows, panel, block, Beyond{nullptr});
}

void multiply(const LinearArgs& a, const LinearTask& task) {
  if (a.format == Format::GGUF) return sum_blocks(a, task, finish_panel);
#ifdef PENSTOCK_TILES
  if (is_tiled(a.format, task.last_row - task.first_row))
    return a.format == Format::BF16 ? sum_tiled<true>(a, task, finish_panel)
                                    : sum_tiled<false>(a, task, finish_panel);
#endif
#ifdef PENSTOCK_EXPANDS
  if (is_expanded(a.format, task.last_row - task.first_row, task.last_panel - task.first_panel))
    return multiply_expanded(a, task);
#endif
  const int64_t rows = task.last_row - task.first_row, tiles = (rows + TILE - 1) / TILE;
  const int64_t parts = (a.granules + PART - 1) / PART;
  alignas(64) float blocks[ROW_BLOCK][PANEL];
  std::optional<CompactPanel> compact;
  // A small tile reads it again in less time than from where it was put.
  char* const kept =
      a.is_compact && tiles > 1 && L == 16 ? unpacked_memory(PART + UNROLL) : nullptr;
  for (int64_t panel = task.first_panel; panel < task.last_panel; ++panel) {
    if (a.is_compact) compact.emplace(a.weight, panel, a.granules);
    for (int64_t p = 0; p < parts; ++p) {
      // Whole groups of int4, whole turns of the unrolled loop.
      const int64_t from = a.granules * p / parts / UNROLL * UNROLL;
      const int64_t to =
          p + 1 < parts ? a.granules * (p + 1) / parts / UNROLL * UNROLL : a.granules;
      Part part{
          .w = kept != nullptr ? kept : granule_at(a, panel, from),
          .first = from,
          .last = to,
          .is_last = p + 1 == parts,
          .is_new = true,
          .compact = compact ? &*compact : nullptr,
          .kept = kept,
      };
      for (int64_t t = 0; t < tiles; ++t, part.is_new = false) {
        if (t > 0 && kept != nullptr) part.compact = nullptr;
        const int64_t first = first_of(rows, t, tiles), last = first_of(rows, t + 1, tiles);
        pick(a, part, int(last - first))(a, task.first_row + first, panel, part, blocks + first);
        if (!part.is_last) continue;
        const bool fetches = part.is_new && last - first >= FETCHING_ROWS;
        const Beyond beyond{fetches ? panel_at(a, panel + 1) : nullptr};
        finish_rows(a, task.first_row + first, last - first, panel, blocks + first, beyond);
      }
    }
  }
}

// Quantises `n` values with one scale, `most` the largest magnitude; returns the sum of the stored
// numbers.
template <typename T>
static int32_t quantize_run(const T* x, int64_t n, float most, int32_t zero, int8_t* out,
                            float* scale) {
  *scale = most / 127.0f;
  if (!(most > 0 && most <= 3e38f)) {
    // Zeros, or a row that its scale turns into NaN: a NaN is not an integer.
    std::memset(out, zero, n);
    return 0;
  }
  const float inverse = 127.0f / most;
  int32_t sum = 0;
  for (int64_t i = 0; i < n; ++i) {
    const int32_t q = int32_t(std::nearbyintf(to_float(x[i]) * inverse));
    sum += q;
    out[i] = int8_t(q + zero);
  }
  return sum;
}

// Groups of a row; `unit` is a factor of their scales, a power of two.
template <typename T>
static void quantize_groups(const QuantizeArgs& a, const T* x, float unit, int64_t row) {
  int8_t* out = a.out + row * a.stride;
  const int64_t groups = a.padded / GROUP;
  std::memset(out + a.width, 0, a.padded - a.width);
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * GROUP, count = std::clamp<int64_t>(a.width - first, 0, GROUP);
    float* scale = a.scale + row * groups + g;
    const int32_t sum =
        quantize_run(x + first, count, abs_max(x + first, count), 0, out + first, scale);
    *scale *= unit;
    int32_t* to = a.sum + (row * groups + g) * a.sums;
    *to = sum;
    if (a.sums == 1) continue;
    to[1] = 0;
    for (int64_t i = first + GROUP / 2; i < first + GROUP; ++i) to[1] += out[i];
    to[0] -= to[1];
  }
}

template <typename T>
static void quantize_row(const QuantizeArgs& a, int64_t row) {
  const T* x = (const T*)a.x + row * a.x_stride;
  int8_t* out = a.out + row * a.stride;
  thread_local std::vector<float> rotated;
  float most = 0;
  if (a.rotation > 1) {
    if (int64_t(rotated.size()) < a.width) rotated.resize(a.width);
    most = rotate(x, a.width, a.rotation, rotated.data());
  }
  if (a.grouped)
    return a.rotation == 1
               ? quantize_groups(a, x, 1.0f, row)
               : quantize_groups(a, rotated.data(), 1.0f / turned_by_rest(a.rotation), row);
  a.rotation == 1 ? quantize_run(x, a.width, abs_max(x, a.width), 128, out, a.scale + row)
                  : quantize_run(rotated.data(), a.width, most, 128, out, a.scale + row);
  std::memset(out + a.width, 128, a.padded - a.width);
}

void quantize(const QuantizeArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row)
    a.is_bf16 ? quantize_row<bf16>(a, row) : quantize_row<float>(a, row);
}

}  // namespace NS
}  // namespace penstock
