// An MLP, and the rows that the products of a mixture of them read.
#pragma once
#include <cstring>

#include "decoder/linear_layer.h"

namespace penstock {

struct Mlp {
  Linear gated, down;
};

// Inputs of products, one row for each choice of an expert: of the rows' dtype in whole granules,
// or quantised.
class ExpertInputs {
 public:
  ExpertInputs(Format stored, int64_t rows, int64_t width, at::ScalarType type)
      : format_(product_of(stored)),
        rotation_(rotation_of(stored, width)),
        width_(width),
        size_(format_ < Format::INT8 ? at::elementSize(type) : 1),
        padded_(granules_of(format_, width) * granule_inputs(format_)),
        stride_(spread(padded_ * size_)),
        groups_(is_grouped(format_) ? padded_ / GROUP : 1),
        sums_(sums_of_group(format_)),
        is_bf16_(type == at::kBFloat16),
        rows_(at::detail::empty_cpu({rows, stride_}, at::kByte)) {
    if (!is_quantised()) return;
    scale_ = at::detail::empty_cpu({rows, groups_}, at::kFloat);
    sum_ = at::detail::empty_cpu({rows, groups_ * sums_}, at::kInt);
  }

  // Fills one row from `x`, `width` numbers.
  void fill(int64_t row, const void* x) {
    char* to = (char*)at(row);
    if (!is_quantised()) {
      std::memcpy(to, x, width_ * size_);
      std::memset(to + width_ * size_, 0, (padded_ - width_) * size_);
      return;
    }
    KERNEL(quantize)
    ({.x = x,
      .width = width_,
      .x_stride = width_,
      .is_bf16 = is_bf16_,
      .grouped = is_grouped(format_),
      .sums = sums_,
      .rotation = rotation_,
      .out = (int8_t*)to,
      .padded = padded_,
      .stride = stride_,
      .scale = scale_.data_ptr<float>() + row * groups_,
      .sum = sum_.data_ptr<int32_t>() + row * groups_ * sums_},
     0, 1);
  }

  // Arguments of `layer`'s product of the rows from `first` on; without the outputs.
  LinearArgs args(const Linear& layer, int64_t first) const {
    return {
        .format = format_,
        .x = at(first),
        .x_stride = stride_ / 4,
        .weight = (const char*)layer.weight.const_data_ptr(),
        .granules = layer.granules,
        .bias = data<float>(layer.bias),
        .row_scale = is_quantised() ? scale_.const_data_ptr<float>() + first * groups_ : nullptr,
        .column_scale = data<char>(layer.scale),
        .scale_is_bytes = layer.has_byte_scales(),
        .column_sum = data<int32_t>(layer.sum),
        .column_offset = data<float>(layer.offset),
        .row_sum =
            is_quantised() ? sum_.const_data_ptr<int32_t>() + first * groups_ * sums_ : nullptr,
        .out = nullptr,
        .width = layer.width,
        .out_stride = 0,
        .out_bf16 = false,
        .gate = layer.gate,
        .is_compact = layer.is_compact,
    };
  }

  void* at(int64_t row) const { return (char*)rows_.data_ptr() + row * stride_; }
  bool is_quantised() const { return format_ >= Format::INT8; }
  // True where a product may write its outputs here: they need nothing beside them.
  bool takes_outputs() const { return !is_quantised() && padded_ == width_; }
  // From a row to the next, in numbers of the rows' dtype.
  int64_t stride() const { return stride_ / size_; }

 private:
  Format format_;
  int64_t rotation_, width_, size_, padded_, stride_, groups_, sums_;
  bool is_bf16_;
  at::Tensor rows_, scale_, sum_;
};

}  // namespace penstock
