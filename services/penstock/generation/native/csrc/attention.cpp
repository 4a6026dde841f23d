// Paged attention: decode rows, drafts and prefill chunks in one loop.
//
// Everything is transposed so that SIMD lanes are query rows: scores S[key][row], weights P[key][row], output O[dim][row].
// Softmax then needs no horizontal operation, and the query heads of one key/value head are just more rows. Keys and
// values of a tile are unpacked once for up to MAX_TASK_ROWS rows. bf16 is multiplied in pairs by vdpbf16ps where the CPU
// has it, else in fp32.
#include <algorithm>
#include <cmath>
#include <type_traits>

#include "kernels.h"
#include "vec.h"

namespace penstock {
namespace NS {

constexpr int TILE = 64;  // keys

// Pairs of bf16 in one 32-bit lane: what vdpbf16ps multiplies.
#ifdef __AVX512BF16__
static inline vf dot2(vf acc, vi a, vi b) {
  return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
static inline vi pack2(vf lo, vf hi) {
  __m512i l = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)lo));
  __m512i h = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)hi));
  return (vi)_mm512_or_si512(l, _mm512_slli_epi32(h, 16));
}
constexpr bool HAS_DOT2 = true;
#else
static inline vf dot2(vf acc, vi, vi) { return acc; }
static inline vi pack2(vf, vf) { return vi{}; }
constexpr bool HAS_DOT2 = false;
#endif

// C[m][v] (+)= sum_k A[k][m] (scalar, broadcast) * B[k][v] (vector), V vectors wide, M rows; 32-bit elements that are
// floats, or pairs of bf16 when DOT.
template <bool DOT, int M, int V>
static inline void micro(const int32_t* A, int64_t a_row, int64_t a_k, const int32_t* B, int64_t b_k, float* C,
                         int64_t c_row, int K, bool add) {
  vf acc[M][V];
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) acc[m][v] = add ? *(const vf*)(C + m * c_row + v * L) : vf{};
  for (int k = 0; k < K; ++k) {
    vi b[V];
    for (int v = 0; v < V; ++v) b[v] = *(const vi*)(B + k * b_k + v * L);
#pragma GCC unroll 12
    for (int m = 0; m < M; ++m) {
      int32_t bits = A[m * a_row + k * a_k];
      if constexpr (DOT) {
        vi a = vi{} + bits;
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[m][v] = dot2(acc[m][v], b[v], a);
      } else {
        float f; std::memcpy(&f, &bits, 4);
        vf a = splat(f);
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) acc[m][v] += (vf)b[v] * a;
      }
    }
  }
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < V; ++v) *(vf*)(C + m * c_row + v * L) = acc[m][v];
}

template <bool DOT, int V>
static void product(const int32_t* A, int64_t a_row, int64_t a_k, const int32_t* B, int64_t b_k, float* C, int64_t c_row,
                    int M, int K, bool add) {
  constexpr int STEP = V == 1 ? 12 : V == 2 ? 8 : 6;
  int m = 0;
  for (; m + STEP <= M; m += STEP) micro<DOT, STEP, V>(A + m * a_row, a_row, a_k, B, b_k, C + m * c_row, c_row, K, add);
  for (; m + 2 <= M; m += 2) micro<DOT, 2, V>(A + m * a_row, a_row, a_k, B, b_k, C + m * c_row, c_row, K, add);
  for (; m < M; ++m) micro<DOT, 1, V>(A + m * a_row, a_row, a_k, B, b_k, C + m * c_row, c_row, K, add);
}


// Rows of one task: NB blocks of V vectors share each tile of keys and values that is unpacked.
constexpr int BLOCKS = MAX_TASK_ROWS / (4 * L);

template <int V, int NB>
struct Work {
  static constexpr int W = V * L;
  alignas(64) int32_t q[NB][MAX_HEAD_DIM * W];
  alignas(64) float o[NB][MAX_HEAD_DIM * W];
  alignas(64) float s[TILE * W];
  alignas(64) int32_t p[TILE * W];
  alignas(64) int32_t k[TILE * MAX_HEAD_DIM];
  alignas(64) int32_t v[TILE * MAX_HEAD_DIM];
  alignas(64) int32_t visible[NB][W], oldest[NB][W];
  vf high[NB][V], sum[NB][V];
  int64_t first[NB], last[NB], whole_from[NB], whole_to[NB];
};

template <typename T, bool DOT>
static void load_tile(const AttentionArgs& a, const int32_t* table, int64_t kv_head, int64_t t0, int n, int32_t* k, int32_t* v) {
  const int D = a.head_dim, KD = DOT ? D / 2 : D;
  const int64_t token_stride = int64_t(a.num_kv_heads) * D;
  const T* rows[TILE];
  for (int t = 0; t < n; ++t) {
    int64_t pos = t0 + t, slot = int64_t(table[pos / a.block_size]) * a.block_size + pos % a.block_size;
    const T* ks = (const T*)a.keys + slot * token_stride + kv_head * D;
    rows[t] = (const T*)a.values + slot * token_stride + kv_head * D;
    if constexpr (DOT) std::memcpy(k + t * KD, ks, sizeof(T) * D);
    else for (int d = 0; d < D; ++d) ((float*)k)[t * D + d] = to_float(ks[d]);
  }
  if constexpr (DOT) {
    // Pairs of keys side by side: [key / 2][dim][2]; an odd last key is paired with itself times a probability of 0.
    for (int t = 0; t < n; t += 2) {
      const uint16_t* x = (const uint16_t*)rows[t];
      const uint16_t* y = (const uint16_t*)rows[t + 1 < n ? t + 1 : t];
      int32_t* dst = v + (t / 2) * D;
      for (int d = 0; d < D; ++d) dst[d] = int32_t(uint32_t(x[d]) | uint32_t(y[d]) << 16);
    }
  } else {
    for (int t = 0; t < n; ++t)
      for (int d = 0; d < D; ++d) ((float*)v)[t * D + d] = to_float(rows[t][d]);
  }
}

template <bool DOT, int V, int NB, bool MASKED>
static void softmax_tile(Work<V, NB>& w, int b, int64_t t0, int n, float scale, int D) {
  constexpr int W = V * L;
  const vf none = splat(-INFINITY);
  for (int v = 0; v < V; ++v) {
    vf high = w.high[b][v];
    vi see, old;
    std::memcpy(&see, w.visible[b] + v * L, sizeof(see));
    std::memcpy(&old, w.oldest[b] + v * L, sizeof(old));
    for (int t = 0; t < n; ++t) {
      vf x = *(vf*)(w.s + t * W + v * L) * splat(scale);
      if constexpr (MASKED) { vi pos = vi{} + int32_t(t0 + t); x = (pos < see) & (pos >= old) ? x : none; *(vf*)(w.s + t * W + v * L) = x; }
      high = x > high ? x : high;
    }
    // A row that has seen nothing yet keeps -inf; 0 stands in for it, so that no inf - inf arises.
    vf base = high == none ? vf{} : high;
    vf shrink = exp2_nonpositive(w.high[b][v] - base);
    vf sum = w.sum[b][v] * shrink;
    auto weight = [&](int t) {
      vf x = *(vf*)(w.s + t * W + v * L);
      if constexpr (!MASKED) x = x * splat(scale);
      return exp2_nonpositive(x - base);
    };
    if constexpr (DOT) {
      int t = 0;
      for (; t + 1 < n; t += 2) {
        vf p0 = weight(t), p1 = weight(t + 1);
        sum += p0 + p1;
        *(vi*)(w.p + (t / 2) * W + v * L) = pack2(p0, p1);
      }
      if (t < n) { vf p0 = weight(t); sum += p0; *(vi*)(w.p + (t / 2) * W + v * L) = pack2(p0, vf{}); }
    } else {
      for (int t = 0; t < n; ++t) { vf p0 = weight(t); sum += p0; *(vf*)(w.p + t * W + v * L) = p0; }
    }
    bool moved = false;
    for (int l = 0; l < L; ++l) moved |= w.high[b][v][l] != high[l];
    if (moved) for (int d = 0; d < D; ++d) *(vf*)(w.o[b] + d * W + v * L) *= shrink;
    w.sum[b][v] = sum; w.high[b][v] = high;
  }
}

template <typename T, bool DOT, int V, int NB>
static void attend_rows(const AttentionArgs& a, Work<V, NB>& w, int64_t seq, int64_t kv_head, int64_t row0, int rows) {
  constexpr int W = V * L;
  const int D = a.head_dim, G = a.num_heads / a.num_kv_heads, KD = DOT ? D / 2 : D;
  const int64_t qlen = a.query_start[seq + 1] - a.query_start[seq], first_pos = a.context_lens[seq] - qlen;
  const float scale = a.scale * 1.44269504088896341f;
  const int blocks = (rows + W - 1) / W;
  int64_t begin = INT64_MAX, end = 0;
  for (int b = 0; b < blocks; ++b) {
    std::memset(w.q[b], 0, sizeof(int32_t) * KD * W);
    std::memset(w.o[b], 0, sizeof(float) * D * W);
    for (int v = 0; v < V; ++v) { w.high[b][v] = splat(-INFINITY); w.sum[b][v] = vf{}; }
    w.first[b] = w.whole_to[b] = INT64_MAX; w.last[b] = w.whole_from[b] = 0;
    for (int r = 0; r < W; ++r) {
      int row = b * W + r;
      if (row >= rows) { w.visible[b][r] = INT32_MAX; w.oldest[b][r] = 0; continue; }
      // Rows are (query, head of the group), query first.
      int64_t query = (row0 + row) / G, head = kv_head * G + (row0 + row) % G, pos = first_pos + query;
      const T* src = (const T*)a.q + (a.query_start[seq] + query) * a.q_stride + head * D;
      if constexpr (DOT) for (int d = 0; d < KD; ++d) std::memcpy(&w.q[b][d * W + r], src + 2 * d, 4);
      else for (int d = 0; d < D; ++d) ((float*)w.q[b])[d * W + r] = to_float(src[d]);
      int64_t old = a.window > 0 ? std::max<int64_t>(0, pos - a.window + 1) : 0;
      w.visible[b][r] = int32_t(pos + 1); w.oldest[b][r] = int32_t(old);
      w.last[b] = std::max(w.last[b], pos + 1); w.whole_to[b] = std::min(w.whole_to[b], pos + 1);
      w.first[b] = std::min(w.first[b], old); w.whole_from[b] = std::max(w.whole_from[b], old);
    }
    begin = std::min(begin, w.first[b]); end = std::max(end, w.last[b]);
  }
  const int32_t* table = a.block_tables + seq * a.table_stride;
  for (int64_t t0 = begin; t0 < end; t0 += TILE) {
    int n = int(std::min<int64_t>(TILE, end - t0));
    load_tile<T, DOT>(a, table, kv_head, t0, n, w.k, w.v);
    for (int b = 0; b < blocks; ++b) {
      if (t0 >= w.last[b] || t0 + n <= w.first[b]) continue;
      product<DOT, V>(w.k, KD, 1, w.q[b], W, w.s, W, n, KD, false);
      bool whole = t0 >= w.whole_from[b] && t0 + n <= w.whole_to[b];
      whole ? softmax_tile<DOT, V, NB, false>(w, b, t0, n, scale, D) : softmax_tile<DOT, V, NB, true>(w, b, t0, n, scale, D);
      product<DOT, V>(w.v, 1, D, w.p, W, w.o[b], W, D, DOT ? (n + 1) / 2 : n, true);
    }
  }
  for (int row = 0; row < rows; ++row) {
    int b = row / W, r = row % W;
    int64_t query = (row0 + row) / G, head = kv_head * G + (row0 + row) % G;
    T* dst = (T*)a.out + ((a.query_start[seq] + query) * a.num_heads + head) * D;
    float by = 1.0f / ((float*)w.sum[b])[r];
    for (int d = 0; d < D; ++d) store(dst + d, w.o[b][d * W + r] * by);
  }
}

template <typename T, bool DOT>
static void run(const AttentionArgs& a, const AttentionTask& t, void* scratch) {
  if (t.count <= L) attend_rows<T, DOT, 1, 1>(a, *(Work<1, 1>*)scratch, t.seq, t.kv_head, t.first, t.count);
  else if (t.count <= 2 * L) attend_rows<T, DOT, 2, 1>(a, *(Work<2, 1>*)scratch, t.seq, t.kv_head, t.first, t.count);
  else attend_rows<T, DOT, 4, BLOCKS>(a, *(Work<4, BLOCKS>*)scratch, t.seq, t.kv_head, t.first, t.count);
}

size_t attention_scratch_bytes() { return sizeof(Work<4, BLOCKS>); }
void attend(const AttentionArgs& a, const AttentionTask& t, void* scratch) {
  if (!a.is_bf16) run<float, false>(a, t, scratch);
  else if (HAS_DOT2 && a.head_dim % 2 == 0) run<bf16, HAS_DOT2>(a, t, scratch);
  else run<bf16, false>(a, t, scratch);
}

}  // namespace NS
}  // namespace penstock
