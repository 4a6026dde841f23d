// All layers of a decoder in one parallel region: torch.classes.penstock.Decoder. It uses the
// kernels of the single operators, so results have the same bits. It saves waking threads some nine
// times per layer, and Python between the operators.
#pragma once
#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "decoder/decoder_parts.h"

namespace penstock {

// at::empty without the dispatcher, which takes tens of microseconds after a step has gone through
// the caches.
inline at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type) {
  return at::detail::empty_cpu(sizes, type);
}

// The parts of a decoder from tensors and sizes by the names that models/fused.py gives them.
Layer layer_of(const Tensors& tensors, const Sizes& sizes, const ModelSizes& model,
               const Factors& factors, int64_t number);
ModelSizes sizes_of(const Sizes& sizes);
Factors factors_of(const c10::Dict<std::string, double>& factors);

struct Decoder : torch::CustomClassHolder, ModelSizes, Factors {
  std::vector<Layer> layers;
  at::Tensor final_norm;
  std::optional<JointNorms> joint_norms;
  std::optional<TokenInputs> token_inputs;
  Linear head;
  int64_t num_turns = 0, num_keys = 0;
  // Most and fewest inputs of a linear layer, most outputs of qkv, and most numbers of all heads.
  int64_t widest = 0, narrowest = INT64_MAX, widest_qkv = 0, widest_heads = 0, widest_inner = 0;
  // Key/value heads and dims of a head, of the layers that have the same: of the first layer of a
  // kind the number.
  std::vector<size_t> kinds;
  std::vector<size_t> kind_of;  // by layer

  // Of rows that are quantised, and of those by group; and those of the dtype of x.
  bool is_quantised = false;
  // Sums of a group; 0: no rows are quantised by group.
  int64_t sums = 0;
  std::optional<Format> dense;

  // `layers`: tensors of each by name; `own`: numbers of each: `window`, 0 for none, `turn`, the
  // number of its rotary embedding, and the formats of its products; `end`: the final norm and the
  // head.
  Decoder(const Sizes& sizes, const c10::Dict<std::string, double>& factors,
          const std::vector<Tensors>& layers, const std::vector<Sizes>& own, const Tensors& end)
      : Decoder(sizes_of(sizes), factors_of(factors), layers, own,
                Named<at::Tensor>("the decoder's end", end)) {}

  Buffers buffers(int64_t rows, int64_t threads, at::ScalarType type, int64_t ranks) const {
    // The most inputs that any format pads to.
    const int64_t padded = granules_of(Format::INT4, widest) * granule_inputs(Format::INT4),
                  size = at::elementSize(type);
    const auto inputs = [&](int64_t count, int64_t width) {
      return empty({count, spread(width * size) / size}, type);
    };
    const int64_t groups = sums > 0 ? padded / GROUP : 1;
    const int64_t quantised = !is_quantised ? 0 : is_small(rows, narrowest) ? threads * rows : rows;
    const int64_t own = is_small(rows, hidden) ? threads : 1;
    const int64_t dim = token_inputs ? token_dim() : 0;
    return {
        .normed = inputs(own * rows, first_inputs()),
        .residual = empty({own - 1, rows, hidden}, at::kFloat),
        .qkv = empty({rows, widest_qkv}, type),
        // Compressed keys have queries of their own.
        .q = empty({rows, latent ? 0 : widest_heads}, type),
        .attended = inputs(rows, widest_heads),
        .inner = inputs(rows, widest_inner),
        .added = empty({rows, hidden}, at::kFloat),
        .bytes = empty({quantised * spread(padded)}, at::kChar),
        .scales = empty({quantised * groups}, at::kFloat),
        .sums = empty({quantised * groups * std::max<int64_t>(1, sums)}, at::kInt),
        .shrunk = empty({ranks == 0 ? 0 : rows, shrunk_stride(ranks)}, type),
        .tokens = empty({rows, dim * int64_t(layers.size())}, type),
        .gates = empty({rows, dim}, type),
        .gated = inputs(is_small(rows, std::max<int64_t>(1, dim)) ? threads * rows : rows, dim),
    };
  }

  // Heads of the layers that keep a state; none: there are no such layers.
  std::optional<DeltaSizes> delta;
  int64_t most_place = 0;  // of these layers
  // Heads of the layers with compressed keys and values; none: there are no such layers.
  std::optional<LatentSizes> latent;
  // Number of the first layer with experts; none: there are no such layers.
  std::optional<size_t> mixed;

  // Of a layer, with a share for each thread.
  int64_t shared_stages() const {
    return SHARED_STAGES + (latent ? LATENT_STAGES : 0) + (mixed ? MIXTURE_STAGES : 0);
  }

  // Numbers of a token's vector for one layer.
  int64_t token_dim() const { return token_inputs->norm.numel(); }

  typedef std::optional<c10::intrusive_ptr<AdapterBatch>> OptionalAdapters;

  // (T, hidden) after the final norm. `hidden_rows` may be overwritten; `cos` and `sin` are looked
  // up by `positions`. With `draws` also each row's id of the highest logit, the first of equals,
  // -1 if that is NaN or infinite; else an empty tensor. `wanted` (R), ascending: results of these
  // rows only, R instead of T. `adapters`: of the rows; none: no row has one. `places`: see Pass;
  // where there are several views, `slots` (views, T) and `tables` (views, S, blocks) have them
  // all. `taps`: filled; rows after the final norm can only be tapped where all are wanted.
  // `table_rows` (T, layers * dim): of tokens' vectors, where layers have them. `states`: see
  // DeltaStates, where layers keep some.
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor hidden_rows, std::vector<at::Tensor> cos,
                                             std::vector<at::Tensor> sin, at::Tensor positions,
                                             at::Tensor slots, at::Tensor tables,
                                             at::Tensor query_start, at::Tensor context_lens,
                                             std::optional<at::Tensor> wanted, bool draws,
                                             at::Tensor pool, std::optional<at::Tensor> scales,
                                             OptionalAdapters adapters, std::vector<int64_t> places,
                                             Taps taps, std::optional<at::Tensor> table_rows,
                                             std::optional<std::vector<at::Tensor>> states) const;

  // The ids that `forward` draws in a step of one token of each sequence: tokens `ids`, sequences
  // of `lengths` including them. It has few arguments: caches are cold when a step begins, and each
  // of torch's operators then takes tens of microseconds. Not where layers keep states. `embedding`
  // (vocabulary, hidden); none: the rows of the head. `token_table` (vocabulary, layers * dim): of
  // tokens' vectors. `tables`, `places` and `taps` are as in `forward`.
  std::vector<int64_t> decode(std::vector<int64_t> ids, std::vector<int64_t> lengths,
                              at::Tensor tables, std::optional<at::Tensor> embedding,
                              std::vector<at::Tensor> cos, std::vector<at::Tensor> sin,
                              at::Tensor pool, std::optional<at::Tensor> scales,
                              OptionalAdapters adapters, std::vector<int64_t> places, Taps taps,
                              std::optional<at::Tensor> token_table) const;

  // One pass of a draft head: what it gives for the last row of each sequence (S, hidden), and the
  // scores (S, vocab) of it in float. `embeds` and `states` (T, hidden) are its rows, the others as
  // in `forward`.
  std::tuple<at::Tensor, at::Tensor> draft_step(at::Tensor embeds, at::Tensor states,
                                                std::vector<at::Tensor> cos,
                                                std::vector<at::Tensor> sin, at::Tensor positions,
                                                at::Tensor slots, at::Tensor tables,
                                                at::Tensor query_start, at::Tensor context_lens,
                                                at::Tensor pool,
                                                std::optional<at::Tensor> scales) const;

  // The drafts of each sequence by the highest scores of a draft head, row by row: the first pass
  // is as `draft_step`, and a further one has a row for each sequence that goes on, of its last
  // draft and of what the pass before gave for it. Drafts are read from `embedding`, or from the
  // rows of the head, of `served`. A chain of sequence s ends after `counts[s]` drafts, before one
  // of `ends[s]`, after one of less probability than `least[s]`, or where a score is not a
  // number. `served_ids`: the ids of the scores; none: they are the same. `tables` have the blocks
  // of all rows that there may be.
  std::vector<std::vector<int64_t>> draft_chain(
      at::Tensor embeds, at::Tensor states, std::vector<at::Tensor> cos,
      std::vector<at::Tensor> sin, at::Tensor positions, at::Tensor slots, at::Tensor tables,
      at::Tensor query_start, at::Tensor context_lens, at::Tensor pool,
      std::optional<at::Tensor> scales, c10::intrusive_ptr<Decoder> served,
      std::optional<at::Tensor> embedding, std::optional<at::Tensor> served_ids,
      std::vector<int64_t> counts, std::vector<double> least,
      std::vector<std::vector<int64_t>> ends) const;

 private:
  Decoder(const ModelSizes& sizes, const Factors& factors, const std::vector<Tensors>& named,
          const std::vector<Sizes>& own, Named<at::Tensor> end)
      : ModelSizes(sizes),
        Factors(factors),
        final_norm(end.take("norm")),
        head(end, "head", head_format, hidden, vocab, Gate::NONE) {
    if (joint != Joint::NOT)
      joint_norms.emplace(JointNorms{end.take("embed_norm"), end.take("state_norm")});
    if (token_format)
      token_inputs.emplace(TokenInputs{
          Linear(end, "token_product", *token_format, hidden,
                 end.peek("token_norm").numel() * int64_t(named.size()), Gate::NONE),
          end.take("token_norm"),
      });
    end.check_all_taken();
    TORCH_CHECK(joint == Joint::NOT || named.size() == 1, "a draft head has one layer");
    for (const at::Tensor* one :
         {joint_norms ? &joint_norms->embed : nullptr, joint_norms ? &joint_norms->state : nullptr})
      TORCH_CHECK(one == nullptr || (one->numel() == hidden && one->is_contiguous() &&
                                     one->scalar_type() == final_norm.scalar_type()),
                  "a norm of a draft head has the wrong size, or another dtype");
    TORCH_CHECK(!named.empty() && named.size() == own.size(), "numbers for every layer");
    take(head);
    for (size_t i = 0; i < named.size(); ++i) {
      const Layer layer = layer_of(named[i], own[i], sizes, factors, i);
      TORCH_CHECK(layer.turn >= 0 && layer.window >= 0);
      if (layer.delta) take_delta(*layer.delta);
      num_turns = std::max(num_turns, layer.turn + 1);
      TORCH_CHECK(
          layer.delta || (layer.parts == 1 ? layer.keys < num_keys : layer.keys == num_keys),
          "a layer reads keys that no earlier layer has");
      num_keys += !layer.delta && layer.parts > 1;
      for (const Linear* one : {&layer.qkv, &layer.output}) take(*one);
      if (layer.latent) {
        TORCH_CHECK(layer.num_kv_heads == 1 && layer.head_dim == layer.latent->sizes.row_dim(),
                    "compressed keys are one head, as wide as a row");
        take_latent(*layer.latent);
      }
      if (layer.mlp) take_mlp(*layer.mlp);
      if (layer.mixture) take_mixture(*layer.mixture, i);
      TORCH_CHECK(layer.token_gate.has_value() == token_inputs.has_value(),
                  "tokens have vectors for all layers, or for none");
      if (layer.token_gate)
        for (const Linear* one : {&layer.token_gate->gate, &layer.token_gate->out}) take(*one);
      widest_qkv = std::max(widest_qkv, layer.qkv.width);
      widest_heads = std::max(widest_heads, layer.output.inputs);
      take_kind(layer);
      layers.push_back(layer);
    }
    if (token_inputs) {
      take(token_inputs->product);
      TORCH_CHECK(token_inputs->norm.scalar_type() == at::kFloat &&
                      token_inputs->norm.is_contiguous() &&
                      token_dim() == layers[0].token_gate->out.inputs,
                  "the norm of tokens' vectors has the wrong size, or is not float");
    }
    for (const Layer& layer : layers)
      for (const auto* norm :
           {&layer.input_norm, &layer.attention_out_norm, &layer.post_attention_norm,
            &layer.mlp_out_norm, &layer.last_norm(), &layer.q_norm, &layer.k_norm})
        TORCH_CHECK(!*norm || (*norm)->scalar_type() == final_norm.scalar_type(),
                    "all norms must have one dtype");
  }

  void take_delta(const DeltaLayer& layer) {
    layer.check();
    TORCH_CHECK(!delta || *delta == layer.sizes, "layers that keep states have the same heads");
    delta = layer.sizes;
    most_place = std::max(most_place, layer.place);
    take(layer.numbers);
  }

  void take_latent(const LatentLayer& layer) {
    TORCH_CHECK(!latent || *latent == layer.sizes,
                "compressed keys and values have the same sizes");
    latent = layer.sizes;
    take(layer.row);
    if (layer.queries) take(layer.queries->up);
    layer.check();
    TORCH_CHECK(!dense || *dense == layer.format, "weights of two dtypes");
    dense = layer.format;
    for (const at::Tensor* norm : {&layer.norm, layer.queries ? &layer.queries->norm : &layer.norm})
      TORCH_CHECK(norm->scalar_type() == final_norm.scalar_type(), "all norms must have one dtype");
  }

  void take_mlp(const Mlp& mlp) {
    take(mlp.gated), take(mlp.down);
    widest_inner = std::max(widest_inner, mlp.down.inputs);
  }

  void take_mixture(const Mixture& mixture, size_t number) {
    mixture.check();
    if (mixture.shared) take_mlp(*mixture.shared);
    take_format(mixture.experts[0].gated);
    // A router may read floats beside rows in bfloat16.
    if (mixture.gate) take_format(*mixture.gate);
    TORCH_CHECK(!dense || *dense == Format::BF16 || mixture.router.format == Format::F32,
                "a router of another dtype");
    if (!mixed) mixed = number;
    const Mixture& like = number == *mixed ? mixture : *layers[*mixed].mixture;
    TORCH_CHECK(mixture.format == like.format && mixture.inner == like.inner &&
                    mixture.rule.per_row == like.rule.per_row &&
                    mixture.experts.size() == like.experts.size() &&
                    mixture.shared.has_value() == like.shared.has_value() &&
                    mixture.gate.has_value() == like.gate.has_value() &&
                    mixture.router.format == like.router.format,
                "mixtures of experts have the same sizes");
  }

  void take_kind(const Layer& layer) {
    if (layer.delta) {
      kind_of.push_back(0);  // it has no heads that attend
      return;
    }
    const auto same = [&](size_t other) {
      return layers[other].num_kv_heads == layer.num_kv_heads &&
             layers[other].head_dim == layer.head_dim;
    };
    const auto found = std::find_if(kinds.begin(), kinds.end(), same);
    kind_of.push_back(found - kinds.begin());
    if (found == kinds.end()) kinds.push_back(layers.size());
  }

  void take(const Linear& layer) {
    widest = std::max(widest, layer.inputs), narrowest = std::min(narrowest, layer.inputs);
    take_format(layer);
  }

  void take_format(const Linear& layer) {
    is_quantised |= layer.format >= Format::INT8;
    sums = std::max(sums, is_grouped(layer.format) ? sums_of_group(layer.format) : 0);
    if (layer.format >= Format::INT8) return;
    TORCH_CHECK(!dense || *dense == layer.format, "weights of two dtypes");
    dense = layer.format;
  }

  void check(const at::Tensor& hidden_rows, const std::vector<at::Tensor>& cos,
             const std::vector<at::Tensor>& sin, const at::Tensor& pool,
             const std::optional<at::Tensor>& scales, const std::vector<int64_t>& places,
             int64_t views) const;
  void check(const AdapterBatch& adapters, int64_t rows, bool bf16) const;
  void check(const Taps& taps, const at::Tensor& hidden_rows, bool all_wanted) const;
  void check_table_rows(const std::optional<at::Tensor>& rows, const at::Tensor& hidden_rows) const;
  PickedRows picked_rows(const Pass& pass) const;
  // Makes tokens' vectors.
  void make_tokens(Step& step, Walk& walk) const;
  // What a layer adds for a token's vector, and before it adds what its MLP gave.
  void add_token(Step& step, Walk& walk, size_t i, const Linear* then) const;
  std::pair<at::Tensor, std::vector<int64_t>> compute(const Pass& pass) const;
  // Embeddings times their scale, in place.
  at::Tensor scaled(at::Tensor rows) const;
  // `type`: of the rows.
  at::Tensor embedded(const std::vector<int64_t>& ids, const std::optional<at::Tensor>& embedding,
                      at::ScalarType type) const;
  Inputs join(Step& step, Walk& walk) const;
  void score(Step& step, Walk& walk) const;
  std::tuple<at::Tensor, at::Tensor> draft_pass(const DraftRows& rows) const;
  void tap(const Step& step, const Walk& walk, int64_t number, Inputs rows) const;
  void pick(Step& step, Walk& walk) const;
  void finish(Step& step, Walk& walk) const;
  static std::vector<int64_t> argmax_ids(const Step& step, int64_t threads);
  void run(Step& step, Walk& walk, size_t i, const AttentionArgs& attention, const RopeArgs& rope,
           const DeltaArgs& states) const;
  // What a layer has between its first norm and its second product. All threads have met at the
  // end.
  void attend(Step& step, Walk& walk, size_t i, Inputs normed, const AttentionArgs& attention,
              const RopeArgs& rope) const;
  void apply_gates(Step& step, Walk& walk, const Layer& layer) const;
  void attend_latent(Step& step, Walk& walk, size_t i, Inputs normed,
                     const AttentionArgs& attention, const RopeArgs& rope) const;
  Inputs normed_queries(Step& step, Walk& walk, const LatentQueries& queries) const;
  // The MLP of a layer, or its experts, and the norm before: `then` comes after it. All threads
  // have met at the end.
  void add_mlp(Step& step, Walk& walk, size_t i, const Linear* then) const;
  void mix(Step& step, Walk& walk, size_t i, Inputs normed, const Linear* then) const;
  // Rows that a router reads: in float where its weight is.
  Inputs routed(Step& step, Walk& walk, const Linear& router, Inputs rows) const;
  void take_states(Step& step, Walk& walk, size_t i, Inputs normed, const DeltaArgs& args) const;

  // True if one thread would do all of these few rows of `width` elements: then every thread does
  // them for itself, and none waits.
  static bool is_small(int64_t rows, int64_t width) { return rows <= grain(width); }

  template <typename F>
  void over_rows(Step& step, Walk& walk, int64_t width, F work) const {
    const int64_t each = grain(width), parts = (walk.rows + each - 1) / each;
    auto& next = step.counters[walk.stage++];
    for (int64_t part; (part = next.fetch_add(1)) < parts;)
      work(part * each, std::min(walk.rows, (part + 1) * each));
    step.barrier.wait(walk.prefetch);
  }

  // Runs work that every thread does for itself, while the memory fetches the next weight.
  template <typename F>
  static void by_row(Walk& walk, F work) {
    for (int64_t row = 0; row < walk.rows; ++row) {
      walk.prefetch.fetch(PREFETCH_LINES_A_ROW);
      work(row);
    }
  }

  // `from`: rows of a linear layer's inputs. The rows to multiply are then in `args`.
  void quantise(Step& step, Walk& walk, const Linear& layer, Inputs from, bool bf16,
                LinearArgs& args) const {
    Buffers& b = step.buffers;
    const bool small = is_small(step.rows, layer.inputs);
    const int64_t padded = layer.granules * granule_inputs(layer.format), stride = spread(padded);
    const int64_t groups = is_grouped(layer.format) ? padded / GROUP : 1,
                  each = sums_of_group(layer.format), own = small ? walk.thread * step.rows : 0;
    const QuantizeArgs to{
        .x = from.rows,
        .width = layer.inputs,
        .x_stride = from.stride,
        .is_bf16 = bf16,
        .grouped = is_grouped(layer.format),
        .sums = each,
        .rotation = layer.rotation,
        .out = (int8_t*)b.bytes.data_ptr() + own * stride,
        .padded = padded,
        .stride = stride,
        .scale = b.scales.data_ptr<float>() + own * groups,
        .sum = b.sums.data_ptr<int32_t>() + own * groups * each,
    };
    if (small)
      by_row(walk, [&](int64_t row) { KERNEL(quantize)(to, row, row + 1); });
    else
      over_rows(step, walk, layer.inputs,
                [&](int64_t first, int64_t last) { KERNEL(quantize)(to, first, last); });
    args.x = to.out, args.x_stride = stride / 4, args.row_scale = to.scale, args.row_sum = to.sum;
  }

  static LinearArgs linear_args(const Linear& layer, Inputs x) {
    return {
        .format = layer.format,
        .x = x.rows,
        .x_stride = x.stride / granule_inputs(layer.format),
        .weight = (const char*)layer.weight.const_data_ptr(),
        .granules = layer.granules,
        .bias = data<float>(layer.bias),
        .row_scale = nullptr,
        .column_scale = data<char>(layer.scale),
        .scale_is_bytes = layer.has_byte_scales(),
        .column_sum = data<int32_t>(layer.sum),
        .column_offset = data<float>(layer.offset),
        .row_sum = nullptr,
        .out = nullptr,
        .width = layer.width,
        .out_stride = 0,
        .out_bf16 = false,
        .gate = layer.gate,
        .is_compact = layer.is_compact,
    };
  }

  // `then`: the next layer; this many bytes of its weight are prefetched. The caller waits.
  void linear(Step& step, Walk& walk, const Linear& layer, int64_t site, Inputs x, at::Tensor& out,
              const Linear* then, int64_t bytes = PREFETCH_BYTES) const {
    LinearArgs args = linear_args(layer, x);
    args.out = out.data_ptr(), args.out_stride = out.stride(0), args.out_bf16 = is_bf16(out);
    multiply(step, walk, layer, site, x, args);
    walk.prefetch = then == nullptr
                        ? Prefetch{}
                        : beginning(*then, walk.rows, walk.thread, step.barrier.threads(), bytes);
  }

  void multiply(Step& step, Walk& walk, const Linear& layer, int64_t site, Inputs x,
                LinearArgs& args) const {
    AdapterRows adapted;
    if (site != NO_SITE && step.adapters != nullptr && step.adapters->ranks[site] > 0) {
      adapted = shrink(step, walk, layer, site, x);
      args.adapters = &adapted;
    }
    if (layer.format >= Format::INT8) quantise(step, walk, layer, x, step.is_bf16, args);
    const int64_t threads = step.barrier.threads();
    multiply_share(args, LinearShare(args, walk.rows, layer.panels, threads),
                   &step.progress[walk.shared++ * threads], walk.thread);
  }

  // The rows that have an adapter, times its A: all threads have to meet before these are used.
  AdapterRows shrink(Step& step, Walk& walk, const Linear& layer, int64_t site, Inputs x) const {
    at::Tensor& to = step.buffers.shrunk;
    shrink_share(*step.adapters, *walk.adapted, site, x.rows, x.stride, layer.inputs, to.data_ptr(),
                 to.stride(0), step.counters[walk.stage++]);
    step.barrier.wait(walk.prefetch);
    return {
        .adapter = walk.adapted->adapter.data(),
        .matrices = step.adapters->matrices.data() + site * step.adapters->adapters.size(),
        .is_bf16 = step.is_bf16,
        .shrunk = to.const_data_ptr(),
        .stride = to.stride(0) * int64_t(to.itemsize()) / 4,
    };
  }

  // The beginning of a thread's share, `bytes` at most.
  static Prefetch beginning(const Linear& layer, int64_t rows, int64_t thread, int64_t threads,
                            int64_t bytes) {
    LinearArgs args{};
    args.format = layer.format;
    args.weight = (const char*)layer.weight.const_data_ptr();
    args.granules = layer.granules;
    args.is_compact = layer.is_compact;
    const LinearShare share(args, rows, layer.panels, threads);
    return {share.beginning(args, thread), std::min(bytes, share.bytes_of(args, thread))};
  }

  // Norms in another dtype than the rows are float, and round once.
  bool rounds_once(const at::Tensor& rows) const {
    return final_norm.scalar_type() != rows.scalar_type();
  }

  void* residual_of(const Step& step, const Walk& walk) const {
    const bool is_own = walk.thread > 0 && is_small(step.rows, hidden);
    return is_own
               ? (char*)step.buffers.residual.data_ptr() + (walk.thread - 1) * step.hidden.nbytes()
               : step.hidden.data_ptr();
  }

  // The norm of `hidden` plus the addend, which has a norm of its own in some models, times
  // `factor`; with few rows, of a copy for each thread.
  Inputs norm(Step& step, Walk& walk, const std::optional<at::Tensor>& weight, bool has_added,
              const std::optional<at::Tensor>& added_norm, float factor = 1.0f) const {
    Buffers& b = step.buffers;
    const bool small = is_small(step.rows, hidden);
    const int64_t own = small ? walk.thread : 0, stride = b.normed.stride(0);
    const NormArgs args{
        .hidden = residual_of(step, walk),
        .x = has_added ? b.added.const_data_ptr() : nullptr,
        .weight = data<char>(weight),
        .out = (char*)b.normed.data_ptr() + own * step.rows * stride * b.normed.itemsize(),
        .width = hidden,
        .out_stride = stride,
        .eps = eps,
        .is_bf16 = step.is_bf16,
        .rounds_once = step.rounds_once,
        .x_weight = data<char>(added_norm),
        .x_factor = residual_scale,
        .is_float_stream = step.is_bf16,
        .factor = factor,
    };
    if (small)
      by_row(walk, [&](int64_t row) { KERNEL(add_norm)(args, row, row + 1); });
    else
      over_rows(step, walk, hidden,
                [&](int64_t first, int64_t last) { KERNEL(add_norm)(args, first, last); });
    return {args.out, stride};
  }
};

}  // namespace penstock
