// A decoder's parts, and the state of one of its steps (ops_decoder.cpp).
#pragma once
#include <atomic>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include "attention/attention_work.h"
#include "decoder/delta_layer.h"
#include "decoder/latent_layer.h"
#include "decoder/mixture.h"
#include "decoder/rows.h"
#include "decoder/token_inputs.h"
#include "linear/adapters.h"
#include "util/barrier.h"

namespace penstock {

// The residual stream of a draft head begins with the state, as it is or after its norm.
enum class Joint : int64_t { NOT, STATE, NORMED_STATE };
// The numbers of a model. `inner`: of the gated product. Layers may have others (Layer).
struct ModelSizes {
  Gate gate;
  int64_t hidden, inner, num_heads, num_kv_heads, head_dim;
  Format head_format;
  int64_t vocab;
  // Of the product that makes tokens' vectors for each layer; none: they have none.
  std::optional<Format> token_format;
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
  // Of tokens' vectors: see TokenInputArgs.
  float token_product, token_row, token_sum;
  float latent_eps;  // of the norms of compressed keys and values
  // Of the choice of experts: see ChoiceRule.
  float choice_least, choice_scale;
};

// What a layer does with a token's vector: gates of the stream take its numbers, and what comes of
// it is normed and added.
struct TokenGate {
  Linear gate, out;
  std::optional<at::Tensor> norm;
};

// What makes these vectors (token_inputs.h).
struct TokenInputs {
  Linear product;
  at::Tensor norm;
};

struct Layer {
  // The first and third come before attention and MLP; the others norm what these add to the
  // stream. A family has some of them.
  std::optional<at::Tensor> input_norm, attention_out_norm, post_attention_norm, mlp_out_norm;
  std::optional<at::Tensor> q_norm, k_norm, sinks;
  // The first product of the layer, and that of what its heads read.
  Linear qkv, output;
  // One of both.
  std::optional<Mlp> mlp;
  std::optional<Mixture> mixture;
  std::optional<TokenGate> token_gate;
  // In place of attention; the layer then has no part of what belongs to it.
  std::optional<DeltaLayer> delta;
  // Its attention is over compressed keys and values: `qkv` are queries alone, all or narrow.
  std::optional<LatentLayer> latent;
  int64_t num_kv_heads, head_dim, window, turn;
  // Number, among the layers with keys in the pool, of the one with those that it reads: its own,
  // unless `parts` is 1.
  int64_t keys;
  int parts;  // of qkv: see RopeArgs
  bool norms_values;
  // The rows of qkv begin with gates, a number for each of the heads' results.
  bool has_gates;
  float factor;  // of the stream after it

  int64_t heads_width(int64_t num_heads) const { return num_heads * head_dim; }
  // Of a head of keys.
  int64_t turned_dim() const { return latent ? latent->sizes.turned_dim : head_dim; }
  // What comes after the norm of the MLP.
  const Linear& next_to_output() const { return mlp ? mlp->gated : mixture->router; }
  // Norm of what it adds last to the stream.
  const std::optional<at::Tensor>& last_norm() const {
    return token_gate ? token_gate->norm : mlp_out_norm;
  }
};
constexpr int64_t LINEARS = 4;
// Linear layers of a TokenGate, which have no site.
constexpr int64_t TOKEN_LINEARS = 2;
constexpr int64_t NO_SITE = -1;
// Stages of a layer: norms, rope, gates of heads and of a token's vector, and the rows that linear
// layers quantise and that adapters shrink first, where one counter shares them among all threads;
// and linear layers and attention, which have a share for each thread. A delta rule has two stages
// in place of rope and gates, and one more linear layer in place of attention. Compressed keys and
// values have four more shared stages, two of them linear layers, and one more of the others in
// place of rope; a mixture two more linear layers, and five of the others.
constexpr int64_t LATENT_STAGES = 4, MIXTURE_STAGES = 2;
constexpr int64_t SHARED_STAGES = LINEARS + TOKEN_LINEARS + 1;
constexpr int64_t MOST_STAGES = 3 + 2 + 1 + 2 * (LINEARS + TOKEN_LINEARS + 1) + 2 * 4 + 1 + 5;
// Before the layers, of tokens' vectors; and after them.
constexpr int64_t FIRST_STAGES = 2, LAST_STAGES = 3;
constexpr int64_t OTHER_LINEARS = 2;
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
  // Tokens' vectors, and of a layer: its gates, and what the vectors are with them.
  at::Tensor tokens, gates, gated;
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

// Numbers of a place in the pool.
constexpr int64_t PLACE = 3;

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
  // Of each layer with keys: its view, its place in the pool, and the first number of its keys in
  // slots there. A view has slots and tables of its own. Empty: there is one view, layers are in
  // order, and keys begin with the slots.
  const std::vector<int64_t>& places;
  int64_t slots_of_view, tables_of_view;
  const int32_t *query_start, *context_lens;
  const int64_t* wanted;
  int64_t num_wanted;
  bool draws;
  // Null: no row has an adapter.
  const AdapterBatch* adapters;
  const Taps& taps;
  // Null: no layer keeps a state.
  const DeltaStates* states = nullptr;
  // Null: it is no draft head.
  const JointRows* joint = nullptr;
  // Rows of the table of tokens' vectors, (T, layers * dim) of the rows' dtype.
  std::optional<at::Tensor> table_rows = std::nullopt;

  // `keys`: Layer::keys.
  int64_t view(int64_t keys) const { return places.empty() ? 0 : places[PLACE * keys]; }
  int64_t place(int64_t keys) const { return places.empty() ? keys : places[PLACE * keys + 1]; }
  int64_t column(int64_t keys) const { return places.empty() ? 0 : places[PLACE * keys + 2]; }
  const int64_t* slots_at(int64_t keys) const { return slots + view(keys) * slots_of_view; }
  const int32_t* tables_at(int64_t keys) const { return tables + view(keys) * tables_of_view; }
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

// The wanted rows alone, after the last layer that writes keys of all rows. Where they are the last
// ones of each sequence, later layers compute them as if the others were not there.
struct PickedRows {
  // After this layer.
  size_t layer;
  std::vector<int64_t> positions;
  std::vector<int32_t> query_start;
};

// Attention's tasks in layers with one number of key/value heads, and one width of them.
struct HeadTasks {
  std::vector<AttentionTask> all;
  // Of wanted rows: in the layer that picks them, and in those after it.
  std::vector<AttentionTask> picking, picked;
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
  // Of each kind of heads (Decoder::kinds).
  std::vector<HeadTasks> tasks;
  // None: no layer keeps a state, or has compressed keys and values, or experts.
  std::optional<DeltaStep> delta;
  std::optional<LatentStep> latent;
  std::optional<MixtureStep> mixture;
  // The layer after which only wanted rows go on.
  PickedRows picked;
  bool writes_alone;
  // By thread, row and column of a panel, as LinearArgs has them; empty where ids are not asked
  // for.
  at::Tensor highest, highest_panel;
  // Null: no row has an adapter. `wanted_adapters`: of the wanted rows alone.
  const AdapterBatch* adapters;
  std::optional<AdaptedRows> wanted_adapters;
  const Taps& taps;
  const JointRows* joint;
  // See Pass.
  const at::Tensor embeds;
  const std::optional<at::Tensor> table_rows;

  // True in layers that compute the wanted rows alone.
  bool is_picked(size_t layer) const { return wanted != nullptr && layer > picked.layer; }
  // Row of the pass of each row after a layer's attention; null: its own.
  const int64_t* rows_after(size_t layer) const {
    return wanted != nullptr && layer >= picked.layer ? wanted : nullptr;
  }
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
