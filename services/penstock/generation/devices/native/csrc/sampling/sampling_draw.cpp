// The scores that top-k, top-p and min-p leave of a row, and one draw from them by inverse CDF in
// the order of ids.
#include <algorithm>
#include <array>
#include <functional>

#include "sampling/row_scan.h"

namespace penstock {
namespace NS {
namespace {

bool is_before(const Entry& a, const Entry& b) {
  return a.score > b.score || (a.score == b.score && a.id < b.id);
}

// Ids per block with a known highest score: blocks that cannot have one of the highest are skipped.
constexpr int64_t GROUP = 256;

// The highest scores of groups of ids, and the highest of all.
float group_maxima(const float* scores, int64_t vocab, std::vector<float>& maxima) {
  maxima.clear();
  vi broken{};
  float best = -INF;
  for (int64_t first = 0; first < vocab; first += GROUP) {
    vf a = splat(-INF);
    for (int64_t i = first; i < std::min(first + GROUP, vocab); i += L) {
      const vf x = load_row(scores, i, vocab);
      a = x > a ? x : a;
      broken |= x != x;
    }
    float group = a[0];
    for (int l = 1; l < L; ++l) group = std::max(group, a[l]);
    maxima.push_back(group);
    best = std::max(best, group);
  }
  return lanes(broken) ? std::numeric_limits<float>::quiet_NaN() : best;
}

// The `count` highest scores, and with `ties` the equals of the last of them, into scratch.entries,
// in no order; the highest of the row. The count-th highest of the groups' maxima is no higher than
// the count-th highest score: entries from there on are gathered, and when the room is full the
// threshold rises to the count-th of them.
float gather_highest(const float* scores, int64_t vocab, int64_t count, bool ties,
                     SamplingScratch& scratch) {
  const float best = group_maxima(scores, vocab, scratch.maxima);
  std::vector<Entry>& found = scratch.entries;
  found.clear();
  if (best != best) return best;
  float lowest = -std::numeric_limits<float>::max();
  if (size_t(count) <= scratch.maxima.size()) {
    scratch.ordered = scratch.maxima;
    const auto last = scratch.ordered.begin() + (count - 1);
    std::nth_element(scratch.ordered.begin(), last, scratch.ordered.end(), std::greater<float>());
    lowest = std::max(lowest, *last);
  }
  size_t room = size_t(std::max<int64_t>(4 * count, 1024));
  auto prune = [&] {
    if (found.size() <= size_t(count)) return;
    std::nth_element(found.begin(), found.begin() + (count - 1), found.end(), is_before);
    const float last = found[count - 1].score;
    auto end = found.begin() + count;
    if (ties)
      end = std::partition(end, found.end(), [&](const Entry& e) { return e.score == last; });
    found.erase(end, found.end());
    // Later equals have higher ids: without ties they are left out.
    lowest = ties ? last : std::nextafterf(last, INF);
    room = std::max(room, 2 * found.size());
  };
  for (size_t group = 0; group < scratch.maxima.size(); ++group) {
    if (scratch.maxima[group] < lowest) continue;
    const int64_t first = int64_t(group) * GROUP;
    for (int64_t i = first; i < std::min(first + GROUP, vocab); i += L) {
      const vf x = load_row(scores, i, vocab);
      for (uint32_t bits = lanes(x >= splat(lowest)); bits; bits &= bits - 1) {
        const int l = __builtin_ctz(bits);
        found.push_back({x[l], 0.0f, int32_t(i + l)});
      }
    }
    if (found.size() >= room) prune();
  }
  prune();
  return best;
}

// The last of `entries` that top-p keeps, in descending order of scores, when `before` of the
// weight is above them and it ends at `target`. By histograms until few are left, or equals only.
Cut last_within(std::vector<Entry>& entries, std::vector<Entry>& others, double before,
                double target) {
  constexpr int BINS = 256;
  for (;;) {
    float low = INF, high = -INF;
    for (const Entry& e : entries) low = std::min(low, e.score), high = std::max(high, e.score);
    if (low == high || entries.size() <= 48) break;
    const double scale = BINS / (double(high) - low);
    auto bin = [&](const Entry& e) {
      return std::min(int((double(high) - e.score) * scale), BINS - 1);
    };
    std::array<double, BINS> sums{};
    for (const Entry& e : entries) sums[bin(e)] += e.weight;
    int reached = 0;
    for (; reached < BINS - 1 && before + sums[reached] < target; ++reached)
      before += sums[reached];
    // The sums may miss the target by their rounding: then the last bin that is not empty has the
    // last kept one.
    while (reached > 0 && sums[reached] == 0) before -= sums[--reached];
    others.clear();
    for (const Entry& e : entries)
      if (bin(e) == reached) others.push_back(e);
    if (others.size() == entries.size()) break;
    entries.swap(others);
  }
  std::sort(entries.begin(), entries.end(), is_before);
  size_t kept = 0;
  for (double sum = before; kept < entries.size() && (kept == 0 || sum < target); ++kept)
    sum += entries[kept].weight;
  return {entries[kept - 1].score, entries[kept - 1].id};
}

// Sums of weights by the upper digits of their logarithm: bin b of `bins` holds exponents in (-(b +
// 1), -b] * width.
struct Histogram {
  static constexpr int BINS = 256;
  double bins[BINS] = {};
  // Below the last bin.
  double tail = 0;
  float per_bin;

  static vi place(vf exponent, float per_bin) {
    return __builtin_convertvector(exponent * splat(-per_bin), vi);
  }

  Histogram(const float* scores, int64_t vocab, const Weights& weights, Kept kept, float range)
      : per_bin(BINS / range) {
    double parts[4][BINS] = {};
    const vf lowest = splat(-range);
    for (int64_t first = 0; first < vocab; first += BLOCK) {
      vf small{};
      for (int64_t i = first; i < std::min(first + BLOCK, vocab); i += L) {
        const vf x = load_row(scores, i, vocab), exponent = weights.exponent(x);
        const vi keep = kept(x, i);
        const vf weight = exp2_nonpositive(exponent);
        const vi is_large = keep & (exponent > lowest);
        small += (keep & ~is_large) ? weight : vf{};
        uint32_t bits = lanes(is_large);
        if (!bits) continue;
        alignas(64) int32_t places[L];
        alignas(64) float added[L];
        const vi where = place(exponent, per_bin);
        std::memcpy(places, &where, sizeof(places));
        std::memcpy(added, &weight, sizeof(added));
        if (bits == (1u << L) - 1) {
          for (int l = 0; l < L; ++l) parts[l & 3][places[l]] += added[l];
        } else {
          for (; bits; bits &= bits - 1) {
            const int l = __builtin_ctz(bits);
            parts[l & 3][places[l]] += added[l];
          }
        }
      }
      tail += sum_all(small);
    }
    for (int b = 0; b < BINS; ++b)
      bins[b] = (parts[0][b] + parts[1][b]) + (parts[2][b] + parts[3][b]);
  }
  double head() const {
    double sum = 0;
    for (double one : bins) sum += one;
    return sum;
  }
};

// The smallest set of the highest scores with weights that reach top_p of the sum, among the
// scores that `given` leaves.
Cut nucleus(const float* scores, int64_t vocab, const Weights& weights, Cut given, double top_p,
            SamplingScratch& scratch) {
  const Kept kept(given);
  // In powers of two: most often the nucleus ends well above 2^-16 of the highest probability.
  float range = 16;
  Histogram histogram(scores, vocab, weights, kept, range);
  const double head = histogram.head();
  const double target = top_p * (head + histogram.tail);
  if (head < target) histogram = Histogram(scores, vocab, weights, kept, range = 128);
  double before = 0;
  int bin = 0;
  for (; bin < Histogram::BINS - 1 && before + histogram.bins[bin] < target; ++bin)
    before += histogram.bins[bin];
  while (bin > 0 && histogram.bins[bin] == 0) before -= histogram.bins[--bin];
  scratch.entries.clear();
  const vi wanted = vi{} + bin;
  // A little more than the bin, so that only few vectors need a closer look.
  const float lowest = -(bin + 2) / histogram.per_bin, highest = -(bin - 1) / histogram.per_bin;
  for (int64_t i = 0; i < vocab; i += L) {
    const vf x = load_row(scores, i, vocab), exponent = weights.exponent(x);
    const vi near = (exponent > splat(lowest)) & (exponent < splat(highest));
    if (!lanes(near)) continue;
    uint32_t bits = lanes(near & kept(x, i) & (exponent > splat(-range)) &
                          (Histogram::place(exponent, histogram.per_bin) == wanted));
    if (!bits) continue;
    const vf weight = exp2_nonpositive(exponent);
    for (; bits; bits &= bits - 1) {
      const int l = __builtin_ctz(bits);
      scratch.entries.push_back({x[l], weight[l], int32_t(i + l)});
    }
  }
  return last_within(scratch.entries, scratch.others, before, target);
}

// The first id with a cumulative weight above uniform * sum, never one that the cut drops.
Drawn invert(const DrawArgs& args, float highest, const Weights& weights, Cut cut,
             std::vector<double>& sums) {
  const Kept kept(cut);
  sums.clear();
  double total = 0;
  for (int64_t first = 0; first < args.vocab; first += BLOCK) {
    vf part{};
    for (int64_t i = first; i < std::min(first + BLOCK, args.vocab); i += L) {
      const vf x = load_row(args.scores, i, args.vocab);
      const vi keep = kept(x, i);
      if (lanes(keep)) part += keep ? weights(x) : vf{};
    }
    total += sum_all(part);
    sums.push_back(total);
  }
  const double target = args.uniform * total;
  size_t block = std::upper_bound(sums.begin(), sums.end(), target) - sums.begin();
  // Rounding may leave the target at the sum: then the last block that is not empty.
  if (block == sums.size())
    block = std::lower_bound(sums.begin(), sums.end(), total) - sums.begin();
  double sum = block ? sums[block - 1] : 0;
  Drawn drawn{-1, cut, double(highest) / args.temperature + std::log(total)};
  const int64_t first = int64_t(block) * BLOCK;
  for (int64_t i = first; i < std::min(first + BLOCK, args.vocab); i += L) {
    const vf x = load_row(args.scores, i, args.vocab), weight = kept(x, i) ? weights(x) : vf{};
    for (int l = 0; l < L; ++l) {
      if (weight[l] <= 0) continue;
      drawn.id = i + l;
      if ((sum += weight[l]) > target) return drawn;
    }
  }
  return drawn;
}

// All in fp64, on the few entries that top-k leaves.
Drawn draw_among(const DrawArgs& args, std::vector<Entry>& entries, std::vector<double>& sums) {
  std::sort(entries.begin(), entries.end(), is_before);
  const float top = entries[0].score / args.temperature;
  // Log-probabilities are taken off scores over the temperature in fp64: so is the highest of them.
  const double exact_top = double(entries[0].score) / args.temperature;
  sums.clear();
  double total = 0;
  for (Entry& e : entries) {
    sums.push_back(std::exp(double(e.score / args.temperature) - top));
    total += sums.back();
  }
  size_t kept = 0;
  for (double before = 0; kept < entries.size() && (kept == 0 || before < args.top_p * total);
       ++kept)
    before += sums[kept];
  while (kept > 1 && sums[kept - 1] < args.min_p) --kept;
  const Cut cut{entries[kept - 1].score, entries[kept - 1].id};
  entries.resize(kept);
  std::sort(entries.begin(), entries.end(),
            [](const Entry& a, const Entry& b) { return a.id < b.id; });
  sums.clear();
  total = 0;
  for (const Entry& e : entries)
    sums.push_back(total += std::exp(double(e.score / args.temperature) - top));
  size_t place = std::upper_bound(sums.begin(), sums.end(), args.uniform * total) - sums.begin();
  if (place == sums.size())
    place = std::lower_bound(sums.begin(), sums.end(), total) - sums.begin();
  return {entries[place].id, cut, exact_top + std::log(total)};
}

// The cut that top-p and min-p leave of `cut`.
Cut narrowed(const DrawArgs& args, float highest, const Weights& weights, Cut cut,
             SamplingScratch& scratch) {
  if (args.top_p < 1) cut = nucleus(args.scores, args.vocab, weights, cut, args.top_p, scratch);
  if (args.min_p > 0) {
    const float lowest = float(highest + std::log(args.min_p) * args.temperature);
    if (lowest > cut.lowest) cut = {std::min(lowest, highest), args.vocab};
  }
  return cut;
}

}  // namespace

// Scores over the temperature, -inf where top-k, top-p and min-p drop them, but never of the `keep`
// highest.
void warp(float* scores, const DrawArgs& args, int64_t keep, SamplingScratch& scratch) {
  Cut cut{-INF, args.vocab}, kept_always{INF, -1};
  const int64_t count =
      args.top_k > 0 ? std::min(args.top_k, args.vocab) : std::min(keep, args.vocab);
  const float best = gather_highest(scores, args.vocab, count, args.top_k > 0, scratch);
  if (best > -INF && best < INF) {
    std::vector<Entry>& found = scratch.entries;
    std::sort(found.begin(), found.end(), is_before);
    if (args.top_k > 0) cut.lowest = found.back().score;
    const Entry& last = found[std::min<size_t>(keep, found.size()) - 1];
    kept_always = {last.score, last.id};
    cut = narrowed(args, best, Weights(best, args.temperature), cut, scratch);
    const bool is_narrower = cut.lowest > kept_always.lowest ||
                             (cut.lowest == kept_always.lowest && cut.last < kept_always.last);
    if (is_narrower) cut = kept_always;
  }
  const Kept kept(cut);
  const vf scale = splat(args.temperature);
  int64_t i = 0;
  for (; i + L <= args.vocab; i += L) {
    const vf x = load(scores + i);
    // A NaN stays, and the draw finds it.
    store_all(scores + i, (kept(x, i) | (x != x)) ? x / scale : splat(-INF));
  }
  for (; i < args.vocab; ++i) {
    const bool is_kept = scores[i] > cut.lowest || (scores[i] == cut.lowest && i <= cut.last) ||
                         scores[i] != scores[i];
    scores[i] = is_kept ? scores[i] / args.temperature : -INF;
  }
}

Drawn draw(const DrawArgs& args, SamplingScratch& scratch) {
  Cut cut{-INF, args.vocab};
  const bool has_top_k = args.top_k > 0 && args.top_k < args.vocab;
  const float best = has_top_k ? gather_highest(args.scores, args.vocab, args.top_k, true, scratch)
                               : row_max(args.scores, args.vocab);
  if (!(best > -INF && best < INF)) return {-1, cut, best};
  if (has_top_k) {
    if (scratch.entries.size() <= 1024) return draw_among(args, scratch.entries, scratch.sums);
    for (cut.lowest = best; const Entry& e : scratch.entries)
      cut.lowest = std::min(cut.lowest, e.score);
  }
  const Weights weights(best, args.temperature);
  cut = narrowed(args, best, weights, cut, scratch);
  return invert(args, best, weights, cut, scratch.sums);
}

}  // namespace NS
}  // namespace penstock
