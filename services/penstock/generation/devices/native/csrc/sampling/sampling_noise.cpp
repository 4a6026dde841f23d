// The highest scores with Gumbel noise, which needs two logarithms for only a few of the
// vocabulary.
#include <algorithm>

#include "sampling/row_scan.h"

namespace penstock {
namespace NS {
namespace {

typedef uint64_t vq __attribute__((vector_size(4 * L)));
typedef uint32_t vu_half __attribute__((vector_size(2 * L)));

// The constants of sampling/ops/counted_draws.py.
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

template <typename T>
T mix(T z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return z ^ (z >> 31);
}
double noise(uint64_t stream, int64_t id) {
  const uint64_t bits = mix(stream + GOLDEN * uint64_t(id + 1));
  return -std::log(-std::log(std::max(double(bits >> 11) * 0x1p-53, 0x1p-54)));
}
// The upper halves of the random bits of ids [i, i + L).
vu upper_bits(uint64_t stream, int64_t i) {
  vu both;
  for (int half = 0; half < 2; ++half) {
    vq z;
    for (int l = 0; l < L / 2; ++l) z[l] = stream + GOLDEN * uint64_t(i + half * (L / 2) + l + 1);
    const vu_half upper = __builtin_convertvector(mix(z) >> 32, vu_half);
    std::memcpy(reinterpret_cast<char*>(&both) + half * sizeof(upper), &upper, sizeof(upper));
  }
  return both;
}

struct Key {
  double key;
  int64_t id;
};
bool is_better(const Key& a, const Key& b) {
  return a.key > b.key || (a.key == b.key && a.id < b.id);
}

}  // namespace

// At most `count`, best first; how many. A key above the threshold t needs -ln(-ln u) > t - score,
// so -ln u < exp(score - t), and since 1 - u <= -ln u that 1 - u is below it: that is seen from
// half of the random bits and one exponential.
int64_t top_noisy(const float* scores, int64_t vocab, uint64_t stream, int64_t count, double* keys,
                  int64_t* ids) {
  std::vector<Key> found;
  const size_t room = size_t(std::max<int64_t>(4 * count, 256));
  float threshold = -INF;
  auto prune = [&] {
    if (found.size() <= size_t(count)) return;
    std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), is_better);
    found.resize(count);
    // Rounded down, so that nothing is lost.
    threshold = std::nextafterf(float(found[count - 1].key), -INF);
  };
  for (int64_t i = 0; i < vocab; i += L) {
    const vf x = load_row(scores, i, vocab);
    if (!lanes(x > splat(-INF))) continue;
    vf exponent = (x - splat(threshold)) * splat(1.4426950408889634f);
    exponent = exponent < splat(0.0f) ? exponent : vf{};
    const vf limit = exp2_nonpositive(exponent) * splat(1.00001f);
    const vf rest = __builtin_convertvector(~upper_bits(stream, i), vf) * splat(0x1p-32f);
    for (uint32_t bits = lanes((x > splat(-INF)) & (rest <= limit)); bits; bits &= bits - 1) {
      const int l = __builtin_ctz(bits);
      const double key = double(x[l]) + noise(stream, i + l);
      if (key >= threshold) found.push_back({key, i + l});
    }
    if (found.size() >= room) prune();
  }
  prune();
  std::sort(found.begin(), found.end(), is_better);
  for (size_t c = 0; c < found.size(); ++c) keys[c] = found[c].key, ids[c] = found[c].id;
  return int64_t(found.size());
}

}  // namespace NS
}  // namespace penstock
