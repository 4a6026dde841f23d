// Weights into the panels of linear.h: rows become granules one by one, and then L rows at a time
// are transposed, so that runs of a cache line are written.
#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include "linear/linear.h"
#include "linear/rotate.h"
#include "util/abs_max.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

typedef int8_t vb __attribute__((vector_size(L)));

// Exchanges, in two rows S apart, the parts off the diagonal of S x S blocks.
template <int S, int... l>
static inline void exchange(vi& a, vi& b, std::integer_sequence<int, l...>) {
  const vi low = {((l & S) != 0 ? L + l - S : l)...}, high = {((l & S) != 0 ? L + l : l + S)...};
  const vi upper = __builtin_shuffle(a, b, low);
  b = __builtin_shuffle(a, b, high);
  a = upper;
}

template <int S>
static inline void transpose(vi (&rows)[L]) {
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i)
    if ((i & S) == 0) exchange<S>(rows[i], rows[i + S], std::make_integer_sequence<int, L>{});
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// `count` rows of `bytes` bytes, `stride` bytes apart, as granules at `target`: (granules, PANEL, 4
// bytes).
static void interleave(const char* source, int64_t stride, int64_t bytes, int count,
                       int64_t granules, char* target) {
  for (int64_t g = 0; g < granules; g += L) {
    vi rows[L] = {};
    const int64_t there = std::min<int64_t>(sizeof(vi), bytes - g * 4);
    for (int r = 0; r < count; ++r) {
      const char* from = source + r * stride + g * 4;
      if (there == sizeof(vi))
        std::memcpy(&rows[r], from, sizeof(vi));
      else
        std::memcpy(&rows[r], from, std::max<int64_t>(there, 0));
    }
    transpose<L / 2>(rows);
    for (int64_t i = 0; i < std::min<int64_t>(L, granules - g); ++i) {
      char* to = target + (g + i) * PANEL * 4;
      if (count == L)
        std::memcpy(to, &rows[i], sizeof(vi));
      else
        std::memcpy(to, &rows[i], count * 4);
    }
  }
}

// Rounds to the nearest whole number, to the even one of two: |x| < 2^22.
static inline vi nearest(vf x) {
  const vf shift = splat(12582912.0f);
  return (vi)(x + shift) - (vi)shift;
}

// `most`: the largest magnitude of the row.
template <typename T>
static bool quantize_int8(const T* row, int64_t n, float most, int8_t* out, float& scale,
                          int32_t& sum) {
  scale = most / 127.0f;
  sum = 0;
  // Is refused; a NaN is no integer.
  if (!(most <= FLT_MAX)) return false;
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  vi sums = {};
  int64_t i = 0;
  for (; i + L <= n; i += L) {
    const vi q = nearest(load(row + i) * splat(inverse));
    sums += q;
    const vb bytes = __builtin_convertvector(q, vb);
    std::memcpy(out + i, &bytes, sizeof(bytes));
  }
  for (int l = 0; l < L; ++l) sum += sums[l];
  for (; i < n; ++i) sum += out[i] = int8_t(std::nearbyintf(to_float(row[i]) * inverse));
  return true;
}

// Quantises a row after it turned its blocks. The blocks of x are turned, too: so the products
// are `rotation` times as large.
template <typename T>
static bool quantize_rotated(const T* row, int64_t n, int64_t rotation, int8_t* out, float& scale,
                             int32_t& sum) {
  thread_local std::vector<float> rotated;
  if (int64_t(rotated.size()) < n) rotated.resize(n);
  const float most = rotate(row, n, rotation, rotated.data());
  const bool finite = quantize_int8(rotated.data(), n, most, out, scale, sum);
  scale /= float(rotation);
  return finite;
}

// The largest of a group becomes -8 (as in GGML's q4_0), so that all 16 values are used.
static bf16 int4_scale(const float (&group)[GROUP]) {
  const float most = abs_max(group, GROUP);
  for (float v : group)
    if (std::fabs(v) == most) {
      bf16 rounded_scale;
      store(&rounded_scale, v / -8.0f);
      return rounded_scale;
    }
  bf16 none;
  store(&none, NAN);
  return none;
}

// `scales` are PANEL apart; two granules' worth of inputs share the bytes of one.
template <typename T>
static bool quantize_int4(const T* row, int64_t n, int64_t groups, uint8_t* out, bf16* scales) {
  bool finite = true;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * GROUP, count = std::min<int64_t>(GROUP, n - first);
    float group[GROUP] = {};
    for (int64_t i = 0; i < count; ++i) group[i] = to_float(row[first + i]);
    scales[g * PANEL] = int4_scale(group);
    const float scale = to_float(scales[g * PANEL]), inverse = scale != 0 ? 1.0f / scale : 0.0f;
    if (!(std::fabs(scale) <= FLT_MAX)) {
      finite = false;
      continue;
    }
    uint8_t q[GROUP];
    for (int i = 0; i < GROUP; ++i) {
      const float whole = std::nearbyintf(group[i] * inverse) + 8.0f;
      q[i] = uint8_t(std::min(std::max(whole, 0.0f), 15.0f));
    }
    for (int i = 0; i < GROUP / 2; ++i)
      out[g * GROUP / 2 + i] = uint8_t(q[i / 4 * 8 + i % 4] | q[i / 4 * 8 + 4 + i % 4] << 4);
  }
  return finite;
}

template <typename T>
static bool pack_some(const PackArgs& a, const T* rows, int count, int64_t panel, int column) {
  char* target = a.weight + (panel * a.granules * PANEL + column) * 4;
  if (a.format == Format::F32 || a.format == Format::BF16) {
    interleave((const char*)rows, a.inputs * sizeof(T), a.inputs * sizeof(T), count, a.granules,
               target);
    return true;
  }
  thread_local std::vector<int32_t> words;
  words.assign(L * a.granules, 0);
  const int64_t groups = a.granules * 8 / GROUP;
  bool finite = true;
  for (int r = 0; r < count; ++r) {
    const T* row = rows + r * a.inputs;
    int32_t* out = words.data() + r * a.granules;
    const int64_t output = panel * PANEL + column + r;
    if (a.format == Format::INT4) {
      bf16* scales = (bf16*)a.scale + panel * groups * PANEL + column + r;
      finite &= quantize_int4(row, a.inputs, groups, (uint8_t*)out, scales);
      continue;
    }
    float& scale = ((float*)a.scale)[output];
    int32_t& sum = a.sum[output];
    finite &= a.rotation == 1
                  ? quantize_int8(row, a.inputs, abs_max(row, a.inputs), (int8_t*)out, scale, sum)
                  : quantize_rotated(row, a.inputs, a.rotation, (int8_t*)out, scale, sum);
  }
  interleave((const char*)words.data(), a.granules * 4, a.granules * 4, count, a.granules, target);
  return finite;
}

bool pack(const PackArgs& a, const void* rows, int count, int64_t panel, int column) {
  bool finite = true;
  for (int done = 0; done < count; done += L) {
    const int some = std::min(L, count - done);
    finite &= a.is_bf16
                  ? pack_some(a, (const bf16*)rows + done * a.inputs, some, panel, column + done)
                  : pack_some(a, (const float*)rows + done * a.inputs, some, panel, column + done);
  }
  return finite;
}

}  // namespace NS
}  // namespace penstock
