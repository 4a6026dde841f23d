// Attention of fewer rows than SIMD has lanes, such as the query heads of one key/value head in a
// decode step: lanes are keys in the scores and dims in the output. AVX-512 only. The sums equal
// those of attention_prefill.h, bit for bit, so that a row gets the same result in a decode step
// and in a chunk of a prompt.
#pragma once
#include "attention/attention_tile.h"

#ifdef __AVX512BF16__
namespace penstock {
namespace NS {

constexpr int MAX_DECODE_ROWS = 8;  // rows

struct DecodeWork {
  alignas(64) int32_t q[MAX_DECODE_ROWS * MAX_HEAD_DIM];
  alignas(64) float o[MAX_DECODE_ROWS * MAX_HEAD_DIM];
  alignas(64) float s[MAX_DECODE_ROWS * TILE];
  alignas(64) int32_t p[MAX_DECODE_ROWS * TILE];
  alignas(64) int32_t k[TILE * MAX_HEAD_DIM];
  alignas(64) int32_t v[TILE * MAX_HEAD_DIM];
  vf sums[MAX_DECODE_ROWS];
  float high[MAX_DECODE_ROWS], scale[MAX_DECODE_ROWS], step[MAX_DECODE_ROWS];
  float cap_by[MAX_DECODE_ROWS], slope[MAX_DECODE_ROWS];
  int32_t bias[MAX_DECODE_ROWS];
  int64_t visible[MAX_DECODE_ROWS], oldest[MAX_DECODE_ROWS];
};

// Keys as [unit of dims][key]: 16 keys by 16 units at a time. Columns past the tile's keys repeat
// its last one.
template <typename S, Mode MODE>
static void load_keys_across(const Rows<S>& rows, int D, int32_t* k, const Rows<S>& next) {
  const int units = D / per_unit(MODE);
  for (int t = 0; t < rows.n; t += L) {
    for (int i = 0; i < 4; ++i) next.fetch(TILE / 4 + t / 4 + i, D);
    for (int u = 0; u < units; u += L) {
      const __mmask16 inside = __mmask16(units - u >= L ? 0xffff : (1 << (units - u)) - 1);
      __m512i r[16];
      for (int i = 0; i < L; ++i) {
        const int at = std::min(t + i, rows.n - 1);
        r[i] = _mm512_maskz_loadu_epi32(inside, (const int32_t*)rows.k[at] + u);
        if constexpr (MODE == Mode::QUADS)
          r[i] = _mm512_xor_si512(r[i], _mm512_set1_epi8(char(0x80)));
      }
      transpose(r);
      for (int i = 0; i < L && u + i < units; ++i) _mm512_store_si512(k + (u + i) * TILE + t, r[i]);
    }
  }
}

// Softmax of one row's tile: weights as units of keys into `p`.
template <Mode MODE>
static void softmax_decode(DecodeWork& w, const float* v_scale, int m, int64_t t0, int n, int DV) {
  const vf none = splat(-INFINITY), scale = splat(w.scale[m]);
  const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vi see = vi{} + int32_t(std::min<int64_t>(w.visible[m], t0 + n)),
           old = vi{} + int32_t(w.oldest[m]);
  constexpr int V = TILE / L;
  vf x[V], high = splat(w.high[m]);
  const int used = (n + L - 1) / L;
  for (int v = 0; v < V; ++v) {
    const vi pos = vi{} + int32_t(t0 + v * L) + lane;
    x[v] = v < used ? *(vf*)(w.s + m * TILE + v * L) : none;
    x[v] = (pos < see) & (pos >= old) ? x[v] : none;
    high = x[v] > high ? x[v] : high;
  }
  const float top = _mm512_reduce_max_ps((__m512)high);
  const vf base = splat(top == -INFINITY ? 0.0f : top * w.scale[m]);
  if (top != w.high[m]) {
    const vf shrink = exp2_nonpositive(splat(w.high[m]) * scale - base);
    for (int d = 0; d < DV; d += L) *(vf*)(w.o + m * DV + d) *= shrink;
    w.sums[m] *= shrink;
  }
  w.high[m] = top;
  vf most = vf{};
  for (int v = 0; v < V; ++v) {
    x[v] = exp2_nonpositive(fmadd(x[v], scale, -base));
    w.sums[m] += x[v];
    if constexpr (MODE == Mode::QUADS) {
      x[v] = v * L < n ? x[v] * *(const vf*)(v_scale + v * L) : vf{};
      most = x[v] > most ? x[v] : most;
    }
  }
  if constexpr (MODE == Mode::FLOATS) {
    for (int v = 0; v < V; ++v) *(vf*)(w.p + m * TILE + v * L) = x[v];
  } else if constexpr (MODE == Mode::PAIRS) {
    for (int v = 0; v < V; v += 2)
      _mm512_store_si512(w.p + m * TILE + v / 2 * L,
                         (__m512i)_mm512_cvtne2ps_pbh((__m512)x[v + 1], (__m512)x[v]));
  } else {
    const vf peak = splat(_mm512_reduce_max_ps((__m512)most));
    const vf usable = peak > splat(NEGLIGIBLE) ? splat(float(POSITIVE_LEVELS)) / peak : vf{};
    w.step[m] = peak[0] * (1.0f / POSITIVE_LEVELS);
    for (int v = 0; v < V; ++v) {
      const vi whole = nearest(x[v] * usable);
      store_bytes(w.p + m * TILE + v * 4, whole >> 8);
      store_bytes(w.p + m * TILE + TILE / 4 + v * 4, whole);
    }
  }
}

// Turns sums of int8 products into scores and outputs: rows are rows of A in both.
struct DecodeScore {
  const int32_t* bias;
  const float* k_scale;
  vf operator()(int m, int v, vi sum, vf) const {
    return to_floats(sum - bias[m]) * *(const vf*)(k_scale + v * L);
  }
};
struct DecodeOutput {
  const float* step;
  vf operator()(int m, int, vi sum, vf old) const {
    return fmadd(to_floats(sum), splat(step[m]), old);
  }
};

// V vectors of dims, from `d`.
template <Mode MODE, int V>
static void add_outputs(DecodeWork& w, int M, int units, int DV, int d) {
  const Sides outputs{
      .a = w.p,
      .a_row = TILE,
      .a_k = 1,
      .a_low = TILE / 4,
      .b = w.v + d,
      .b_k = DV,
      .b_low = 0,
  };
  if constexpr (MODE == Mode::QUADS)
    product<MODE, true, V>(outputs, M, units, w.o + d, DV, true, DecodeOutput{w.step});
  else
    product<MODE, false, V>(outputs, M, units, w.o + d, DV, true, AsItIs{});
}

// The first tile that `task` reads.
template <typename S>
static void find_first(const AttentionArgs& a, const AttentionTask& task, Rows<S>& rows) {
  const int64_t query = task.first / (a.num_heads / a.num_kv_heads),
                context = a.context_lens[task.seq];
  const int64_t pos = context - (a.query_start[task.seq + 1] - a.query_start[task.seq]) + query;
  const int64_t from = first_key(a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0);
  rows.find(a, a.block_tables + task.seq * a.table_stride, task.kv_head, from,
            keys_from(from, context));
}

template <typename T, typename S, Mode MODE>
static void attend_decode(const AttentionArgs& a, const AttentionTask& task,
                          const AttentionTask* following, DecodeWork& w) {
  constexpr bool QUADS = MODE == Mode::QUADS;
  constexpr int PER = per_unit(MODE);
  const int D = a.head_dim, DV = a.value_dim, G = a.num_heads / a.num_kv_heads, units = D / PER,
            M = task.count;
  const int64_t first_row = a.query_start[task.seq],
                first_pos = a.context_lens[task.seq] - (a.query_start[task.seq + 1] - first_row);
  std::memset(w.o, 0, sizeof(float) * M * DV);
  int64_t begin = INT64_MAX, end = 0;
  for (int m = 0; m < M; ++m) {
    const int64_t query = (task.first + m) / G, head = task.kv_head * G + (task.first + m) % G,
                  pos = first_pos + query;
    const T* source = (const T*)a.q + (first_row + query) * a.q_stride + head * D;
    const float step =
        load_row<T, MODE>(a, source, w.q + m * MAX_HEAD_DIM, 1, MAX_HEAD_DIM / 2, w.bias[m]);
    w.scale[m] = softmax_scale(a, step), w.cap_by[m] = cap_scale(a, step);
    w.slope[m] = slope_of(a, head, w.scale[m]);
    w.high[m] = first_high(a, head, w.scale[m]), w.sums[m] = vf{};
    w.sums[m][0] = first_sum(a);
    w.visible[m] = pos + 1,
    w.oldest[m] = a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0;
    begin = std::min(begin, w.oldest[m]), end = std::max(end, pos + 1);
  }
  const int32_t* table = a.block_tables + task.seq * a.table_stride;
  Rows<S> tiles[2];
  int64_t t0 = first_key(begin);
  tiles[0].find(a, table, task.kv_head, t0, keys_from(t0, end));
  for (int turn = 0; t0 < end; t0 += tiles[turn].n, turn ^= 1) {
    const Rows<S>& rows = tiles[turn];
    const int n = rows.n;
    Rows<S>& next = tiles[turn ^ 1];
    next.n = 0;
    if (t0 + n < end)
      next.find(a, table, task.kv_head, t0 + n, keys_from(t0 + n, end));
    else if (following != nullptr)
      find_first(a, *following, next);
    load_keys_across<S, MODE>(rows, D, w.k, next);
    load_values<S, MODE>(rows, DV, w.v, &next);
    const Sides scores{
        .a = w.q,
        .a_row = MAX_HEAD_DIM,
        .a_k = 1,
        .a_low = MAX_HEAD_DIM / 2,
        .b = w.k,
        .b_k = TILE,
        .b_low = 0,
    };
    if constexpr (QUADS)
      product<MODE, false, TILE / L>(scores, M, units, w.s, TILE, false,
                                     DecodeScore{w.bias, rows.k_scale});
    else
      product<MODE, false, TILE / L>(scores, M, units, w.s, TILE, false, AsItIs{});
    if (a.softcap > 0)
      for (int m = 0; m < M; ++m)
        for (int t = 0; t < TILE; t += L) {
          vf* s = (vf*)(w.s + m * TILE + t);
          *s = capped(*s, splat(w.cap_by[m]), splat(a.softcap));
        }
    if (a.slopes != nullptr)
      for (int m = 0; m < M; ++m)
        for (int t = 0; t < n; t += L) {
          const vi lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
          vf* s = (vf*)(w.s + m * TILE + t);
          *s = sloped(*s, splat(w.slope[m]), vi{} + int32_t(t0 + t) + lane,
                      vi{} + int32_t(w.visible[m]));
        }
    for (int m = 0, fetched = TILE / 2; m < M; ++m) {
      for (; fetched < TILE / 2 + TILE / 2 * (m + 1) / M; ++fetched) next.fetch(fetched, D);
      softmax_decode<MODE>(w, rows.v_scale, m, t0, n, DV);
    }
    const int used = (n + PER - 1) / PER;
    int d = 0;
    for (; d + 4 * L <= DV; d += 4 * L) add_outputs<MODE, 4>(w, M, used, DV, d);
    for (; d < DV; d += L) add_outputs<MODE, 1>(w, M, used, DV, d);
  }
  for (int m = 0; m < M; ++m) {
    const int64_t query = (task.first + m) / G, head = task.kv_head * G + (task.first + m) % G;
    T* to = (T*)a.out + (first_row + query) * a.out_stride + head * DV;
    alignas(64) float sums[SUMS];
    std::memcpy(sums, &w.sums[m], sizeof(sums));
    for (int half = SUMS / 2; half; half /= 2)
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    const float by = 1.0f / sums[0];
    float* o = w.o + m * DV;
    for (int d = 0; d < DV; ++d) o[d] *= by;
    store_output(o, DV, block_of(a), to);
  }
}

}  // namespace NS
}  // namespace penstock
#endif
