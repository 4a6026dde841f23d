// Attention of few rows, as in a decode step, over bf16 keys and values in place in the pool. Lanes
// are rows in the scores and dims in the output, so that neither keys nor values are transposed or
// copied. AVX-512 only. The sums equal those of attention_prefill.h, bit for bit.
#pragma once
#include "attention/attention_decode.h"
#include "attention/attention_tiles.h"

#ifdef __AVX512BF16__
namespace penstock {
namespace NS {

constexpr int RUN = 16;  // keys that lie in one block of the pool at a fixed distance
constexpr int RUNS = TILE / RUN;
constexpr int PAIRS_OF_RUN = RUN / 2;
// Which of a pair's keys a lane has.
constexpr vi PAIR = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};

// A tile's keys and values: `heads` heads of each from the address on.
struct Paged {
  const char* k[RUNS];
  const char* v[RUNS];
  int n = 0;

  void find(const AttentionArgs& a, const int32_t* table, int64_t kv_head, int64_t t0, int count) {
    n = count;
    for (int g = 0; g * RUN < n; ++g) {
      const int64_t t = t0 + g * RUN,
                    slot = int64_t(table[t / a.block_size]) * a.block_size + t % a.block_size;
      const int64_t at = (slot * a.slot_stride + kv_head * a.head_dim) * int64_t(sizeof(bf16));
      k[g] = (const char*)a.keys + at;
      v[g] = (const char*)a.values + at;
    }
  }
  // Into the second-level cache: part `number` of `parts` of the keys or values.
  __attribute__((always_inline)) void fetch(const char* const (&from)[RUNS], int number, int parts,
                                            int64_t stride, int64_t bytes) const {
    for (int t = TILE * number / parts, end = std::min(n, TILE * (number + 1) / parts); t < end;
         ++t)
      for (int64_t at = 0; at < bytes; at += 64)
        __builtin_prefetch(from[t / RUN] + t % RUN * stride + at, 0, 2);
  }
};

// Rows of one key/value head; (8, 2) lanes are (rows, keys of a pair).
struct Bf16DecodeHead {
  alignas(64) int32_t q[MAX_DECODE_ROWS * MAX_HEAD_DIM / 2];
  alignas(64) float o[MAX_DECODE_ROWS * MAX_HEAD_DIM];  // dims in the order of unpacked pairs
  vf sums[PAIRS_OF_RUN];
  vf high, slope;
};
constexpr int MOST_HEADS = 8;  // of a task
// Lines of the data after attention that are prefetched at a time.
constexpr int PREFETCH_LINES = 8;
struct Bf16DecodeWork {
  Bf16DecodeHead heads[MOST_HEADS];
  alignas(64) float s[TILE * MAX_DECODE_ROWS];
  alignas(64) int32_t p[TILE / 2 * MAX_DECODE_ROWS];
  // For tiles: weights as [row][pair of keys], and values of a slice as [pair of keys][dim].
  alignas(64) int32_t across[MAX_DECODE_ROWS][WORDS_OF_TILE], v[WORDS_OF_TILE][2 * L];
};

struct Bf16DecodeLanes {
  vi visible, oldest;
  vf scale, cap_by;
};

// Scores of a run of keys, all lanes.
static inline void score_run(const char* keys, int64_t stride, const int32_t* q, int units,
                             float* s) {
  __m256 acc[RUN];
  for (int i = 0; i < RUN; ++i) acc[i] = _mm256_setzero_ps();
  for (int u = 0; u < units; u += 4)
#pragma GCC unroll 4
    for (int v = u; v < u + 4; ++v) {
      const __m256bh x = (__m256bh)_mm256_load_si256((const __m256i*)(q + v * MAX_DECODE_ROWS));
#pragma GCC unroll 16
      for (int i = 0; i < RUN; ++i) {
        int32_t unit;
        std::memcpy(&unit, keys + i * stride + v * 4, 4);
        acc[i] = _mm256_dpbf16_ps(acc[i], (__m256bh)_mm256_set1_epi32(unit), x);
      }
    }
  for (int i = 0; i < RUN; ++i) _mm256_store_ps(s + i * MAX_DECODE_ROWS, acc[i]);
}

// Weights of a tile's keys as pairs of bf16 into w.p.
template <bool MASKED>
static void softmax_decode_bf16(Bf16DecodeWork& w, Bf16DecodeHead& h, const Bf16DecodeLanes& lanes,
                                int M, int64_t t0, int n, int DV) {
  const int pairs = (n + RUN - 1) / RUN * PAIRS_OF_RUN;
  const vf none = splat(-INFINITY);
  const vi end = vi{} + int32_t(t0 + n), see = lanes.visible < end ? lanes.visible : end;
  vf high = h.high;
  for (int i = 0; i < pairs; ++i) {
    vf x = *(vf*)(w.s + i * L);
    if constexpr (MASKED) {
      const vi pos = PAIR + int32_t(t0 + 2 * i);
      x = (pos < see) & (pos >= lanes.oldest) ? x : none;
      *(vf*)(w.s + i * L) = x;
    }
    high = x > high ? x : high;
  }
  const vf other = (vf)_mm512_shuffle_f32x4((__m512)high, (__m512)high, 0x4e);
  high = other > high ? other : high;
  const vf base = high == none ? vf{} : high * lanes.scale;
  if (any(h.high != high)) {
    alignas(64) float shrink[L];
    *(vf*)shrink = exp2_nonpositive(h.high * lanes.scale - base);
    for (int i = 0; i < PAIRS_OF_RUN; ++i) h.sums[i] *= *(vf*)shrink;
    for (int m = 0; m < M; ++m)
      for (int d = 0; d < DV; d += L) *(vf*)(h.o + m * DV + d) *= splat(shrink[m]);
  }
  h.high = high;
  for (int g = 0; g < pairs; g += PAIRS_OF_RUN)
#pragma GCC unroll 8
    for (int i = 0; i < PAIRS_OF_RUN; ++i) {
      const vf x = exp2_nonpositive(fmadd(*(vf*)(w.s + (g + i) * L), lanes.scale, -base));
      h.sums[i] += x;
      const __m256i both = (__m256i)_mm512_cvtneps_pbh((__m512)x);
      const __m128i first = _mm256_castsi256_si128(both),
                    second = _mm256_extracti128_si256(both, 1);
      _mm_store_si128((__m128i*)(w.p + (g + i) * MAX_DECODE_ROWS),
                      _mm_unpacklo_epi16(first, second));
      _mm_store_si128((__m128i*)(w.p + (g + i) * MAX_DECODE_ROWS + 4),
                      _mm_unpackhi_epi16(first, second));
    }
}

// o += weights * values of M rows and 2 * L dims; the values begin at `offset`.
template <int M>
static void add_values(const Paged& tile, int64_t offset, int64_t stride, const int32_t* p,
                       float* o, int DV) {
  vf acc[M][2];
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < 2; ++i) acc[m][i] = *(vf*)(o + m * DV + i * L);
  for (int t = 0; t < tile.n; t += RUN) {
    const char* values = tile.v[t / RUN] + offset;
    for (int i = 0; i < RUN && t + i < tile.n; i += 2, p += MAX_DECODE_ROWS) {
      const char* from = values + i * stride;
      // The missing half of the last pair repeats a key, for a weight of 0.
      const __m512i x = _mm512_loadu_si512(from),
                    y = _mm512_loadu_si512(t + i + 1 < tile.n ? from + stride : from);
      const vi low = (vi)_mm512_unpacklo_epi16(x, y), high = (vi)_mm512_unpackhi_epi16(x, y);
#pragma GCC unroll 8
      for (int m = 0; m < M; ++m) {
        const vi weight = vi{} + p[m];
        acc[m][0] = dot_pairs(acc[m][0], low, weight);
        acc[m][1] = dot_pairs(acc[m][1], high, weight);
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int i = 0; i < 2; ++i) *(vf*)(o + m * DV + i * L) = acc[m][i];
}

typedef void (*AddValues)(const Paged&, int64_t, int64_t, const int32_t*, float*, int);
template <int M>
static AddValues pick_values(int rows) {
  if constexpr (M == 0)
    return nullptr;
  else
    return rows < M ? pick_values<M - 1>(rows) : add_values<M>;
}

#ifdef PENSTOCK_TILES
// add_values by tiles: weights of a tile's keys, once for all dims; then values of 2 * L dims.
static inline void turn_weights(Bf16DecodeWork& w, int M, int n) {
  const int pairs = (n + 1) / 2, words = whole_tiles(pairs);
  for (int m = 0; m < M; ++m) {
    for (int i = 0; i < pairs; ++i) w.across[m][i] = w.p[i * MAX_DECODE_ROWS + m];
    for (int i = pairs; i < words; ++i) w.across[m][i] = 0;
  }
}
static void add_tile_slice(Bf16DecodeWork& w, const Paged& tile, int64_t offset, int64_t stride,
                           float* o, int DV) {
  const int n = tile.n, words = whole_tiles((n + 1) / 2);
  for (int t = 0; t < 2 * words; t += 2) {
    int32_t* to = w.v[t / 2];
    if (t >= n) {
      std::memset(to, 0, sizeof(w.v[0]));
      continue;
    }
    const char* from = tile.v[t / RUN] + t % RUN * stride + offset;
    const __m512i x = _mm512_loadu_si512(from),
                  y = _mm512_loadu_si512(t + 1 < n ? from + stride : from);
    _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
    _mm512_store_si512(to + L, _mm512_unpackhi_epi16(x, y));
  }
  add_decode_values(w.across[0], w.v[0], words, o, DV);
}
#endif

static void finish_decode_bf16(Bf16DecodeHead& h, int M, int DV,
                               bf16* const (&out)[MAX_DECODE_ROWS]) {
  for (int half = PAIRS_OF_RUN / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) h.sums[i] += h.sums[i + half];
  alignas(64) float sums[L];
  *(vf*)sums = h.sums[0];
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
  for (int m = 0; m < M; ++m) {
    const vf by = splat(1.0f / (sums[m] + sums[m + MAX_DECODE_ROWS]));
    for (int d = 0; d < DV; d += 2 * L) {
      const __m256i low = rounded_bits(*(vf*)(h.o + m * DV + d) * by),
                    high = rounded_bits(*(vf*)(h.o + m * DV + d + L) * by);
      const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
      _mm512_storeu_si512(out[m] + d, _mm512_permutexvar_epi64(order, both));
    }
  }
}

static inline bool can_attend_decode_bf16(const AttentionArgs& a, const AttentionTask& task) {
  return a.is_bf16 && a.key_scales == nullptr && task.count <= MAX_DECODE_ROWS &&
         a.head_dim % (2 * L) == 0 && a.value_dim % (2 * L) == 0 && a.block_size % RUN == 0;
}

// First of the keys that `task` reads.
static inline int64_t first_of(const AttentionArgs& a, const AttentionTask& task) {
  const int64_t query = task.first / (a.num_heads / a.num_kv_heads);
  const int64_t pos =
      a.context_lens[task.seq] - (a.query_start[task.seq + 1] - a.query_start[task.seq]) + query;
  return first_key(a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0);
}
static inline void find_first(const AttentionArgs& a, const AttentionTask& task, Paged& tile) {
  const int64_t from = first_of(a, task);
  tile.find(a, a.block_tables + task.seq * a.table_stride, task.kv_head, from,
            keys_from(from, a.context_lens[task.seq]));
}

static void fetch_first(const AttentionArgs& a, const AttentionTask& task) {
  Paged tile;
  find_first(a, task, tile);
  const int64_t stride = a.slot_stride * sizeof(bf16),
                bytes = int64_t(task.heads) * a.head_dim * sizeof(bf16);
  tile.fetch(tile.k, 0, 1, stride, bytes);
  tile.fetch(tile.v, 0, 1, stride, bytes);
}

// TILED: its products are those of attention_tiles.h.
template <bool TILED>
static void attend_decode_bf16(const AttentionArgs& a, const AttentionTask& task,
                               const AttentionTask* following, Prefetch& prefetch,
                               Bf16DecodeWork& w) {
  const int D = a.head_dim, DV = a.value_dim, G = a.num_heads / a.num_kv_heads, M = task.count,
            H = task.heads;
  const int64_t stride = a.slot_stride * sizeof(bf16), bytes = int64_t(H) * D * sizeof(bf16);
  const int64_t first_row = a.query_start[task.seq],
                first_pos = a.context_lens[task.seq] - (a.query_start[task.seq + 1] - first_row);
  Bf16DecodeLanes lanes{vi{}, vi{}, splat(softmax_scale(a, 1.0f)), splat(cap_scale(a, 1.0f))};
  int64_t end = 0, whole_from = 0, whole_to = INT64_MAX;
  for (int m = 0; m < M; ++m) {
    const int64_t pos = first_pos + (task.first + m) / G,
                  oldest = a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0;
    lanes.visible[m] = lanes.visible[m + MAX_DECODE_ROWS] = int32_t(pos + 1);
    lanes.oldest[m] = lanes.oldest[m + MAX_DECODE_ROWS] = int32_t(oldest);
    end = std::max(end, pos + 1), whole_to = std::min(whole_to, pos + 1),
    whole_from = std::max(whole_from, oldest);
  }
  auto head_of = [&](int h, int m) { return (task.kv_head + h) * G + (task.first + m) % G; };
  auto row_of = [&](int m) { return first_row + (task.first + m) / G; };
  for (int h = 0; h < H; ++h) {
    Bf16DecodeHead& head = w.heads[h];
    std::memset(head.q, 0, sizeof(int32_t) * MAX_DECODE_ROWS * D / 2);
    for (int m = 0; m < M; ++m) {
      int32_t bias;
      load_query<bf16, Mode::PAIRS>((const bf16*)a.q + row_of(m) * a.q_stride + head_of(h, m) * D,
                                    D, head.q + m, MAX_DECODE_ROWS, 0, bias);
    }
    std::memset(head.o, 0, sizeof(float) * M * DV);
    std::memset(head.sums, 0, sizeof(head.sums));
    head.high = splat(-INFINITY), head.slope = vf{};
    for (int m = 0; m < M; ++m)
      head.slope[m] = head.slope[m + MAX_DECODE_ROWS] = slope_of(a, head_of(h, m), lanes.scale[m]);
    for (int m = 0; m < M && a.sinks != nullptr; ++m) {
      head.sums[0][m] = first_sum(a);
      head.high[m] = head.high[m + MAX_DECODE_ROWS] = first_high(a, head_of(h, m), lanes.scale[m]);
    }
  }
  // Else they came with the keys.
  const bool has_values = a.values != a.keys;
  const AddValues add = pick_values<MAX_DECODE_ROWS>(M);
  const int32_t* table = a.block_tables + task.seq * a.table_stride;
  Paged tiles[2];
  int64_t t0 = first_of(a, task);
  tiles[0].find(a, table, task.kv_head, t0, keys_from(t0, end));
  for (int turn = 0; t0 < end; t0 += tiles[turn].n, turn ^= 1) {
    const Paged& tile = tiles[turn];
    Paged& next = tiles[turn ^ 1];
    const int n = tile.n;
    next.n = 0;
    if (t0 + n < end)
      next.find(a, table, task.kv_head, t0 + n, keys_from(t0 + n, end));
    else if (following != nullptr)
      find_first(a, *following, next);
    const bool whole = n == TILE && t0 >= whole_from && t0 + n <= whole_to;
    for (int h = 0; h < H; ++h) {
      Bf16DecodeHead& head = w.heads[h];
      const int64_t offset = int64_t(h) * D * sizeof(bf16);
      for (int g = 0; g < RUNS; ++g) {
        next.fetch(next.k, h * RUNS + g, H * RUNS, stride, bytes);
        if (g * RUN < n) prefetch.fetch(PREFETCH_LINES);
        if (g * RUN >= n) continue;
        const char* keys = tile.k[g] + offset;
        float* scores = w.s + g * RUN * MAX_DECODE_ROWS;
        if constexpr (!TILED)
          score_run(keys, stride, head.q, D / 2, scores);
        else if (g % 2 == 0)
          tile_run<0, MAX_DECODE_ROWS>(keys, stride, head.q, D / 2, scores);
        else
          tile_run<1, MAX_DECODE_ROWS>(keys, stride, head.q, D / 2, scores);
      }
      if (a.softcap > 0)
        for (int i = 0; i < (n + RUN - 1) / RUN * PAIRS_OF_RUN; ++i) {
          vf* s = (vf*)(w.s + i * L);
          *s = capped(*s, lanes.cap_by, splat(a.softcap));
        }
      if (a.slopes != nullptr)
        for (int i = 0; i < (n + RUN - 1) / RUN * PAIRS_OF_RUN; ++i) {
          vf* s = (vf*)(w.s + i * L);
          *s = sloped(*s, head.slope, PAIR + int32_t(t0 + 2 * i), lanes.visible);
        }
      whole ? softmax_decode_bf16<false>(w, head, lanes, M, t0, n, DV)
            : softmax_decode_bf16<true>(w, head, lanes, M, t0, n, DV);
      if constexpr (TILED) turn_weights(w, M, n);
      const int slices = DV / (2 * L);
      for (int i = 0; i < slices; ++i) {
        if (has_values) next.fetch(next.v, h * slices + i, H * slices, stride, bytes);
        prefetch.fetch(PREFETCH_LINES);
        if constexpr (TILED)
          add_tile_slice(w, tile, offset + i * 4 * L, stride, head.o + i * 2 * L, DV);
        else
          add(tile, offset + i * 4 * L, stride, w.p, head.o + i * 2 * L, DV);
      }
    }
  }
  for (int h = 0; h < H; ++h) {
    bf16* out[MAX_DECODE_ROWS] = {};
    for (int m = 0; m < M; ++m)
      out[m] = (bf16*)a.out + row_of(m) * a.out_stride + head_of(h, m) * DV;
    finish_decode_bf16(w.heads[h], M, DV, out);
  }
}

}  // namespace NS
}  // namespace penstock
#endif
