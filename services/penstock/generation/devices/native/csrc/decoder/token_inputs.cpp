// Kernels of tokens' vectors for each layer: how they are made, and how a layer's gates take them.
#include "decoder/token_inputs.h"

#include <algorithm>
#include <cmath>

#include "util/vec.h"

namespace penstock {
namespace NS {

// Numbers `count` of L from `x` on, the others 0.
template <typename T>
static vf load_some(const T* x, int64_t count) {
  vf found = vf{};
  for (int64_t i = 0; i < count; ++i) found[i] = to_float(x[i]);
  return found;
}
template <typename T>
static void store_some(T* to, vf x, int64_t count) {
  for (int64_t i = 0; i < count; ++i) store(to + i, x[i]);
}

template <typename T>
static void gelu_times_row(const T* gates, const T* x, T* out, int64_t n) {
  int64_t i = 0;
  for (; i + L <= n; i += L)
    store_all(out + i, rounded(gelu_tanh(load(gates + i)), gates) * load(x + i));
  if (i < n)
    store_some(out + i,
               rounded(gelu_tanh(load_some(gates + i, n - i)), gates) * load_some(x + i, n - i),
               n - i);
}

template <typename T>
static void gelu_times_of(const GeluTimesArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row) {
    const int64_t from = a.x_rows == nullptr ? row : a.x_rows[row];
    gelu_times_row((const T*)a.gates + row * a.gates_stride, (const T*)a.x + from * a.x_stride,
                   (T*)a.out + row * a.out_stride, a.width);
  }
}

void gelu_times(const GeluTimesArgs& a, int64_t first, int64_t last) {
  a.is_bf16 ? gelu_times_of<bf16>(a, first, last) : gelu_times_of<float>(a, first, last);
}

template <typename T>
static void token_inputs_of(const TokenInputArgs& a, const T* x, const T* row, T* out) {
  const int64_t n = a.dim, whole = n / L * L;
  const vf by = splat(a.product_factor);
  vf squares = vf{};
  for (int64_t i = 0; i < n; i += L) {
    const vf value = (i < whole ? load(x + i) : load_some(x + i, n - i)) * by;
    squares += value * value;
  }
  const vf scale = splat(1.0f / std::sqrt(sum_all(squares) / float(n) + a.eps));
  for (int64_t i = 0; i < n; i += L) {
    const int64_t left = n - i;
    const vf value = (i < whole ? load(x + i) : load_some(x + i, left)) * by * scale *
                     (i < whole ? load(a.weight + i) : load_some(a.weight + i, left));
    const vf joined =
        (value + (i < whole ? load(row + i) : load_some(row + i, left)) * splat(a.row_factor)) *
        splat(a.factor);
    if (i < whole)
      store_all(out + i, joined);
    else
      store_some(out + i, joined, left);
  }
}

template <typename T>
static void token_inputs_rows(const TokenInputArgs& a, int64_t first, int64_t last) {
  for (int64_t row = first; row < last; ++row)
    for (int64_t at = row * a.width; at < (row + 1) * a.width; at += a.dim)
      token_inputs_of(a, (const T*)a.products + at, (const T*)a.rows + at, (T*)a.out + at);
}

void token_inputs(const TokenInputArgs& a, int64_t first, int64_t last) {
  a.is_bf16 ? token_inputs_rows<bf16>(a, first, last) : token_inputs_rows<float>(a, first, last);
}

}  // namespace NS
}  // namespace penstock
