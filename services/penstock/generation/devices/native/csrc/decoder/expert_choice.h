// The experts of a row by the scores of a router, and its shares in them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

namespace penstock {

struct ChoiceRule {
  int64_t per_row, groups, groups_of_row, ranked_by;
  bool is_sigmoid, sums_to_one;
  float least, scale;

  // True where this many experts are enough for it.
  bool fits(int64_t experts) const {
    if (groups <= 0 || experts <= 0 || experts % groups != 0) return false;
    const int64_t size = experts / groups, candidates = groups == 1 ? size : size * groups_of_row;
    return groups_of_row > 0 && groups_of_row <= groups && ranked_by > 0 && ranked_by <= size &&
           per_row > 0 && per_row <= candidates;
  }
};

// Not a number is above all numbers, as in torch's topk; of equals the first is higher.
inline bool is_higher(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Chooses for one row after another, in memory of its own.
class Chooser {
 public:
  Chooser(const ChoiceRule& rule, int64_t experts)
      : rule_(rule),
        size_(experts / rule.groups),
        scores_(experts),
        ranked_(experts),
        order_(experts),
        ranks_(rule.groups),
        best_(rule.groups) {}

  void choose(const float* scores, const float* bias, int64_t* chosen, float* shares) {
    const int64_t experts = scores_.size();
    rule_.is_sigmoid ? take_sigmoids(scores) : take_softmax(scores);
    for (int64_t e = 0; e < experts; ++e) ranked_[e] = scores_[e] + (bias ? bias[e] : 0.0f);
    const int64_t candidates = rule_.groups == 1 ? all() : those_of_best_groups();
    highest(ranked_, order_, candidates, rule_.per_row);
    std::copy_n(order_.begin(), rule_.per_row, chosen);
    std::sort(chosen, chosen + rule_.per_row);
    float sum = 0;
    for (int64_t i = 0; i < rule_.per_row; ++i) sum += shares[i] = scores_[chosen[i]];
    for (int64_t i = 0; i < rule_.per_row; ++i)
      shares[i] = (rule_.sums_to_one ? shares[i] / (sum + rule_.least) : shares[i]) * rule_.scale;
  }

 private:
  void take_sigmoids(const float* scores) {
    for (size_t e = 0; e < scores_.size(); ++e) scores_[e] = 1 / (1 + std::exp(-scores[e]));
  }
  void take_softmax(const float* scores) {
    float most = scores[0], sum = 0;
    for (size_t e = 1; e < scores_.size(); ++e) most = std::max(most, scores[e]);
    for (size_t e = 0; e < scores_.size(); ++e) sum += scores_[e] = std::exp(scores[e] - most);
    for (float& score : scores_) score /= sum;
  }
  int64_t all() {
    std::iota(order_.begin(), order_.end(), 0);
    return order_.size();
  }
  // Puts the experts of the best groups into `order_`, and returns their number. A group's rank is
  // the sum of its highest scores.
  int64_t those_of_best_groups() {
    for (int64_t g = 0; g < rule_.groups; ++g) {
      std::iota(order_.begin(), order_.begin() + size_, g * size_);
      highest(ranked_, order_, size_, rule_.ranked_by);
      ranks_[g] = 0;
      for (int64_t i = 0; i < rule_.ranked_by; ++i) ranks_[g] += ranked_[order_[i]];
    }
    std::iota(best_.begin(), best_.end(), 0);
    highest(ranks_, best_, rule_.groups, rule_.groups_of_row);
    std::sort(best_.begin(), best_.begin() + rule_.groups_of_row);
    for (int64_t i = 0; i < rule_.groups_of_row; ++i)
      std::iota(order_.begin() + i * size_, order_.begin() + (i + 1) * size_, best_[i] * size_);
    return rule_.groups_of_row * size_;
  }
  // Brings the `count` highest of the first `candidates` places, which ascend, to the front.
  static void highest(const std::vector<float>& of, std::vector<int64_t>& places,
                      int64_t candidates, int64_t count) {
    std::partial_sort(places.begin(), places.begin() + count, places.begin() + candidates,
                      [&](int64_t a, int64_t b) {
                        return is_higher(of[a], of[b]) || (!is_higher(of[b], of[a]) && a < b);
                      });
  }

  const ChoiceRule rule_;
  const int64_t size_;  // of a group
  std::vector<float> scores_, ranked_;
  std::vector<int64_t> order_;
  std::vector<float> ranks_;
  std::vector<int64_t> best_;
};

// Rows that a thread takes at least: a row is some microseconds.
constexpr int64_t CHOICES_AT_ONCE = 16;

}  // namespace penstock
