// A decoder's layer with a gated delta rule in place of attention, and what a step needs of it.
#pragma once
#include <cstdint>
#include <optional>
#include <vector>

#include "decoder/delta_work.h"
#include "decoder/linear_layer.h"

namespace penstock {

// Heads of such a layer: of every one of a model the same.
struct DeltaSizes {
  int64_t key_heads, value_heads, key_dim, value_dim, kernel;

  int64_t values() const { return value_heads * value_dim; }
  int64_t channels() const { return 2 * key_heads * key_dim + values(); }
  // Outputs of the layer's first product: what the convolution reads, and the gates of the result.
  int64_t outputs() const { return channels() + values(); }
  bool operator==(const DeltaSizes&) const = default;
};

// What it has beside the two products of any layer.
struct DeltaLayer {
  DeltaSizes sizes;
  int64_t place;  // among the layers that keep a state
  Linear numbers;
  // In float: see DeltaArgs.
  at::Tensor conv, decay, bias, norm;

  void check() const {
    const auto fits = [](const at::Tensor& x, int64_t count) {
      return x.is_contiguous() && x.scalar_type() == at::kFloat && x.numel() == count;
    };
    TORCH_CHECK(sizes.key_heads > 0 && sizes.value_heads % sizes.key_heads == 0 &&
                    sizes.key_dim > 0 && sizes.value_dim > 0 && place >= 0,
                "a layer has no such heads");
    TORCH_CHECK(conv.dim() == 2 && sizes.kernel > 0 &&
                    fits(conv, sizes.kernel * sizes.channels()) && fits(decay, sizes.value_heads) &&
                    fits(bias, sizes.value_heads) && fits(norm, sizes.value_dim),
                "a tensor of a delta rule has the wrong size or dtype");
  }
};

// States of a step's sequences: rows before each (slots, layers, kernel - 1, channels), and the
// matrices of the heads (slots, layers, value heads, key dims, value dims). By sequence (int64) its
// slot, the number of rows that its state is kept after, and 1 for one that begins.
struct DeltaStates {
  at::Tensor before, matrices, slots, kept, is_new;

  explicit DeltaStates(const std::vector<at::Tensor>& parts) {
    TORCH_CHECK(parts.size() == 5, "states have five tensors");
    before = parts[0], matrices = parts[1], slots = parts[2], kept = parts[3], is_new = parts[4];
  }

  // `starts`: where those of `rows` of `sequences` sequences begin. `most`: the highest place of a
  // layer.
  void check(const DeltaSizes& sizes, int64_t most, const int32_t* starts, int64_t sequences,
             int64_t rows, at::ScalarType type) const {
    TORCH_CHECK(starts[0] == 0 && starts[sequences] == rows, "the sequences have other rows");
    TORCH_CHECK(matrices.dim() == 5, "the states are of other layers");
    const int64_t count = matrices.size(0);
    TORCH_CHECK(before.dim() == 4 && before.is_contiguous() && before.scalar_type() == type &&
                    before.size(0) == count && before.size(1) > most &&
                    before.size(2) == sizes.kernel - 1 && before.size(3) == sizes.channels(),
                "the rows before a step are of other layers, or of another dtype");
    TORCH_CHECK(matrices.is_contiguous() && matrices.scalar_type() == at::kFloat &&
                    matrices.sizes() == at::IntArrayRef({count, before.size(1), sizes.value_heads,
                                                         sizes.key_dim, sizes.value_dim}),
                "the states are of other layers");
    for (const at::Tensor* one : {&slots, &kept, &is_new})
      TORCH_CHECK(
          one->is_contiguous() && one->scalar_type() == at::kLong && one->numel() == sequences,
          "a number of each sequence");
    const int64_t *places = slots.const_data_ptr<int64_t>(),
                  *keeps = kept.const_data_ptr<int64_t>();
    for (int64_t s = 0; s < sequences; ++s)
      TORCH_CHECK(places[s] >= 0 && places[s] < count && starts[s] < starts[s + 1] &&
                      keeps[s] >= 1 && keeps[s] <= starts[s + 1] - starts[s],
                  "a sequence has no slot, no rows, or keeps others");
  }
};

// What all such layers of a step share: buffers, and the heads as tasks.
struct DeltaStep {
  at::Tensor numbers, turned, summed;
  std::vector<HeadTask> turns, heads;

  DeltaStep(const DeltaSizes& sizes, const int32_t* starts, int64_t sequences, int64_t threads,
            at::ScalarType type) {
    const int64_t rows = starts[sequences];
    numbers = at::detail::empty_cpu({rows, 2 * sizes.value_heads}, type);
    turned = at::detail::empty_cpu({rows, sizes.channels()}, at::kFloat);
    summed = at::detail::empty_cpu({rows, sizes.values()}, at::kFloat);
    turns = head_tasks(starts, sequences, 2 * sizes.key_heads + sizes.value_heads, threads);
    heads = head_tasks(starts, sequences, sizes.value_heads, threads);
  }

  // Arguments of a layer. `mixed`: the results of its first product.
  DeltaArgs args(const DeltaLayer& layer, const DeltaStates& states, const int32_t* starts,
                 const at::Tensor& mixed, const at::Tensor& out, float eps, bool is_bf16) const {
    const DeltaSizes& sizes = layer.sizes;
    const at::Tensor &before = states.before, &matrices = states.matrices;
    return {
        .mixed = mixed.const_data_ptr(),
        .numbers = numbers.const_data_ptr(),
        .mixed_stride = mixed.stride(0),
        .numbers_stride = numbers.stride(0),
        .conv = layer.conv.const_data_ptr<float>(),
        .decay = layer.decay.const_data_ptr<float>(),
        .bias = layer.bias.const_data_ptr<float>(),
        .norm = layer.norm.const_data_ptr<float>(),
        .eps = eps,
        .is_bf16 = is_bf16,
        .key_heads = int(sizes.key_heads),
        .value_heads = int(sizes.value_heads),
        .key_dim = int(sizes.key_dim),
        .value_dim = int(sizes.value_dim),
        .kernel = int(sizes.kernel),
        .before = (char*)before.data_ptr() + layer.place * before.stride(1) * before.itemsize(),
        .states = matrices.data_ptr<float>() + layer.place * matrices.stride(1),
        .before_stride = before.stride(0),
        .state_stride = matrices.stride(0),
        .slots = states.slots.const_data_ptr<int64_t>(),
        .query_start = starts,
        .kept = states.kept.const_data_ptr<int64_t>(),
        .is_new = states.is_new.const_data_ptr<int64_t>(),
        .turned = turned.data_ptr<float>(),
        .summed = summed.data_ptr<float>(),
        .out = out.data_ptr(),
        .out_stride = out.stride(0),
    };
  }
};

}  // namespace penstock
