// A decoder's parts, and the state of one of its steps (ops_decoder.cpp).
#pragma once
#include <torch/custom_class.h>

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/attention_work.h"
#include "decoder/rows.h"
#include "linear/adapters.h"
#include "linear/linear_work.h"
#include "linear/packed_rows.h"
#include "util/barrier.h"

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

// The residual stream of a draft head begins with the state, as it is or after its norm.
enum class Joint : int64_t { NOT, STATE, NORMED_STATE };
// The numbers of a model. `inner`: of the gated product.
struct ModelSizes {
  Gate gate;
  int64_t hidden, inner, num_heads, num_kv_heads, head_dim;
  Format head_format;
  int64_t vocab;
  // NOT: a model. Else a draft head: its one layer reads two rows side by side (JointRows).
  Joint joint = Joint::NOT;

  int64_t first_inputs() const { return joint == Joint::NOT ? hidden : 2 * hidden; }
};

// Norms of the two rows that a draft head's layer reads: the embedding of the next token, and a
// hidden state.
struct JointNorms {
  at::Tensor embed, state;
};
// The rows, (T, hidden) each, and the scores (R, vocab) in float to fill.
struct JointRows {
  at::Tensor embeds, states, scores;
};

struct Factors {
  float eps, attention_scale;
  float softcap;  // 0: none
  float embedding_scale;
  float residual_scale;  // of all that a layer adds to the stream
};

struct Layer {
  // The first and third come before attention and MLP; the others norm what these add to the
  // stream. A family has some of them.
  std::optional<at::Tensor> input_norm, attention_out_norm, post_attention_norm, mlp_out_norm;
  std::optional<at::Tensor> q_norm, k_norm, sinks;
  Linear qkv, output, gated, down;
  int64_t window, turn;
};
constexpr int64_t LINEARS = 4;
// Stages of a layer: norms, rope, and the rows that linear layers quantise and that adapters shrink
// first, where one counter shares them among all threads; and linear layers and attention, which
// have a share for each thread.
constexpr int64_t MOST_STAGES = 2 + 1 + 2 * LINEARS;
constexpr int64_t SHARED_STAGES = LINEARS + 1;
constexpr int64_t LAST_STAGES = 3;
// Sites of a layer (adapters.h), and among them its linear layers.
enum Site : int64_t { QKV, OUTPUT, GATED, DOWN };
// Bytes of the next linear layer's weight that a waiting thread fetches.
constexpr int64_t PREFETCH_BYTES = 64 << 10;
// Lines of it that are fetched before a row of a norm or of a quantisation.
constexpr int PREFETCH_LINES_A_ROW = 128;
// Bytes of the output projection's weight that are fetched during attention.
constexpr int64_t PREFETCH_DURING_ATTENTION = 256 << 10;

// Memory for intermediate results of a forward pass. Every thread may have its own `normed`,
// `residual` and quantised rows.
struct Buffers {
  at::Tensor normed, residual, qkv, q, attended, inner, added, bytes, scales, sums, shrunk;
};

// Rows of a linear layer's inputs.
struct Inputs {
  void* rows;
  int64_t stride;  // in elements
};
inline Inputs inputs_of(const at::Tensor& x) { return {x.data_ptr(), x.stride(0)}; }

// Layers with a residual stream that is wanted before their first norm, and memory for it: (rows,
// tapped layers, hidden) of the rows' dtype. The number of layers stands for all rows after the
// final norm.
typedef std::optional<std::tuple<std::vector<int64_t>, at::Tensor>> Taps;

// State of one forward pass: the arguments of Decoder::forward, in place. The vectors and tensors
// live longer.
struct Pass {
  at::Tensor hidden;
  // Of every rotary embedding that the model has.
  const std::vector<at::Tensor>&cos, &sin;
  at::Tensor pool;
  std::optional<at::Tensor> scales;
  int64_t rows, sequences;
  const int64_t *positions, *slots;
  const int32_t* tables;
  int64_t table_stride;
  // The view of each layer, and its place in the pool: a pair each. A view has slots and tables of
  // its own. Empty: there is one view, and layers are in order.
  const std::vector<int64_t>& places;
  int64_t slots_of_view, tables_of_view;
  const int32_t *query_start, *context_lens;
  const int64_t* wanted;
  int64_t num_wanted;
  bool draws;
  // Null: no row has an adapter.
  const AdapterBatch* adapters;
  const Taps& taps;
  // Null: it is no draft head.
  const JointRows* joint = nullptr;

  int64_t view(size_t layer) const { return places.empty() ? 0 : places[2 * layer]; }
  int64_t place(size_t layer) const {
    return places.empty() ? int64_t(layer) : places[2 * layer + 1];
  }
  const int64_t* slots_at(size_t layer) const { return slots + view(layer) * slots_of_view; }
  const int32_t* tables_at(size_t layer) const { return tables + view(layer) * tables_of_view; }
};

// Arguments of one pass of a draft head: see Decoder::draft_step.
struct DraftRows {
  at::Tensor embeds, states;
  const std::vector<at::Tensor>&cos, &sin;
  const at::Tensor& pool;
  const std::optional<at::Tensor>& scales;
  int64_t sequences;
  const int64_t *positions, *slots;
  const int32_t* tables;
  int64_t table_stride;
  const int32_t *query_start, *context_lens;
};

struct Step {
  Barrier barrier;
  std::vector<std::atomic<int64_t>> counters;
  // Progress of every shared stage and thread.
  std::vector<Progress> progress;
  Buffers buffers;
  // The residual stream, which is float whatever the rows are: with some sixty sums, rounding each
  // would be most of bfloat16's error.
  at::Tensor hidden;
  at::Tensor out;
  // Of the rows between the products, and of norms in float beside them.
  bool is_bf16, rounds_once;
  int64_t rows;
  // The rows of `rows` with a wanted result: the others end with the last layer's keys and values.
  // Ascending; null: all.
  const int64_t* wanted;
  int64_t num_wanted;
  std::vector<AttentionTask> tasks;
  // In the last layer: those of rows that are wanted.
  std::vector<AttentionTask> last_tasks;
  bool writes_alone;
  // By thread, row and column of a panel, as LinearArgs has them; empty where ids are not asked
  // for.
  at::Tensor highest, highest_panel;
  // Null: no row has an adapter. `wanted_adapters`: of the wanted rows alone.
  const AdapterBatch* adapters;
  std::optional<AdaptedRows> wanted_adapters;
  const Taps& taps;
  const JointRows* joint;
};

// Place of a thread: all go through the same stages.
struct Walk {
  int64_t thread, rows;
  // Adapters of the rows.
  const AdaptedRows* adapted;
  int64_t stage = 0, shared = 0;
  Prefetch prefetch;
};

}  // namespace penstock
