// A row's experts by the scores of a router, and its shares in them:
// torch.ops.penstock.choose_experts (layers/expert_choice.py has the same in torch's operators).
#include <ATen/Parallel.h>
#include <torch/library.h>

#include <optional>
#include <tuple>

#include "decoder/expert_choice.h"

namespace penstock {
namespace {

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
  const ChoiceRule rule{per_row,    groups,      groups_of_row, ranked_by,
                        is_sigmoid, sums_to_one, float(least),  float(scale)};
  TORCH_CHECK(rule.fits(experts), "there are too few experts or groups");
  TORCH_CHECK(!bias || (bias->is_contiguous() && bias->numel() == experts &&
                        bias->scalar_type() == at::kFloat),
              "a bias is of each expert, in float");
  const at::Tensor chosen = at::detail::empty_cpu({rows, per_row}, at::kLong),
                   shares = at::detail::empty_cpu({rows, per_row}, at::kFloat);
  at::parallel_for(0, rows, CHOICES_AT_ONCE, [&](int64_t first, int64_t last) {
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
