// A decoder's layer with a mixture of experts in place of an MLP, and what a step needs of it.
#pragma once
#include <ATen/ops/sigmoid_cpu_dispatch.h>

#include <optional>
#include <utility>
#include <vector>

#include "decoder/expert_choice.h"
#include "decoder/expert_rows.h"
#include "decoder/expert_sums.h"
#include "linear/many_products.h"

namespace penstock {

struct Mlp {
  Linear gated, down;
};

struct Mixture {
  ChoiceRule rule;
  // (experts) in float: see Chooser.
  std::optional<at::Tensor> bias;
  Linear router;
  // Of one format and one size.
  std::vector<Mlp> experts;
  Format format;
  int64_t inner;
  // An MLP that all rows have beside their experts; and what makes the score of a row's share in
  // it, which is 1 otherwise.
  std::optional<Mlp> shared;
  std::optional<Linear> gate;

  void check() const {
    const int64_t count = experts.size();
    TORCH_CHECK(
        rule.groups > 0 && count > 0 && count % rule.groups == 0 && rule.groups_of_row > 0 &&
            rule.groups_of_row <= rule.groups && rule.ranked_by > 0 &&
            rule.ranked_by <= count / rule.groups && rule.per_row > 0 &&
            rule.per_row <= count / rule.groups * (rule.groups == 1 ? 1 : rule.groups_of_row),
        "a mixture has too few experts or groups");
    TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == count &&
                          bias->scalar_type() == at::kFloat),
                "a bias is of each expert, in float");
    TORCH_CHECK(router.format < Format::INT8 && (!gate || gate->format < Format::INT8),
                "routers and gates are not quantised");
    TORCH_CHECK(shared || !gate, "a gate is of a shared MLP");
  }
};

// What all such layers of a step share. One thread plans a layer, and all take part in the rest.
class MixtureStep {
 public:
  // `rows`: most rows of a layer, of `type`; `copies`: of them in float.
  MixtureStep(const Mixture& like, int64_t rows, int64_t copies, int64_t hidden, int64_t threads,
              at::ScalarType type)
      : floats(at::detail::empty_cpu({copies, hidden}, at::kFloat)),
        scores(at::detail::empty_cpu({rows, int64_t(like.experts.size())}, at::kFloat)),
        shared(at::detail::empty_cpu({like.shared ? rows : 0, hidden}, at::kFloat)),
        gates(at::detail::empty_cpu({like.gate ? whole_vectors(rows) : 0, 1}, at::kFloat)),
        each_(like.rule.per_row),
        hidden_(hidden),
        threads_(threads),
        size_(at::elementSize(type)),
        is_bf16_(type == at::kBFloat16),
        chosen_(rows * each_),
        places_(rows * each_),
        row_(rows * each_),
        shares_(rows * each_),
        inputs_(like.format, rows * each_, hidden, type),
        middle_(like.format, rows * each_, like.inner, type),
        inner_(
            at::detail::empty_cpu({middle_.takes_outputs() ? 0 : rows * each_, like.inner}, type)),
        products_(at::detail::empty_cpu({rows * each_, hidden}, at::kFloat)) {
    starts_.reserve(like.experts.size() + 1), next_.reserve(like.experts.size() + 1);
    fills_.reserve(rows * each_);
  }

  // Copies of rows, which a router in float reads; its scores (rows, experts); results of the
  // shared MLP, (rows, hidden); and the scores of its gate, then the shares in it, (any, 1).
  at::Tensor floats, scores, shared, gates;

  // Chooses the experts of rows [first, last) by `scores`.
  void choose(const Mixture& of, int64_t first, int64_t last) {
    Chooser chooser(of.rule, of.experts.size());
    for (int64_t row = first; row < last; ++row)
      chooser.choose(scores.const_data_ptr<float>() + row * int64_t(of.experts.size()),
                     data<float>(of.bias), &chosen_[row * each_], &shares_[row * each_]);
  }

  // Sorts `rows` rows by expert and lays out the products. `x`: the rows, `stride` numbers apart,
  // which are read where they are if an expert has one alone.
  void plan(const Mixture& of, const void* x, int64_t stride, int64_t rows) {
    const int64_t count = rows * each_, experts = of.experts.size();
    starts_.assign(experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++starts_[chosen_[i] + 1];
    for (int64_t e = 0; e < experts; ++e) starts_[e + 1] += starts_[e];
    next_.assign(starts_.begin(), starts_.end());
    for (int64_t i = 0; i < count; ++i) {
      places_[i] = next_[chosen_[i]]++;
      row_[places_[i]] = i / each_;
    }
    if (of.gate) at::cpu::sigmoid_(gates);
    fills_.clear();
    first_.emplace(threads_), second_.emplace(threads_);
    for (int64_t e = 0; e < experts; ++e) {
      const int64_t begin = starts_[e], own = starts_[e + 1] - begin;
      if (own == 0) continue;
      const Mlp& expert = of.experts[e];
      LinearArgs up = inputs_.args(expert.gated, begin), back = middle_.args(expert.down, begin);
      if (own == 1 && inputs_.takes_outputs()) {
        up.x = (const char*)x + row_[begin] * stride * size_;
        up.x_stride = stride / granule_inputs(up.format);
      } else {
        for (int64_t i = begin; i < begin + own; ++i) fills_.push_back(i);
      }
      const bool stays = middle_.takes_outputs();
      up.out = stays ? middle_.at(begin)
                     : (char*)inner_.data_ptr() + begin * of.inner * inner_.itemsize();
      up.out_stride = stays ? middle_.stride() : of.inner;
      up.out_bf16 = is_bf16_;
      back.out = products_.data_ptr<float>() + begin * hidden_, back.out_stride = hidden_;
      first_->add(up, own, expert.gated.panels);
      second_->add(back, own, expert.down.panels);
    }
  }

  // Number of inputs to fill before the first products, and before the second ones.
  int64_t first_fills() const { return fills_.size(); }
  int64_t second_fills(int64_t rows) const { return middle_.takes_outputs() ? 0 : rows * each_; }
  void fill_first(int64_t number, const void* x, int64_t stride) {
    const int64_t at = fills_[number];
    inputs_.fill(at, (const char*)x + row_[at] * stride * size_);
  }
  void fill_second(int64_t number) {
    middle_.fill(number, (const char*)inner_.const_data_ptr() + number * inner_.size(1) * size_);
  }
  void multiply_first(int64_t thread) { first_->run(thread); }
  void multiply_second(int64_t thread) { second_->run(thread); }

  // Columns [first, last) of a row's sum.
  void sum(int64_t row, int64_t first, int64_t last, float* out) const {
    KERNEL(sum_experts)
    ({.products = products_.const_data_ptr<float>(),
      .places = &places_[row * each_],
      .shares = &shares_[row * each_],
      .experts = each_,
      .width = hidden_,
      .added = shared.size(0) > 0 ? shared.const_data_ptr<float>() + row * hidden_ : nullptr,
      .added_share = gates.size(0) > 0 ? gates.const_data_ptr<float>()[row] : 1.0f,
      .out = out},
     first, last);
  }

 private:
  // As layers/experts.py pads scores: torch has another way for numbers after the last whole
  // vector.
  static int64_t whole_vectors(int64_t rows) { return (rows + 31) / 32 * 32; }

  int64_t each_, hidden_, threads_, size_;
  bool is_bf16_;
  // By choice, row by row: its expert, and the place of its product; by place: its row.
  std::vector<int64_t> chosen_, places_, row_;
  std::vector<float> shares_;
  ExpertInputs inputs_, middle_;
  at::Tensor inner_, products_;
  // First place of each expert.
  std::vector<int64_t> starts_, next_;
  // Places with inputs that are copied or quantised.
  std::vector<int64_t> fills_;
  std::optional<ManyProducts> first_, second_;
};

}  // namespace penstock
