// Scales of int4's groups, of each kind that a weight may have: floats of whole numbers that came
// with theirs (Scales, or with offsets OffsetScales), and bytes of weights that are quantised here
// (ByteScales). A kind has Group<N>: those of one group and N vectors of a panel's outputs. It adds
// the group's sum of a row, in integers, to the row's results. Those are in the outputs' units in
// the end where HAS_UNITS.
#pragma once
#include "linear/linear.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// Numbers from -8 to 7, stored 8 too large.
struct Scales {
  static constexpr bool HAS_UNITS = false;
  // What a group's sum starts from.
  static inline int32_t start(int32_t row_sum) { return -8 * row_sum; }

  template <int N>
  struct Group {
    vf scale[N];

    Group(const LinearArgs& a, int64_t groups, int64_t panel, int64_t group, int column) {
      const float* at = (const float*)a.column_scale + (panel * groups + group) * PANEL + column;
      for (int v = 0; v < N; ++v) scale[v] = load(at + v * L);
    }
    inline vf add(vf total, vf sum, float row_scale, int32_t, int v) const {
      return total + sum * splat(row_scale) * scale[v];
    }
  };
};

// Numbers from 0 to 15, and an offset for each scale.
struct OffsetScales {
  static constexpr bool HAS_UNITS = false;
  static inline int32_t start(int32_t) { return 0; }

  template <int N>
  struct Group {
    vf scale[N], offset[N];

    Group(const LinearArgs& a, int64_t groups, int64_t panel, int64_t group, int column) {
      const int64_t at = (panel * groups + group) * PANEL + column;
      for (int v = 0; v < N; ++v) {
        scale[v] = load((const float*)a.column_scale + at + v * L);
        offset[v] = load(a.column_offset + at + v * L);
      }
    }
    inline vf add(vf total, vf sum, float row_scale, int32_t row_sum, int v) const {
      total += sum * splat(row_scale) * scale[v];
      return total + splat(row_scale * float(row_sum)) * offset[v];
    }
  };
};

// Numbers from 0 to 15 less a zero in steps of 1 / ZERO_STEPS; scales in the output's unit. The
// zero times the row's sum, and the difference, are exact: whole numbers of steps below 2^24.
struct ByteScales {
  static constexpr bool HAS_UNITS = true;
  static inline int32_t start(int32_t) { return 0; }

  template <int N>
  struct Group {
    vf scale[N], zero[N];

    Group(const LinearArgs& a, int64_t groups, int64_t panel, int64_t group, int column) {
      const uint8_t* bytes = (const uint8_t*)a.column_scale + byte_scales(panel, groups) +
                             (1 + group) * 2 * PANEL + column;
      for (int v = 0; v < N; ++v) {
        scale[v] = load(bytes + v * L);
        zero[v] = load(bytes + PANEL + v * L) * splat(1.0f / ZERO_STEPS);
      }
    }
    inline vf add(vf total, vf sum, float row_scale, int32_t row_sum, int v) const {
      const vf centred = sum - zero[v] * __builtin_convertvector(vi{} + row_sum, vf);
      return total + centred * splat(row_scale) * scale[v];
    }
  };
};

// The units of L outputs of a panel of ByteScales.
static inline vf units_of(const LinearArgs& a, int64_t panel, int column) {
  const int64_t groups = a.granules * 8 / GROUP;
  return load((const bf16*)((const char*)a.column_scale + byte_scales(panel, groups)) + column);
}

}  // namespace NS
}  // namespace penstock
