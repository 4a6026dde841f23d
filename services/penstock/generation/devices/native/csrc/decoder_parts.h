// What a decoder consists of, and what one of its steps has (ops_decoder.cpp).
#pragma once
#include <torch/custom_class.h>

#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include "attention_work.h"
#include "linear_work.h"
#include "team.h"

namespace penstock {

using Tensors = c10::List<std::optional<at::Tensor>>;

template <typename T>
T* data(const std::optional<at::Tensor>& tensor) {
  return tensor ? (T*)tensor->const_data_ptr() : nullptr;
}

struct Linear {
  Format format;
  at::Tensor weight;
  std::optional<at::Tensor> bias, scale, sum;
  int64_t inputs, width, granules, panels;
  bool gated;

  Linear(const Tensors& from, int64_t at, Format format, int64_t inputs, int64_t width, bool gated)
      : format(format), weight(*from.get(at)), bias(from.get(at + 1)), scale(from.get(at + 2)), sum(from.get(at + 3)), inputs(inputs), width(width),
        granules(granules_of(format, inputs)), panels(weight.numel() / (granules * PANEL * 4)), gated(gated) {
    TORCH_CHECK(panels > 0 && panels * granules * PANEL * 4 == weight.numel() && width <= panels * (gated ? PANEL / 2 : PANEL), "a weight has the wrong size");
    // Of every output, padded ones included; int4 has a scale for each group of inputs.
    const int64_t columns = panels * PANEL, scales = format == Format::INT4 ? columns * (granules * 8 / GROUP) : columns;
    TORCH_CHECK(!bias || bias->numel() >= columns, "a bias is too short");
    TORCH_CHECK(format < Format::INT8 || (scale && scale->numel() >= scales), "the scales of a weight are too few");
    TORCH_CHECK(format != Format::INT8 || (sum && sum->numel() >= columns), "the sums of a weight are too few");
  }
};

struct Layer {
  at::Tensor input_norm, post_norm;
  std::optional<at::Tensor> q_norm, k_norm;
  Linear qkv, output, gated, down;
  int64_t window;
};
constexpr int64_t LINEARS = 4;
constexpr int64_t TENSORS_OF_A_LAYER = 4 + LINEARS * 4;
// The final norm's weight and the head's.
constexpr int64_t LAST_TENSORS = 1 + 4;
// Norms, rope, and what linear layers quantise first, where they are shared: by a counter for all threads. By a share for each: linear layers, attention.
constexpr int64_t MOST_STAGES = 2 + 1 + LINEARS;
constexpr int64_t SHARED_STAGES = LINEARS + 1;
constexpr int64_t LAST_STAGES = 2;
// Of the next linear layer's weight, fetched by who waits.
constexpr int64_t AHEAD_BYTES = 64 << 10;
// Of it, before a row of a norm or of what is quantised.
constexpr int LINES_A_ROW = 128;
// Of the output projection's, fetched during attention.
constexpr int64_t AHEAD_OF_ATTENTION = 256 << 10;

// What a forward pass writes on its way. Of `normed`, `residual` and what is quantised every thread may have its own.
struct Buffers {
  at::Tensor normed, residual, qkv, q, attended, inner, added, bytes, scales, sums;
};

// Rows of a linear layer's inputs.
struct Inputs {
  void* rows;
  int64_t stride;  // in elements
};
inline Inputs inputs_of(const at::Tensor& x) { return {x.data_ptr(), x.stride(0)}; }

// What one forward pass is about: the arguments of Decoder::forward, where they lie. The vectors and tensors live longer.
struct Pass {
  at::Tensor hidden, cos, sin, pool;
  std::optional<at::Tensor> scales;
  int64_t rows, sequences;
  const int64_t *positions, *slots;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t *query_start, *context_lens;
  const int64_t* wanted;
  int64_t num_wanted;
  bool draws;
};

struct Step {
  Team team;
  std::vector<std::atomic<int64_t>> counters;
  // Of every shared stage and thread.
  std::vector<Progress> progress;
  Buffers buffers;
  at::Tensor hidden, out;
  int64_t rows;
  // Of `rows`, those that somebody wants: the others end with the last layer's keys and values. Ascending; null: all.
  const int64_t* wanted;
  int64_t num_wanted;
  std::vector<AttentionTask> tasks;
  // In the last layer: those of rows that are wanted.
  std::vector<AttentionTask> last_tasks;
  bool writes_alone;
  // Of every thread, row and column of a panel, as LinearArgs has them; empty where nobody asks.
  at::Tensor highest, highest_panel;
};

// Where a thread is: all go through the same stages.
struct Walk {
  int64_t thread, rows;
  int64_t stage = 0, shared = 0;
  Ahead ahead;
};

}  // namespace penstock
