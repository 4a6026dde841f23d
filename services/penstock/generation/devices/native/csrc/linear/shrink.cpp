// The first half of a LoRA adapter's product: rows of x times A. An output is one sum in a fixed
// order, with any rows and ranks computed beside it.
#include "linear/linear.h"
#include "util/vec.h"

namespace penstock {
namespace NS {

// Numbers of x in a vector, and their products with A's.
struct Floats {
  typedef float Number;
  static constexpr int COUNT = L;
  static inline vf dot(vf sum, vi x, vi a) { return fmadd((vf)x, (vf)a, sum); }
};
struct Halves {
  typedef bf16 Number;
  static constexpr int COUNT = 2 * L;
  static inline vf dot(vf sum, vi x, vi a) {
#ifdef __ARM_FEATURE_BF16_VECTOR_ARITHMETIC
    return (vf)vbfdotq_f32((float32x4_t)sum, (bfloat16x8_t)x, (bfloat16x8_t)a);
#elif defined(__AVX512BF16__)
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)x, (__m512bh)a);
#else
    const vi high = vi{} + int32_t(0xFFFF0000);
    sum = fmadd((vf)(x << 16), (vf)(a << 16), sum);
    return fmadd((vf)(x & high), (vf)(a & high), sum);
#endif
  }
};

// Rows and ranks that have their sums in registers.
constexpr int ROWS = 4;
constexpr int RANKS = L == 8 ? 2 : 4;

template <typename N>
static inline vi load_numbers(const N* p) {
  vi v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

template <class F, int R, int K>
static void dot_tile(const ShrinkArgs& args, int64_t row, int64_t rank) {
  typedef typename F::Number N;
  const N* x[R];
  for (int r = 0; r < R; ++r) x[r] = (const N*)args.x + args.rows[row + r] * args.x_stride;
  const N* a = (const N*)args.matrices->a + rank * args.inputs;
  const int64_t whole = args.inputs / F::COUNT * F::COUNT;
  vf sum[R][K] = {};
  for (int64_t i = 0; i < whole; i += F::COUNT) {
    vi w[K];
    for (int k = 0; k < K; ++k) w[k] = load_numbers(a + k * args.inputs + i);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const vi numbers = load_numbers(x[r] + i);
#pragma GCC unroll 4
      for (int k = 0; k < K; ++k) sum[r][k] = F::dot(sum[r][k], numbers, w[k]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int k = 0; k < K; ++k) {
      float total = sum_all(sum[r][k]);
      for (int64_t i = whole; i < args.inputs; ++i)
        total = __builtin_fmaf(to_float(x[r][i]), to_float(a[k * args.inputs + i]), total);
      store((N*)args.out + args.rows[row + r] * args.out_stride + rank + k,
            total * args.matrices->scale[rank + k]);
    }
}

template <class F, int R>
static void dot_ranks(const ShrinkArgs& args, int64_t row, int64_t first, int64_t last) {
  int64_t rank = first;
  for (; rank + RANKS <= last; rank += RANKS) dot_tile<F, R, RANKS>(args, row, rank);
  for (; rank < last; ++rank) dot_tile<F, R, 1>(args, row, rank);
}

template <class F>
static void dot_rows(const ShrinkArgs& args, int64_t first, int64_t last, int64_t first_rank,
                     int64_t last_rank) {
  int64_t row = first;
  for (; row + ROWS <= last; row += ROWS) dot_ranks<F, ROWS>(args, row, first_rank, last_rank);
  for (; row < last; ++row) dot_ranks<F, 1>(args, row, first_rank, last_rank);
}

void shrink(const ShrinkArgs& args, int64_t first, int64_t last, int64_t first_rank,
            int64_t last_rank) {
  args.is_bf16 ? dot_rows<Halves>(args, first, last, first_rank, last_rank)
               : dot_rows<Floats>(args, first, last, first_rank, last_rank);
}

}  // namespace NS
}  // namespace penstock
