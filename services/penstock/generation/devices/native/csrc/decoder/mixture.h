// A decoder's layer with a mixture of experts in place of an MLP, and what a step needs of it.
#pragma once
#include <ATen/ops/sigmoid_cpu_dispatch.h>

#include <optional>
#include <vector>

#include "decoder/expert_choice.h"
#include "decoder/expert_products.h"

namespace penstock {

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
    TORCH_CHECK(rule.fits(count), "a mixture has too few experts or groups");
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
        products({.format = like.format,
                  .hidden = hidden,
                  .inner = like.inner,
                  .experts = int64_t(like.experts.size()),
                  .of_row = like.rule.per_row},
                 rows, threads, type),
        chosen_(rows * like.rule.per_row),
        shares_(rows * like.rule.per_row) {}

  // Copies of rows, which a router in float reads; its scores (rows, experts); results of the
  // shared MLP, (rows, hidden); and the scores of its gate, then the shares in it, (any, 1).
  at::Tensor floats, scores, shared, gates;
  ExpertProducts products;

  // Chooses the experts of rows [first, last) by `scores`.
  void choose(const Mixture& of, int64_t first, int64_t last) {
    Chooser chooser(of.rule, of.experts.size());
    for (int64_t row = first; row < last; ++row)
      chooser.choose(scores.const_data_ptr<float>() + row * int64_t(of.experts.size()),
                     data<float>(of.bias), &chosen_[row * of.rule.per_row],
                     &shares_[row * of.rule.per_row]);
  }

  // Plans the products of `rows` rows, which are at `x`, `stride` numbers apart.
  void plan(const Mixture& of, const void* x, int64_t stride, int64_t rows) {
    if (of.gate) at::cpu::sigmoid_(gates);
    products.plan(of.experts, chosen_.data(), x, stride, rows);
  }

  // Fills columns [first, last) of `out` with a row's sum.
  void sum(int64_t row, int64_t first, int64_t last, float* out) const {
    products.sum(
        row, shares_.data(),
        shared.size(0) > 0 ? shared.const_data_ptr<float>() + row * shared.size(1) : nullptr,
        gates.size(0) > 0 ? gates.const_data_ptr<float>()[row] : 1.0f, first, last, out);
  }

 private:
  // As layers/experts.py pads scores: torch has another way for numbers after the last whole
  // vector.
  static int64_t whole_vectors(int64_t rows) { return (rows + 31) / 32 * 32; }

  // By choice, row by row: its expert, and the share in it.
  std::vector<int64_t> chosen_;
  std::vector<float> shares_;
};

}  // namespace penstock
