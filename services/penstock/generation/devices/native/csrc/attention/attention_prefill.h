// Attention of many rows: chunks of prompts, and everything that the decode paths do not take.
//
// Everything is transposed so that SIMD lanes are query rows: scores S[key][row], weights
// P[key][row], output O[dim][row]. Softmax then needs no horizontal operation, and the query heads
// of one key/value head are just more rows. Keys and values of a tile are unpacked once for up to
// MAX_TASK_ROWS rows.
#pragma once
#include "attention/attention_tile.h"
#include "attention/attention_tiles.h"

namespace penstock {
namespace NS {

// Rows of one task: NB blocks of V vectors share each tile of keys and values that is unpacked.
constexpr int BLOCKS = MAX_TASK_ROWS / (4 * L);

template <int V, int NB>
struct PrefillWork {
  static constexpr int W = V * L;
  alignas(64) int32_t q[NB][MAX_HEAD_DIM * W];
  alignas(64) float o[NB][MAX_HEAD_DIM * W];
  alignas(64) float s[TILE * W];
  alignas(64) int32_t p[TILE * W];
  alignas(64) int32_t k[TILE * MAX_HEAD_DIM];
  alignas(64) int32_t v[TILE * MAX_HEAD_DIM];
  alignas(64) int32_t visible[NB][W], oldest[NB][W], bias[NB][W];
  alignas(64) float scale[NB][W], cap_by[NB][W], slope[NB][W];
  vf high[NB][V], sums[NB][SUMS][V], step[V];
  int64_t first[NB], last[NB], whole_from[NB], whole_to[NB];
};

// Weights as units of keys, QUADS: of w.s times each row's 16-bit step, high bytes before low ones.
template <int V, int NB>
static void quantise_weights(PrefillWork<V, NB>& w, int v, int n, vf most) {
  constexpr int W = V * L, LOW = TILE / 4 * W;
  const vf usable = most > splat(NEGLIGIBLE) ? splat(float(POSITIVE_LEVELS)) / most : vf{};
  w.step[v] = most * splat(1.0f / POSITIVE_LEVELS);
  for (int t = 0; t < n; t += 4) {
    vi high = vi{}, low = vi{};
    for (int i = 0; i < 4 && t + i < n; ++i) {
      vi x = nearest(*(vf*)(w.s + (t + i) * W + v * L) * usable);
      high |= (x >> 8) << (8 * i);
      low |= (x & 255) << (8 * i);
    }
    *(vi*)(w.p + t / 4 * W + v * L) = high;
    *(vi*)(w.p + LOW + t / 4 * W + v * L) = low;
  }
}

template <Mode MODE, int V, int NB, bool MASKED>
static void softmax_tile(PrefillWork<V, NB>& w, const float* v_scale, int b, int64_t t0, int n,
                         int DV) {
  constexpr int W = V * L;
  const vf none = splat(-INFINITY);
  for (int v = 0; v < V; ++v) {
    vf high = w.high[b][v];
    const vf scale = *(vf*)(w.scale[b] + v * L);
    const vi see = *(vi*)(w.visible[b] + v * L), old = *(vi*)(w.oldest[b] + v * L);
    for (int t = 0; t < n; ++t) {
      vf x = *(vf*)(w.s + t * W + v * L);
      if constexpr (MASKED) {
        vi pos = vi{} + int32_t(t0 + t);
        x = (pos < see) & (pos >= old) ? x : none;
        *(vf*)(w.s + t * W + v * L) = x;
      }
      high = x > high ? x : high;
    }
    // A row without a key so far keeps -inf; 0 replaces it, so that no inf - inf arises.
    const vf base = high == none ? vf{} : high * scale;
    const vf shrink = exp2_nonpositive(w.high[b][v] * scale - base);
    if (any(w.high[b][v] != high)) {
      for (int d = 0; d < DV; ++d) *(vf*)(w.o[b] + d * W + v * L) *= shrink;
      for (int i = 0; i < SUMS; ++i) w.sums[b][i][v] *= shrink;
    }
    vf most = vf{};
    auto weight = [&](int t) {
      return exp2_nonpositive(fmadd(*(vf*)(w.s + t * W + v * L), scale, -base));
    };
    // The order of the lanes of attention_decode.h: by key % SUMS.
    for (int i = 0; i < std::min(n, SUMS); i += 2) {
      vf even = w.sums[b][i][v], odd = w.sums[b][i + 1][v];
      for (int t = i; t < n; t += SUMS) {
        vf p0 = weight(t), p1 = t + 1 < n ? weight(t + 1) : vf{};
        even += p0;
        odd += p1;
        if constexpr (MODE == Mode::PAIRS) {
          *(vi*)(w.p + t / 2 * W + v * L) = pack_pairs(p0, p1);
        } else if constexpr (MODE == Mode::QUADS) {
          p0 *= splat(v_scale[t]);
          *(vf*)(w.s + t * W + v * L) = p0;
          most = p0 > most ? p0 : most;
          if (t + 1 >= n) continue;
          p1 *= splat(v_scale[t + 1]);
          *(vf*)(w.s + (t + 1) * W + v * L) = p1;
          most = p1 > most ? p1 : most;
        } else {
          *(vf*)(w.p + t * W + v * L) = p0;
          if (t + 1 < n) *(vf*)(w.p + (t + 1) * W + v * L) = p1;
        }
      }
      w.sums[b][i][v] = even;
      w.sums[b][i + 1][v] = odd;
    }
    if constexpr (MODE == Mode::QUADS) quantise_weights(w, v, n, most);
    w.high[b][v] = high;
  }
}

template <typename T, Mode MODE, int V, int NB>
static void start_block(const AttentionArgs& a, const AttentionTask& task, PrefillWork<V, NB>& w,
                        int b) {
  constexpr int W = V * L;
  const int D = a.head_dim, G = a.num_heads / a.num_kv_heads;
  const int64_t first_row = a.query_start[task.seq],
                first_pos = a.context_lens[task.seq] - (a.query_start[task.seq + 1] - first_row);
  std::memset(w.q[b], 0, sizeof(w.q[b]) / MAX_HEAD_DIM * D);
  std::memset(w.o[b], 0, sizeof(float) * a.value_dim * W);
  std::memset(w.sums[b], 0, sizeof(w.sums[b]));
  for (int v = 0; v < V; ++v) w.high[b][v] = splat(-INFINITY);
  w.first[b] = w.whole_to[b] = INT64_MAX;
  w.last[b] = w.whole_from[b] = 0;
  for (int r = 0; r < W; ++r) {
    const int row = b * W + r;
    w.visible[b][r] = INT32_MAX, w.oldest[b][r] = w.bias[b][r] = 0, w.scale[b][r] = 1.0f;
    w.cap_by[b][r] = w.slope[b][r] = 0.0f;
    if (row >= task.count) continue;
    // Rows are (query, head of the group), query first.
    const int64_t query = (task.first + row) / G, head = task.kv_head * G + (task.first + row) % G,
                  pos = first_pos + query;
    const T* source = (const T*)a.q + (first_row + query) * a.q_stride + head * D;
    const float step =
        load_row<T, MODE>(a, source, w.q[b] + r, W, MAX_HEAD_DIM / 4 * W, w.bias[b][r]);
    w.scale[b][r] = softmax_scale(a, step), w.cap_by[b][r] = cap_scale(a, step);
    w.slope[b][r] = slope_of(a, head, w.scale[b][r]);
    w.high[b][r / L][r % L] = first_high(a, head, w.scale[b][r]);
    w.sums[b][0][r / L][r % L] = first_sum(a);
    const int64_t old = a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0;
    w.visible[b][r] = int32_t(pos + 1), w.oldest[b][r] = int32_t(old);
    w.last[b] = std::max(w.last[b], pos + 1), w.whole_to[b] = std::min(w.whole_to[b], pos + 1);
    w.first[b] = std::min(w.first[b], old), w.whole_from[b] = std::max(w.whole_from[b], old);
  }
}

#ifdef __AVX512BF16__
static inline void store_run(bf16* to, vf x) { _mm256_storeu_si256((__m256i*)to, rounded_bits(x)); }
static inline void store_run(float* to, vf x) { store_all(to, x); }

// Outputs of L rows, which are lanes in `o`, times `by`, as L dims at a time in each row's place.
template <typename T>
static void store_across(const float* o, int64_t stride, int DV, vf by, T* const (&to)[L],
                         int rows) {
  for (int d = 0; d < DV; d += L) {
    __m512i r[L];
    for (int i = 0; i < L; ++i) r[i] = (__m512i)(*(const vf*)(o + (d + i) * stride) * by);
    transpose(r);
    for (int i = 0; i < rows; ++i) store_run(to[i] + d, (vf)r[i]);
  }
}
#endif

template <typename T, int V, int NB>
static void finish(const AttentionArgs& a, const AttentionTask& task, PrefillWork<V, NB>& w) {
  constexpr int W = V * L;
  const int DV = a.value_dim, G = a.num_heads / a.num_kv_heads;
  const int64_t block = block_of(a);
  for (int first = 0; first < task.count; first += L) {
    const int b = first / W, v = first % W / L, rows = std::min(L, task.count - first);
    for (int half = SUMS / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) w.sums[b][i][v] += w.sums[b][i + half][v];
    const vf by = splat(1.0f) / w.sums[b][0][v];
    const float* o = w.o[b] + v * L;
    T* to[L] = {};
    for (int r = 0; r < rows; ++r) {
      const int64_t query = (task.first + first + r) / G,
                    head = task.kv_head * G + (task.first + first + r) % G;
      to[r] = (T*)a.out + (a.query_start[task.seq] + query) * a.out_stride + head * DV;
    }
#ifdef __AVX512BF16__
    if (DV % L == 0 && block == 1) {
      store_across(o, W, DV, by, to, rows);
      continue;
    }
#endif
    alignas(64) float row[MAX_HEAD_DIM];
    for (int r = 0; r < rows; ++r) {
      for (int d = 0; d < DV; ++d) row[d] = o[d * W + r] * by[r];
      store_output(row, DV, block, to[r]);
    }
  }
}

// Turns sums of int8 products into scores and outputs: rows are vectors of B in both.
struct PrefillScore {
  const int32_t* bias;
  const float* k_scale;
  vf operator()(int t, int v, vi sum, vf) const {
    return to_floats(sum - *(const vi*)(bias + v * L)) * splat(k_scale[t]);
  }
};
struct PrefillOutput {
  const vf* step;
  vf operator()(int, int v, vi sum, vf old) const { return fmadd(to_floats(sum), step[v], old); }
};

// TILED: its products are those of attention_tiles.h.
template <typename T, typename S, Mode MODE, int V, int NB, bool TILED = false>
static void attend_prefill(const AttentionArgs& a, const AttentionTask& task,
                           PrefillWork<V, NB>& w) {
  constexpr bool QUADS = MODE == Mode::QUADS;
  constexpr int W = V * L, PER = per_unit(MODE), Q_LOW = MAX_HEAD_DIM / 4 * W, P_LOW = TILE / 4 * W;
  const int D = a.head_dim, DV = a.value_dim, units = D / PER, blocks = (task.count + W - 1) / W;
  int64_t begin = INT64_MAX, end = 0;
  for (int b = 0; b < blocks; ++b) {
    start_block<T, MODE>(a, task, w, b);
    begin = std::min(begin, w.first[b]), end = std::max(end, w.last[b]);
  }
  const int32_t* table = a.block_tables + task.seq * a.table_stride;
  Rows<S> rows;
  for (int64_t t0 = first_key(begin), n; t0 < end; t0 += n) {
    n = keys_from(t0, end);
    rows.find(a, table, task.kv_head, t0, n);
    load_keys<S, MODE>(rows, D, w.k);
    if constexpr (TILED)
      load_values_across(rows, DV, w.v);
    else
      load_values<S, MODE>(rows, DV, w.v);
    for (int b = 0; b < blocks; ++b) {
      if (t0 >= w.last[b] || t0 + n <= w.first[b]) continue;
      const Sides scores{
          .a = w.k,
          .a_row = units,
          .a_k = 1,
          .a_low = 0,
          .b = w.q[b],
          .b_k = W,
          .b_low = Q_LOW,
      };
      const Sides outputs{
          .a = w.v,
          .a_row = 1,
          .a_k = DV,
          .a_low = 0,
          .b = w.p,
          .b_k = W,
          .b_low = P_LOW,
      };
      if constexpr (TILED)
        tile_scores<V>(w.k, w.q[b], n, units, w.s);
      else if constexpr (QUADS)
        product<MODE, true, V>(scores, n, units, w.s, W, false,
                               PrefillScore{w.bias[b], rows.k_scale});
      else
        product<MODE, false, V>(scores, n, units, w.s, W, false, AsItIs{});
      if (a.softcap > 0)
        for (int t = 0; t < n; ++t)
          for (int v = 0; v < V; ++v) {
            vf* s = (vf*)(w.s + t * W + v * L);
            *s = capped(*s, *(const vf*)(w.cap_by[b] + v * L), splat(a.softcap));
          }
      if (a.slopes != nullptr)
        for (int t = 0; t < n; ++t)
          for (int v = 0; v < V; ++v) {
            vf* s = (vf*)(w.s + t * W + v * L);
            *s = sloped(*s, *(const vf*)(w.slope[b] + v * L), vi{} + int32_t(t0 + t),
                        *(const vi*)(w.visible[b] + v * L));
          }
      const bool whole = t0 >= w.whole_from[b] && t0 + n <= w.whole_to[b];
      whole ? softmax_tile<MODE, V, NB, false>(w, rows.v_scale, b, t0, n, DV)
            : softmax_tile<MODE, V, NB, true>(w, rows.v_scale, b, t0, n, DV);
      if constexpr (TILED)
        add_tile_values<V>(w.v, w.p, n, DV, w.o[b]);
      else if constexpr (QUADS)
        product<MODE, false, V>(outputs, DV, (n + PER - 1) / PER, w.o[b], W, true,
                                PrefillOutput{w.step});
      else
        product<MODE, false, V>(outputs, DV, (n + PER - 1) / PER, w.o[b], W, true, AsItIs{});
    }
  }
  finish<T>(a, task, w);
}

}  // namespace NS
}  // namespace penstock
