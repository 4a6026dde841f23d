// The scales and zeros of int4, and its numbers: those of the least squared error, weighted by the
// importance of each input. A group's numbers q mean (q - zero / ZERO_STEPS) * (scale * unit), with
// a byte for scale and zero and a bfloat16 for the output's unit. As llama.cpp's make_qkx2_quants
// has it, some ranges are tried; of the numbers that each gives, the two normal equations give the
// best scale and zero. L rows are searched at once, each in a lane of its own: no sum crosses
// lanes, so the bits are the same with any instruction set.
#pragma once
#include <cfloat>
#include <vector>

#include "linear/linear.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// Ranges that are tried: each end of a group's own is moved inwards by one of these shares of it. A
// range with two ends of its own matters where few inputs are important.
constexpr float MOVED[] = {-0.05f, -0.01f, 0.03f, 0.07f, 0.11f, 0.15f, 0.2f};
// Times that the numbers and the grid of the best range are fitted to each other.
constexpr int FITS = 2;
constexpr float LEVELS = 15.0f, BYTES = 255.0f, MOST_ZERO = BYTES / ZERO_STEPS;
// What every input has in addition, where the mean is 1.
constexpr float LEAST_IMPORTANCE = 1e-4f;

static inline vf at_most(vf x, float most) { return x > splat(most) ? splat(most) : x; }
static inline vf at_least(vf x, float least) { return x < splat(least) ? splat(least) : x; }
// The nearest whole number, the even one of two: |x| < 2^22.
static inline vf whole(vf x) {
  const vf shift = splat(12582912.0f);
  return (x + shift) - shift;
}
static inline vf level(vf x) { return at_most(at_least(whole(x), 0.0f), LEVELS); }
static inline vf byte(vf x) { return at_most(at_least(whole(x), 0.0f), BYTES); }

// What is known of a group's inputs: `weight` has their importance; its sum is not 0.
struct Importance {
  const float* weight;  // (GROUP)
  float sum;
};

// A group of L rows, and a range in which it lies; 0 does, too.
struct GroupRange {
  vf low, span;

  explicit GroupRange(const vf (&x)[GROUP]) {
    vf high = {};
    low = vf{};
    for (const vf& v : x) {
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
    span = high - low;
  }
};

// The best scale of each row, 0 of zeros, and what 0 becomes: no whole number, from 0 to MOST_ZERO.
struct Grid {
  vf scale, zero;
};

// Fits grids to a group's numbers: t, from 0 to 1, of a range with the low end `low`. Sums neither
// overflow nor vanish.
struct GridFit {
  const Importance& importance;
  vf t[GROUP], low, sum_t = {};
  // t + low is near slope * (q - zero); of the range itself, unless a better grid is found.
  vf best = vf{} - splat(FLT_MAX), slope = splat(1.0f / LEVELS), zero;

  GridFit(const vf (&x)[GROUP], const GroupRange& range, const Importance& of) : importance(of) {
    const vf inverse = range.span > vf{} ? splat(1.0f) / range.span : vf{};
    low = range.low * inverse;
    zero = at_most(vf{} - low * splat(LEVELS), MOST_ZERO);
    for (int i = 0; i < GROUP; ++i) {
      t[i] = (x[i] - range.low) * inverse;
      sum_t = fmadd(splat(importance.weight[i]), t[i], sum_t);
    }
  }

  // Tries the grid in which t becomes the whole number nearest to `factor` * t + `from`.
  void fit(vf factor, vf from) {
    vf q1 = {}, q2 = {}, qt = {};
    for (int i = 0; i < GROUP; ++i) {
      const vf q = level(fmadd(t[i], factor, from)), wq = splat(importance.weight[i]) * q;
      q1 += wq;
      q2 = fmadd(wq, q, q2);
      qt = fmadd(wq, t[i], qt);
    }
    const vf sum = splat(importance.sum), both = q1 * q1, products = q1 * sum_t, rest = q1 * qt;
    const vf determinant = fmadd(sum, q2, vf{} - both), a = fmadd(sum, qt, vf{} - products),
             b = fmadd(q2, sum_t, vf{} - rest);
    // The best zero that can be stored; of that the best slope, and what it takes off the error.
    const vf wanted = (vf{} - fmadd(low, determinant, b)) / a;
    const vf z = at_most(at_least(wanted, 0.0f), MOST_ZERO);
    const vf product = fmadd(low, q1, qt) - z * fmadd(low, sum, sum_t);
    const vf square = fmadd(z, fmadd(z, sum, splat(-2.0f) * q1), q2);
    const vf own = product / square, gain = own * product;
    // A group in which one input alone counts, or all numbers are one, has no two equations.
    const vi is_better = (determinant > both * splat(1e-5f)) & (own > vf{}) & (gain > best);
    best = is_better ? gain : best;
    slope = is_better ? own : slope;
    zero = is_better ? z : zero;
  }
};

static inline Grid search_group(const vf (&x)[GROUP], const Importance& importance) {
  const GroupRange range(x);
  GridFit grid(x, range, importance);
  for (const float low : MOVED)
    for (const float high : MOVED) {
      const float factor = LEVELS / (1.0f - low - high);
      grid.fit(splat(factor), splat(-low * factor));
    }
  for (int i = 0; i < FITS; ++i) {
    const vf factor = splat(1.0f) / grid.slope;
    grid.fit(factor, fmadd(grid.low, factor, grid.zero));
  }
  return {grid.slope * range.span, grid.zero};
}

// The numbers of a group as they are stored.
struct StoredGroup {
  vi scale, zero;  // bytes
  vi word[GROUP / 8];
};

static inline StoredGroup store_group(const vf (&x)[GROUP], const Importance& importance,
                                      const Grid& grid, vf unit) {
  // A group of zeros has no scale; others have one, however small.
  const vf wanted = unit > vf{} ? grid.scale / unit : vf{};
  const vf bytes = grid.scale > vf{} ? at_least(byte(wanted), 1.0f) : vf{};
  const vf scale = bytes * unit, inverse = scale > vf{} ? splat(1.0f) / scale : vf{};
  // The scale is another one now: the numbers that its grid gives have a best zero of their own.
  vf rest = {};
  for (int i = 0; i < GROUP; ++i) {
    const vf steps = x[i] * inverse, q = level(steps + grid.zero);
    rest = fmadd(splat(importance.weight[i]), q - steps, rest);
  }
  const vf zero = byte(rest / splat(importance.sum) * splat(ZERO_STEPS));
  const vf exact = zero * splat(1.0f / ZERO_STEPS);
  StoredGroup stored{.scale = __builtin_convertvector(bytes, vi),
                     .zero = __builtin_convertvector(zero, vi),
                     .word = {}};
  for (int i = 0; i < GROUP; ++i) {
    const vi q = __builtin_convertvector(level(fmadd(x[i], inverse, exact)), vi);
    // Of each eight the first four are the low halves of the bytes.
    stored.word[i / 8] |= q << (i % 4 * 8 + i % 8 / 4 * 4);
  }
  return stored;
}

}  // namespace NS
}  // namespace penstock
