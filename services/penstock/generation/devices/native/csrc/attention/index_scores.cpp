// An indexer's scores and its choice. The score of a position is the sum over heads, in their
// order, of a weight times the product of query and key where it is above 0. A row's scores have
// one order of sums, with any rows beside it: lanes are keys, as in attention_decode.h.
#include "attention/index_scores.h"

#include <limits>

#include "attention/attention_decode.h"

namespace penstock {
namespace NS {

constexpr int HEADS = 64;  // of a product
constexpr int STEP_V = 4;  // vectors of a product

struct IndexWork {
  alignas(64) int32_t q[HEADS * MAX_INDEX_DIM];
  alignas(64) int32_t k[TILE * MAX_INDEX_DIM];
  alignas(64) float s[HEADS * TILE];
  alignas(64) float sum[TILE];
};
size_t index_scratch_bytes() { return sizeof(IndexWork); }

// Keys of a tile as [unit of dims][key]; columns past the last key repeat it.
template <typename T, Mode MODE>
static void load_index_keys(const Rows<T>& rows, int D, int32_t* k) {
#ifdef __AVX512BF16__
  if constexpr (MODE != Mode::FLOATS || std::is_same_v<T, float>) {
    Rows<T> none;
    return load_keys_across<T, MODE>(rows, D, k, none);
  }
#endif
  const int units = D / per_unit(MODE);
  for (int t = 0; t < TILE; ++t) {
    const T* row = rows.k[std::min(t, rows.n - 1)];
    for (int u = 0; u < units; ++u) {
      if constexpr (MODE == Mode::FLOATS) {
        const float x = to_float(row[u]);
        std::memcpy(k + u * TILE + t, &x, 4);
      } else {
        std::memcpy(k + u * TILE + t, row + 2 * u, 4);
      }
    }
  }
}

template <typename T, Mode MODE>
static void score(const IndexArgs& a, int64_t seq, int64_t first, IndexWork& w) {
  // Queries lie in memory as a product reads them.
  constexpr bool in_units = MODE == Mode::PAIRS || std::is_same_v<T, float>;
  const int D = a.dim, H = a.num_heads, units = D / per_unit(MODE);
  const int64_t first_row = a.query_start[seq], last_row = a.query_start[seq + 1],
                context = a.context_lens[seq], first_pos = context - (last_row - first_row),
                end = std::min(context, first + INDEX_SPAN);
  const int32_t* table = a.block_tables + seq * a.table_stride;
  Rows<T> rows;
  for (int64_t t0 = first; t0 < end; t0 += TILE) {
    rows.n = int(std::min<int64_t>(TILE, end - t0));
    for (int t = 0; t < rows.n; ++t) {
      const int64_t pos = t0 + t;
      rows.k[t] = (const T*)a.keys +
                  (int64_t(table[pos / a.block_size]) * a.block_size + pos % a.block_size) * D;
    }
    load_index_keys<T, MODE>(rows, D, w.k);
    // Rows before this tile do not see it.
    const int64_t from = std::max(a.first_row, first_row + std::max<int64_t>(0, t0 - first_pos));
    for (int64_t row = from; row < std::min(last_row, a.last_row); ++row) {
      std::memset(w.sum, 0, sizeof(w.sum));
      for (int h0 = 0; h0 < H; h0 += HEADS) {
        const int heads = std::min(HEADS, H - h0);
        const T* q = (const T*)a.q + (row * H + h0) * D;
        if constexpr (!in_units)
          for (int i = 0; i < heads * D; ++i) ((float*)w.q)[i] = to_float(q[i]);
        for (int v = 0; v < TILE / L; v += STEP_V) {
          const Sides sides{
              .a = in_units ? (const int32_t*)q : w.q,
              .a_row = units,
              .a_k = 1,
              .a_low = 0,
              .b = w.k + v * L,
              .b_k = TILE,
              .b_low = 0,
          };
          product<MODE, false, STEP_V>(sides, heads, units, w.s + v * L, TILE, false, AsItIs{});
        }
        const float* weights = a.weights + row * H + h0;
        for (int h = 0; h < heads; ++h)
          for (int t = 0; t < TILE; t += L) {
            const vf x = *(const vf*)(w.s + h * TILE + t);
            vf* sum = (vf*)(w.sum + t);
            // NaN stays NaN.
            *sum = fmadd(x < vf{} ? vf{} : x, splat(weights[h]), *sum);
          }
      }
      std::memcpy(a.scores + (row - a.first_row) * a.scores_stride + t0, w.sum,
                  sizeof(float) * rows.n);
    }
  }
}

void score_positions(const IndexArgs& a, int64_t seq, int64_t first, void* scratch) {
  IndexWork& w = *(IndexWork*)scratch;
  if (!a.is_bf16) return score<float, Mode::FLOATS>(a, seq, first, w);
  if constexpr (HAS_UNITS)
    if (a.dim % 2 == 0) return score<bf16, Mode::PAIRS>(a, seq, first, w);
  score<bf16, Mode::FLOATS>(a, seq, first, w);
}

// Whole numbers in the order of the floats; NaN above all.
static inline uint32_t ordered(float x) {
  if (x != x) return std::numeric_limits<uint32_t>::max();
  // No negative zero.
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

void choose_positions(const IndexArgs& a, int64_t seq, int64_t row) {
  const int64_t visible = a.context_lens[seq] - (a.query_start[seq + 1] - 1 - row), most = a.most;
  const int32_t* table = a.block_tables + seq * a.table_stride;
  int32_t* to = a.chosen + row * most;
  const auto shown = [&](int64_t pos) {
    return a.gives_slots ? int32_t(table[pos / a.block_size] * a.block_size + pos % a.block_size)
                         : int32_t(pos);
  };
  if (visible <= most) {
    for (int64_t pos = 0; pos < visible; ++pos) to[pos] = shown(pos);
    // These are not read.
    std::fill(to + visible, to + most, shown(visible - 1));
    return;
  }
  const float* scores = a.scores + (row - a.first_row) * a.scores_stride;
  // The most-th highest score, by its digits: 11, 11 and 10 bits.
  constexpr int BITS[] = {11, 11, 10};
  uint32_t known = 0, mask = 0;
  int64_t left = most;  // of the scores that agree with `known` so far
  int shift = 32;
  for (const int bits : BITS) {
    int32_t counts[1 << 11] = {};
    shift -= bits;
    const uint32_t digit = (1u << bits) - 1;
    for (int64_t pos = 0; pos < visible; ++pos) {
      const uint32_t x = ordered(scores[pos]);
      counts[(x >> shift) & digit] += (x & mask) == known;
    }
    uint32_t found = digit;
    while (counts[found] < left) left -= counts[found--];
    known |= found << shift;
    mask |= digit << shift;
  }
  // All above it, and of its equals the first `left` ones.
  for (int64_t pos = 0; pos < visible; ++pos) {
    const uint32_t x = ordered(scores[pos]);
    const bool is_equal = x == known;
    if (x > known || (is_equal && left > 0)) {
      left -= is_equal;
      *to++ = shown(pos);
    }
  }
}

}  // namespace NS
}  // namespace penstock
