// A row's experts by the scores of a router, and its shares in them:
// torch.ops.penstock.choose_experts (layers/expert_choice.py has the same in torch's operators).
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <optional>
#include <tuple>
#include <vector>

namespace penstock {
namespace {

struct Rule {
  int64_t per_row, groups, groups_of_row, ranked_by;
  bool is_sigmoid, sums_to_one;
  float least, scale;
};

// Not a number is above all numbers, as in torch's topk; of equals the first is higher.
bool is_higher(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// Chooses for one row after another, in memory of its own.
class Chooser {
 public:
  Chooser(const Rule& rule, int64_t experts)
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

  const Rule rule_;
  const int64_t size_;  // of a group
  std::vector<float> scores_, ranked_;
  std::vector<int64_t> order_;
  std::vector<float> ranks_;
  std::vector<int64_t> best_;
};

// Rows that a thread takes at least: a row is some microseconds.
constexpr int64_t ROWS_AT_ONCE = 16;

// Of scores (T, experts): numbers of each row's experts, ascending, and its shares in them, both
// (T, per_row). `bias` (experts) counts in the choice alone.
std::tuple<at::Tensor, at::Tensor> choose_experts(const at::Tensor& scores,
                                                  const std::optional<at::Tensor>& bias,
                                                  int64_t per_row, int64_t groups,
                                                  int64_t groups_of_row, int64_t ranked_by,
                                                  bool is_sigmoid, bool sums_to_one, double least,
                                                  double scale) {
  TORCH_CHECK(scores.dim() == 2 && scores.is_contiguous() && scores.scalar_type() == at::kFloat,
              "scores are rows in float");
  const int64_t rows = scores.size(0), experts = scores.size(1);
  TORCH_CHECK(groups > 0 && experts > 0 && experts % groups == 0 && groups_of_row > 0 &&
                  groups_of_row <= groups && ranked_by > 0 && ranked_by <= experts / groups &&
                  per_row > 0 && per_row <= experts / groups * (groups == 1 ? 1 : groups_of_row),
              "there are too few experts or groups");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == experts &&
                        bias->scalar_type() == at::kFloat),
              "a bias is of each expert, in float");
  const at::Tensor chosen = at::detail::empty_cpu({rows, per_row}, at::kLong),
                   shares = at::detail::empty_cpu({rows, per_row}, at::kFloat);
  const Rule rule{per_row,    groups,      groups_of_row, ranked_by,
                  is_sigmoid, sums_to_one, float(least),  float(scale)};
  at::parallel_for(0, rows, ROWS_AT_ONCE, [&](int64_t first, int64_t last) {
    Chooser chooser(rule, experts);
    for (int64_t row = first; row < last; ++row)
      chooser.choose(scores.const_data_ptr<float>() + row * experts,
                     bias ? bias->const_data_ptr<float>() : nullptr,
                     chosen.data_ptr<int64_t>() + row * per_row,
                     shares.data_ptr<float>() + row * per_row);
  });
  return {chosen, shares};
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "choose_experts(Tensor scores, Tensor? bias, int per_row, int groups, int groups_of_row, int "
      "ranked_by, bool is_sigmoid, bool sums_to_one, float least, float scale) -> (Tensor, "
      "Tensor)");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("choose_experts", choose_experts); }

}  // namespace penstock
