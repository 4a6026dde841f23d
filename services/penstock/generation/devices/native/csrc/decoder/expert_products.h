// The products of a mixture's experts with their rows: sorted by expert, so that a weight is read
// once for all of its rows. A row's sums have one order, with any rows beside it.
#pragma once
#include <optional>
#include <vector>

#include "decoder/expert_rows.h"
#include "decoder/expert_sums.h"
#include "linear/many_products.h"

namespace penstock {

// `format`: of all experts as they are stored; `of_row`: experts that a row has.
struct ExpertSizes {
  Format format;
  int64_t hidden, inner, experts, of_row;
};

// One thread plans; then all fill inputs, multiply, fill and multiply again, and sum up. They meet
// between these.
class ExpertProducts {
 public:
  // `rows`: at most, of `type`.
  ExpertProducts(const ExpertSizes& sizes, int64_t rows, int64_t threads, at::ScalarType type)
      : sizes_(sizes),
        threads_(threads),
        size_(at::elementSize(type)),
        is_bf16_(type == at::kBFloat16),
        places_(rows * sizes.of_row),
        row_(rows * sizes.of_row),
        inputs_(sizes.format, rows * sizes.of_row, sizes.hidden, type),
        middle_(sizes.format, rows * sizes.of_row, sizes.inner, type),
        inner_(at::detail::empty_cpu(
            {middle_.takes_outputs() ? 0 : rows * sizes.of_row, sizes.inner}, type)),
        products_(at::detail::empty_cpu({rows * sizes.of_row, sizes.hidden}, at::kFloat)) {
    starts_.reserve(sizes.experts + 1), next_.reserve(sizes.experts + 1);
    fills_.reserve(rows * sizes.of_row);
  }

  // `chosen`: numbers of the experts of each of `rows` rows. These are at `x`, `stride` numbers
  // apart, and are read there if an expert has one alone.
  void plan(const std::vector<Mlp>& experts, const int64_t* chosen, const void* x, int64_t stride,
            int64_t rows) {
    const int64_t count = rows * sizes_.of_row;
    starts_.assign(sizes_.experts + 1, 0);
    for (int64_t i = 0; i < count; ++i) ++starts_[chosen[i] + 1];
    for (int64_t e = 0; e < sizes_.experts; ++e) starts_[e + 1] += starts_[e];
    next_.assign(starts_.begin(), starts_.end());
    for (int64_t i = 0; i < count; ++i) {
      places_[i] = next_[chosen[i]]++;
      row_[places_[i]] = i / sizes_.of_row;
    }
    fills_.clear();
    first_.emplace(threads_), second_.emplace(threads_);
    for (int64_t e = 0; e < sizes_.experts; ++e) {
      const int64_t begin = starts_[e], own = starts_[e + 1] - begin;
      if (own == 0) continue;
      const Mlp& expert = experts[e];
      LinearArgs up = inputs_.args(expert.gated, begin), back = middle_.args(expert.down, begin);
      if (own == 1 && inputs_.takes_outputs()) {
        up.x = (const char*)x + row_[begin] * stride * size_;
        up.x_stride = stride / granule_inputs(up.format);
      } else {
        for (int64_t i = begin; i < begin + own; ++i) fills_.push_back(i);
      }
      const bool stays = middle_.takes_outputs();
      up.out = stays ? middle_.at(begin) : (char*)inner_.data_ptr() + begin * sizes_.inner * size_;
      up.out_stride = stays ? middle_.stride() : sizes_.inner;
      up.out_bf16 = is_bf16_;
      back.out = products_.data_ptr<float>() + begin * sizes_.hidden;
      back.out_stride = sizes_.hidden;
      first_->add(up, own, expert.gated.panels);
      second_->add(back, own, expert.down.panels);
    }
  }

  // Number of inputs to fill before the first products, and before the second ones of `rows` rows.
  int64_t first_fills() const { return fills_.size(); }
  int64_t second_fills(int64_t rows) const {
    return middle_.takes_outputs() ? 0 : rows * sizes_.of_row;
  }
  // `x` and `stride` as in `plan`.
  void fill_first(int64_t number, const void* x, int64_t stride) {
    const int64_t place = fills_[number];
    inputs_.fill(place, (const char*)x + row_[place] * stride * size_);
  }
  void fill_second(int64_t place) {
    middle_.fill(place, (const char*)inner_.const_data_ptr() + place * sizes_.inner * size_);
  }
  void multiply_first(int64_t thread) { first_->run(thread); }
  void multiply_second(int64_t thread) { second_->run(thread); }

  // Fills columns [first, last) of `out` with a row's sum. `shares`: of all rows in their experts;
  // `added`, `added_share`: see ExpertSumArgs.
  void sum(int64_t row, const float* shares, const float* added, float added_share, int64_t first,
           int64_t last, float* out) const {
    KERNEL(sum_experts)
    ({.products = products_.const_data_ptr<float>(),
      .places = &places_[row * sizes_.of_row],
      .shares = shares + row * sizes_.of_row,
      .experts = sizes_.of_row,
      .width = sizes_.hidden,
      .added = added,
      .added_share = added_share,
      .out = out},
     first, last);
  }

 private:
  ExpertSizes sizes_;
  int64_t threads_, size_;
  bool is_bf16_;
  // By choice, row by row: the place of its product; by place: its row.
  std::vector<int64_t> places_, row_;
  ExpertInputs inputs_, middle_;
  at::Tensor inner_, products_;
  // First place of each expert, and the next one.
  std::vector<int64_t> starts_, next_;
  // Places with inputs that are copied or quantised.
  std::vector<int64_t> fills_;
  std::optional<ManyProducts> first_, second_;
};

}  // namespace penstock
