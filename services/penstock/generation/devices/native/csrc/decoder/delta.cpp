// The gated delta rule (Yang et al., 2024, Gated Delta Networks), row by row. A row's result has
// the same bits in any chunk: columns of a state do not depend on each other, and each sums over
// its keys in their order.
#include "decoder/delta.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "util/vec.h"

namespace penstock {
namespace NS {
namespace {

constexpr float UNIT_EPS = 1e-6f;

// The first `count` lanes; the others are 0.
template <typename T>
vf load_some(const T* p, int64_t count) {
  if (count >= L) return load(p);
  T some[L] = {};
  std::memcpy(some, p, sizeof(T) * count);
  return load(some);
}
template <typename T>
void store_some(T* p, vf v, int64_t count) {
  if (count >= L) return store_all(p, v);
  T some[L];
  store_all(some, v);
  std::memcpy(p, some, sizeof(T) * count);
}

// Rows of a sequence, in turn: those before it first, at negative places.
template <typename T>
struct Rows {
  const T *before, *mixed;
  int64_t before_rows, before_stride, stride;

  const T* at(int64_t row) const {
    return row < 0 ? before + (before_rows + row) * before_stride : mixed + row * stride;
  }
};

template <typename T>
void turn(const DeltaArgs& a, int64_t sequence, int64_t head) {
  const int64_t C = a.channels(), keys = a.keys(), K = a.key_dim;
  const bool is_key = head < 2 * a.key_heads;
  const int64_t width = is_key ? K : a.value_dim;
  const int64_t begin = is_key ? head * K : 2 * keys + (head - 2 * a.key_heads) * a.value_dim;
  const int64_t first = a.query_start[sequence], count = a.query_start[sequence + 1] - first;
  const int taps = a.kernel;
  T* before = (T*)a.before + a.slots[sequence] * a.before_stride + begin;
  if (a.is_new[sequence])
    for (int tap = 0; tap < taps - 1; ++tap) std::memset(before + tap * C, 0, sizeof(T) * width);
  const T* mixed = (const T*)a.mixed + first * a.mixed_stride + begin;
  const Rows<T> rows{before, mixed, taps - 1, C, a.mixed_stride};
  // Queries are also divided by the square root of their number of dims.
  const float scale = head < a.key_heads ? 1.0f / std::sqrt(float(K)) : 1.0f;
  for (int64_t row = 0; row < count; ++row) {
    float* out = a.turned + (first + row) * C + begin;
    vf squares = vf{};
    for (int64_t i = 0; i < width; i += L) {
      const int64_t some = width - i;
      vf total = vf{};
      for (int tap = 0; tap < taps; ++tap)
        total = fmadd(load_some(rows.at(row - taps + 1 + tap) + i, some),
                      load_some(a.conv + tap * C + begin + i, some), total);
      const vf turned = silu(total);
      squares = fmadd(turned, turned, squares);
      store_some(out + i, turned, some);
    }
    if (!is_key) continue;
    const vf by = splat(scale / std::sqrt(sum_all(squares) + UNIT_EPS));
    for (int64_t i = 0; i < width; i += L)
      store_some(out + i, load_some(out + i, width - i) * by, width - i);
  }
  // A row that is copied lies behind those that were overwritten.
  for (int tap = 0; tap < taps - 1; ++tap)
    std::memcpy(before + tap * C, rows.at(a.kept[sequence] - taps + 1 + tap), sizeof(T) * width);
}

// One run of rows of a head.
struct Run {
  const float *queries, *keys, *values;  // of the first row
  float* out;
  int64_t stride, out_stride;  // of rows
  int64_t count, key_dim;
  const float *fades, *rates, *products;  // of each row: g, beta, q k
};

// `N` vectors of columns of a state, through all rows of a run. `width`: columns, fewer than N * L
// only where N is 1.
template <int N>
void columns(const Run& r, float* state, int64_t stride, int64_t width) {
  vf known[N] = {}, read[N] = {};
  for (int64_t d = 0; d < r.key_dim; ++d) {
    const vf k = splat(r.keys[d]), q = splat(r.queries[d]);
    for (int n = 0; n < N; ++n) {
      const vf s = load(state + d * stride + n * L);
      known[n] = fmadd(k, s, known[n]);
      read[n] = fmadd(q, s, read[n]);
    }
  }
  for (int64_t row = 0; row < r.count; ++row) {
    const vf fade = splat(r.fades[row]), rate = splat(r.rates[row]),
             product = splat(r.products[row]);
    vf change[N];
    for (int n = 0; n < N; ++n) {
      const int64_t some = width - n * L;
      const vf value = load_some(r.values + row * r.stride + n * L, some);
      change[n] = rate * (value - fade * known[n]);
      store_some(r.out + row * r.out_stride + n * L, fmadd(product, change[n], fade * read[n]),
                 some);
      known[n] = read[n] = vf{};
    }
    const float* keys = r.keys + row * r.stride;
    if (row + 1 == r.count) {
      for (int64_t d = 0; d < r.key_dim; ++d)
        for (int n = 0; n < N; ++n) {
          float* at = state + d * stride + n * L;
          store_all(at, fmadd(splat(keys[d]), change[n], fade * load(at)));
        }
      continue;
    }
    const float *next = keys + r.stride, *query = r.queries + (row + 1) * r.stride;
    for (int64_t d = 0; d < r.key_dim; ++d) {
      const vf key = splat(keys[d]), k = splat(next[d]), q = splat(query[d]);
      for (int n = 0; n < N; ++n) {
        float* at = state + d * stride + n * L;
        const vf s = fmadd(key, change[n], fade * load(at));
        store_all(at, s);
        known[n] = fmadd(k, s, known[n]);
        read[n] = fmadd(q, s, read[n]);
      }
    }
  }
}

// All columns of a head's state, (key_dim, width).
void run_head(Run r, float* state, int64_t width) {
  int64_t i = 0;
  auto moved = [&](int64_t by) {
    r.values += by;
    r.out += by;
    i += by;
  };
  while (i + 4 * L <= width) {
    columns<4>(r, state + i, width, 4 * L);
    moved(4 * L);
  }
  while (i + L <= width) {
    columns<1>(r, state + i, width, L);
    moved(L);
  }
  if (i == width) return;
  thread_local std::vector<float> rest;
  rest.assign(r.key_dim * L, 0.0f);
  const int64_t some = width - i;
  for (int64_t d = 0; d < r.key_dim; ++d)
    std::memcpy(rest.data() + d * L, state + d * width + i, sizeof(float) * some);
  columns<1>(r, rest.data(), L, some);
  for (int64_t d = 0; d < r.key_dim; ++d)
    std::memcpy(state + d * width + i, rest.data() + d * L, sizeof(float) * some);
}

// As torch's: a number above 20 is its own.
float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

template <typename T>
void take_head(const DeltaArgs& a, int64_t sequence, int64_t head) {
  const int64_t C = a.channels(), K = a.key_dim, V = a.value_dim, H = a.value_heads;
  const int64_t key = head / (a.value_heads / a.key_heads);
  const int64_t first = a.query_start[sequence], last = a.query_start[sequence + 1];
  const int64_t kept = first + a.kept[sequence];
  float* state = a.states + a.slots[sequence] * a.state_stride + head * K * V;
  if (a.is_new[sequence]) std::memset(state, 0, sizeof(float) * K * V);
  thread_local std::vector<float> ahead;
  float fades[DELTA_RUN], rates[DELTA_RUN], products[DELTA_RUN];
  for (int64_t row = first; row < last;) {
    if (row == kept) {
      // Later rows may be taken back.
      ahead.assign(state, state + K * V);
      state = ahead.data();
    }
    const int64_t end = std::min(row + DELTA_RUN, row < kept ? kept : last);
    const float* turned = a.turned + row * C;
    const Run run{
        .queries = turned + key * K,
        .keys = turned + a.keys() + key * K,
        .values = turned + 2 * a.keys() + head * V,
        .out = a.summed + row * a.values() + head * V,
        .stride = C,
        .out_stride = a.values(),
        .count = end - row,
        .key_dim = K,
        .fades = fades,
        .rates = rates,
        .products = products,
    };
    for (int64_t i = 0; i < run.count; ++i) {
      const T* numbers = (const T*)a.numbers + (row + i) * a.numbers_stride;
      const float time = softplus(to_float(numbers[H + head]) + a.bias[head]);
      fades[i] = std::exp(-a.decay[head] * time);
      rates[i] = 1.0f / (1.0f + std::exp(-to_float(numbers[head])));
      vf product = vf{};
      for (int64_t d = 0; d < K; d += L)
        product = fmadd(load_some(run.queries + i * C + d, K - d),
                        load_some(run.keys + i * C + d, K - d), product);
      products[i] = sum_all(product);
    }
    run_head(run, state, V);
    row = end;
  }
  for (int64_t row = first; row < last; ++row) {
    const float* x = a.summed + row * a.values() + head * V;
    const T* gates = (const T*)a.mixed + row * a.mixed_stride + C + head * V;
    T* out = (T*)a.out + row * a.out_stride + head * V;
    vf squares = vf{};
    for (int64_t i = 0; i < V; i += L) {
      const vf own = load_some(x + i, V - i);
      squares = fmadd(own, own, squares);
    }
    const vf by = splat(1.0f / std::sqrt(sum_all(squares) / float(V) + a.eps));
    for (int64_t i = 0; i < V; i += L) {
      const vf normed = load_some(x + i, V - i) * by * load_some(a.norm + i, V - i);
      store_some(out + i, normed * silu(load_some(gates + i, V - i)), V - i);
    }
  }
}

}  // namespace

void convolve_head(const DeltaArgs& a, int64_t sequence, int64_t head) {
  a.is_bf16 ? turn<bf16>(a, sequence, head) : turn<float>(a, sequence, head);
}

void delta_head(const DeltaArgs& a, int64_t sequence, int64_t head) {
  a.is_bf16 ? take_head<bf16>(a, sequence, head) : take_head<float>(a, sequence, head);
}

}  // namespace NS
}  // namespace penstock
