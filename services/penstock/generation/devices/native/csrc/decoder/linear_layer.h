// Linear layers of a decoder, from tensors by name.
#pragma once
#include <torch/custom_class.h>

#include <map>
#include <optional>
#include <string>
#include <utility>

#include "linear/linear_work.h"
#include "linear/packed_rows.h"

namespace penstock {

// Tensors or sizes by name, from models/fused.py. Every name is read once, and none may be left
// over: a name that the two sides spell differently ends the start of the process.
template <typename T>
class Named {
 public:
  Named(std::string owner, const c10::Dict<std::string, T>& entries) : owner_(std::move(owner)) {
    for (const auto& entry : entries) left_.emplace(entry.key(), entry.value());
  }

  T take(const std::string& name) {
    std::optional<T> found = find(name);
    TORCH_CHECK(found.has_value(), owner_, " must have ", name);
    return *found;
  }
  // Finds a tensor that some models do not have.
  std::optional<T> find(const std::string& name) {
    const auto node = left_.extract(name);
    return node.empty() ? std::nullopt : std::optional<T>(node.mapped());
  }
  // Returns a tensor that is taken later.
  const T& peek(const std::string& name) const {
    const auto found = left_.find(name);
    TORCH_CHECK(found != left_.end(), owner_, " must have ", name);
    return found->second;
  }
  void check_all_taken() const {
    TORCH_CHECK(left_.empty(), owner_, " cannot have ", left_.begin()->first);
  }

 private:
  std::string owner_;
  std::map<std::string, T> left_;
};
using Tensors = c10::Dict<std::string, at::Tensor>;
using Sizes = c10::Dict<std::string, int64_t>;

template <typename T>
T* data(const std::optional<at::Tensor>& tensor) {
  return tensor ? (T*)tensor->const_data_ptr() : nullptr;
}

struct Linear {
  Format format;     // of the product
  int64_t rotation;  // inputs of a block that is turned, 1 for none
  at::Tensor weight;
  std::optional<at::Tensor> bias, scale, sum, offset;
  int64_t inputs, width, granules, panels;
  bool is_compact;
  Gate gate;

  // Takes the tensors `name`.weight, `name`.bias, `name`.scale, `name`.sum and `name`.offset.
  Linear(Named<at::Tensor>& from, const std::string& name, Format stored, int64_t inputs,
         int64_t width, Gate gate)
      : format(product_of(stored)),
        rotation(rotation_of(stored, inputs)),
        weight(from.take(name + ".weight")),
        bias(from.find(name + ".bias")),
        scale(from.find(name + ".scale")),
        sum(from.find(name + ".sum")),
        offset(from.find(name + ".offset")),
        inputs(inputs),
        width(width),
        granules(granules_of(format, inputs)),
        panels(panels_of(weight, format, inputs, granules, width, gate != Gate::NONE)),
        is_compact(panels > 0 && penstock::is_compact(weight, format, granules, panels)),
        gate(gate) {
    TORCH_CHECK(panels > 0 && width <= panels * (gate == Gate::NONE ? PANEL : PANEL / 2),
                "a weight has the wrong size");
    // One number per output, padded ones included; int4 has a scale for each group of inputs.
    const int64_t columns = panels * PANEL, groups = granules * 8 / GROUP,
                  scales = has_byte_scales()        ? byte_scales(panels, groups)
                           : format == Format::INT4 ? columns * groups
                                                    : columns;
    TORCH_CHECK(!bias || bias->numel() >= columns, "a bias is too short");
    TORCH_CHECK(
        format < Format::INT8 || format == Format::GGUF || (scale && scale->numel() >= scales),
        "the scales of a weight are too few");
    TORCH_CHECK(!scale || scale->scalar_type() == at::kFloat || has_byte_scales(),
                "scales are float, or bytes of int4");
    TORCH_CHECK(!offset || !has_byte_scales(), "offsets need scales in float");
    TORCH_CHECK(!offset || (format == Format::INT4 && offset->numel() >= scales),
                "the offsets of a weight are too few, or not of int4");
    TORCH_CHECK(format != Format::INT8 || (sum && sum->numel() >= columns),
                "the sums of a weight are too few");
  }

  bool has_byte_scales() const {
    return scale && format == Format::INT4 && scale->scalar_type() == at::kByte;
  }
};

}  // namespace penstock
