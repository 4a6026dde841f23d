// Weights into the panels of linear.h: rows become granules one by one, and then L rows at a time
// are transposed, so that runs of a cache line are written.
#include <cfloat>
#include <cmath>
#include <utility>
#include <vector>

#include "linear/int4_search.h"
#include "linear/linear.h"
#include "util/abs_max.h"
#include "util/rotate.h"
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

// The inputs of a group of `count` rows, from `first` on: a row in each lane. Zeros where there are
// none.
template <typename T>
static void load_group(const T* rows, int count, int64_t inputs, int64_t first, vf (&x)[GROUP]) {
  for (int part = 0; part < GROUP; part += L) {
    vi lanes[L] = {};
    const int64_t there = std::clamp<int64_t>(inputs - first - part, 0, L);
    for (int r = 0; r < count; ++r) {
      const T* from = rows + r * inputs + first + part;
      vf row = {};
      if (there == L)
        row = load(from);
      else
        for (int64_t l = 0; l < there; ++l) row[l] = to_float(from[l]);
      lanes[r] = (vi)row;
    }
    transpose<L / 2>(lanes);
    for (int l = 0; l < L; ++l) x[part + l] = (vf)lanes[l];
  }
}

// Each group's importance, in whole groups. A group's sum is not 0: no input is quite without it.
static std::vector<float> whole_importance(const PackArgs& a, int64_t groups) {
  std::vector<float> weight(groups * GROUP, 0.0f);
  if (a.importance == nullptr) {
    std::fill_n(weight.begin(), a.inputs, 1.0f);
    return weight;
  }
  double sum = 0;
  for (int64_t i = 0; i < a.inputs; ++i) sum += a.importance[i];
  const double mean = sum / double(a.inputs);
  for (int64_t i = 0; i < a.inputs; ++i)
    weight[i] = mean > 0 ? float(a.importance[i] / mean) + LEAST_IMPORTANCE : 1.0f;
  return weight;
}

// Up to L rows to the columns from `column` on.
template <typename T>
static bool pack_int4(const PackArgs& a, const T* rows, int count, int64_t panel, int column,
                      const std::vector<float>& weight) {
  const int64_t groups = a.granules * 8 / GROUP;
  thread_local std::vector<Grid> grids;
  grids.resize(groups);
  const auto importance = [&](int64_t g) {
    Importance of{.weight = weight.data() + g * GROUP, .sum = 0};
    for (int i = 0; i < GROUP; ++i) of.sum += of.weight[i];
    return of;
  };
  vf x[GROUP], largest = {}, odd = {};
  for (int64_t g = 0; g < groups; ++g) {
    load_group(rows, count, a.inputs, g * GROUP, x);
    // NaN of a NaN or an infinity.
    for (const vf& v : x) odd += v - v;
    grids[g] = search_group(x, importance(g));
    largest = grids[g].scale > largest ? grids[g].scale : largest;
  }
  const float overflow = sum_all(odd) + sum_all(largest);
  if (!(overflow <= FLT_MAX)) return false;
  uint8_t* lines = (uint8_t*)a.scale + byte_scales(panel, groups);
  bf16* units = (bf16*)lines + column;
  vf unit = {};
  for (int r = 0; r < count; ++r) {
    store(units + r, largest[r] / BYTES);
    unit[r] = to_float(units[r]);
  }
  char* target = a.weight + (panel * a.granules * PANEL + column) * 4;
  for (int64_t g = 0; g < groups; ++g) {
    load_group(rows, count, a.inputs, g * GROUP, x);
    const StoredGroup stored = store_group(x, importance(g), grids[g], unit);
    uint8_t* bytes = lines + (1 + g) * 2 * PANEL + column;
    for (int r = 0; r < count; ++r) {
      bytes[r] = uint8_t(stored.scale[r]);
      bytes[PANEL + r] = uint8_t(stored.zero[r]);
    }
    for (int i = 0; i < GROUP / 8; ++i)
      std::memcpy(target + (g * GROUP / 8 + i) * PANEL * 4, &stored.word[i], count * 4);
  }
  return true;
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
  bool finite = true;
  for (int r = 0; r < count; ++r) {
    const T* row = rows + r * a.inputs;
    int32_t* out = words.data() + r * a.granules;
    const int64_t output = panel * PANEL + column + r;
    float& scale = ((float*)a.scale)[output];
    int32_t& sum = a.sum[output];
    finite &= a.rotation == 1
                  ? quantize_int8(row, a.inputs, abs_max(row, a.inputs), (int8_t*)out, scale, sum)
                  : quantize_rotated(row, a.inputs, a.rotation, (int8_t*)out, scale, sum);
  }
  interleave((const char*)words.data(), a.granules * 4, a.granules * 4, count, a.granules, target);
  return finite;
}

template <typename T>
static bool pack_all(const PackArgs& a, const T* rows, int count, int64_t panel, int column) {
  const bool searches = a.format == Format::INT4;
  const std::vector<float> weight =
      searches ? whole_importance(a, a.granules * 8 / GROUP) : std::vector<float>{};
  bool finite = true;
  for (int done = 0; done < count; done += L) {
    const int some = std::min(L, count - done);
    const T* from = rows + done * a.inputs;
    finite &= searches ? pack_int4(a, from, some, panel, column + done, weight)
                       : pack_some(a, from, some, panel, column + done);
  }
  return finite;
}

bool pack(const PackArgs& a, const void* rows, int count, int64_t panel, int column) {
  return a.is_bf16 ? pack_all(a, (const bf16*)rows, count, panel, column)
                   : pack_all(a, (const float*)rows, count, panel, column);
}

}  // namespace NS
}  // namespace penstock
