// All layers of a decoder in one parallel region: see decoder.h.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <vector>

#include "decoder/decoder.h"
#include "linear/packed_rows.h"

namespace penstock {

// Rows in float: themselves where they are, unless a copy is asked for.
static at::Tensor as_float(const at::Tensor& rows, bool copies) {
  const bool bf16 = is_bf16(rows);
  if (!bf16 && !copies) return rows;
  at::Tensor out = empty(rows.sizes(), at::kFloat);
  if (bf16)
    std::copy_n(rows.const_data_ptr<at::BFloat16>(), rows.numel(), out.data_ptr<float>());
  else
    std::copy_n(rows.const_data_ptr<float>(), rows.numel(), out.data_ptr<float>());
  return out;
}

// Rows of a table, in memory of their own.
static at::Tensor rows_of(const at::Tensor& table, const std::vector<int64_t>& ids) {
  TORCH_CHECK(table.dim() == 2 && table.is_contiguous());
  at::Tensor out = empty({int64_t(ids.size()), table.size(1)}, table.scalar_type());
  const int64_t size = table.size(1) * out.itemsize();
  for (size_t row = 0; row < ids.size(); ++row) {
    TORCH_CHECK_INDEX(ids[row] >= 0 && ids[row] < table.size(0), "index out of range in self");
    std::memcpy((char*)out.data_ptr() + row * size,
                (const char*)table.const_data_ptr() + ids[row] * size, size);
  }
  return out;
}

void Decoder::check(const at::Tensor& hidden_rows, const std::vector<at::Tensor>& cos,
                    const std::vector<at::Tensor>& sin, const at::Tensor& pool,
                    const std::optional<at::Tensor>& scales, const std::vector<int64_t>& places,
                    int64_t views) const {
  TORCH_CHECK(hidden_rows.is_contiguous() && hidden_rows.size(1) == hidden);
  TORCH_CHECK(!dense || is_bf16(hidden_rows) == (*dense == Format::BF16),
              "the rows are not of the weights' dtype");
  // (places for layers, 2, blocks, block size, heads, head dim), and the same without the last for
  // the scales of int8: of as many heads as a slot has.
  TORCH_CHECK(pool.dim() == 6 && pool.is_contiguous() && pool.size(4) == num_kv_heads &&
              pool.size(5) == head_dim && pool.size(1) == (latent ? 1 : 2));
  TORCH_CHECK(places.empty() ? views == 1 && pool.size(0) == num_keys
                             : int64_t(places.size()) >= PLACE * num_keys,
              "the pool is for another number of layers");
  TORCH_CHECK(pool.scalar_type() == (scales ? at::kChar : hidden_rows.scalar_type()));
  TORCH_CHECK(!scales || (scales->is_contiguous() && scales->scalar_type() == at::kFloat &&
                          scales->dim() == 5 && scales->size(4) >= num_kv_heads &&
                          scales->sizes().slice(0, 4) == pool.sizes().slice(0, 4)));
  for (const Layer& layer : layers) {
    if (layer.delta) continue;
    const bool has_place = !places.empty();
    const int64_t* place = has_place ? &places[PLACE * layer.keys] : nullptr;
    const int64_t width = layer.num_kv_heads * layer.head_dim, column = has_place ? place[2] : 0;
    TORCH_CHECK(!has_place ||
                    (place[0] >= 0 && place[0] < views && place[1] >= 0 && place[1] < pool.size(0)),
                "a layer has no place in the pool");
    TORCH_CHECK(column >= 0 && column + width <= pool.stride(3) && column % layer.head_dim == 0 &&
                    (!scales || column / layer.head_dim + layer.num_kv_heads <= scales->size(4)),
                "a layer's keys do not fit their slots");
  }
  TORCH_CHECK(int64_t(cos.size()) >= num_turns && cos.size() == sin.size());
  for (const Layer& layer : layers)
    TORCH_CHECK(layer.delta || 2 * cos[layer.turn].size(-1) == layer.turned_dim(),
                "a rotary embedding is of other heads");
  for (size_t i = 0; i < cos.size(); ++i) {
    TORCH_CHECK(cos[i].is_contiguous() && sin[i].is_contiguous() &&
                cos[i].size(0) == cos[0].size(0) && cos[i].sizes() == sin[i].sizes());
    TORCH_CHECK(cos[i].scalar_type() == hidden_rows.scalar_type() &&
                sin[i].scalar_type() == hidden_rows.scalar_type());
  }
  TORCH_CHECK(!rounds_once(hidden_rows) || final_norm.scalar_type() == at::kFloat,
              "norms must be of the rows' dtype, or float");
}

void Decoder::check(const AdapterBatch& adapters, int64_t rows, bool bf16) const {
  TORCH_CHECK(int64_t(adapters.all.adapter.size()) == rows && adapters.is_bf16 == bf16 &&
                  adapters.num_sites == int64_t(layers.size()) * LINEARS + 1,
              "the adapters are not of this step's rows, or of another model");
  const auto check_site = [&](int64_t site, const Linear& layer) {
    adapters.check(site, layer.inputs, layer.panels);
  };
  for (size_t i = 0; i < layers.size(); ++i) {
    // Others have no adapters: see site_linears of weights/tensor_names.py.
    const Layer& layer = layers[i];
    if (!layer.latent) check_site(i * LINEARS + QKV, layer.qkv);
    check_site(i * LINEARS + OUTPUT, layer.output);
    if (!layer.mlp) continue;
    check_site(i * LINEARS + GATED, layer.mlp->gated);
    check_site(i * LINEARS + DOWN, layer.mlp->down);
  }
  check_site(layers.size() * LINEARS, head);
}

void Decoder::check(const Taps& taps, const at::Tensor& hidden_rows, bool all_wanted) const {
  if (!taps) return;
  const auto& [numbers, out] = *taps;
  TORCH_CHECK(
      out.is_contiguous() && out.scalar_type() == hidden_rows.scalar_type() &&
          out.sizes() == at::IntArrayRef({hidden_rows.size(0), int64_t(numbers.size()), hidden}),
      "the memory of taps has the wrong size");
  const int64_t last = layers.size();
  for (int64_t number : numbers)
    TORCH_CHECK(number >= 0 && number <= (all_wanted ? last : last - 1), "no such layer to tap");
}

std::tuple<at::Tensor, at::Tensor> Decoder::forward(
    at::Tensor hidden_rows, std::vector<at::Tensor> cos, std::vector<at::Tensor> sin,
    at::Tensor positions, at::Tensor slots, at::Tensor tables, at::Tensor query_start,
    at::Tensor context_lens, std::optional<at::Tensor> wanted, bool draws, at::Tensor pool,
    std::optional<at::Tensor> scales, OptionalAdapters adapters, std::vector<int64_t> places,
    Taps taps, std::optional<at::Tensor> table_rows,
    std::optional<std::vector<at::Tensor>> states) const {
  std::optional<DeltaStates> given;
  if (states) given.emplace(*states);
  const int64_t views = tables.dim() == 3 ? tables.size(0) : 1;
  check(hidden_rows, cos, sin, pool, scales, places, views);
  check(taps, hidden_rows, !wanted);
  check_table_rows(table_rows, hidden_rows);
  const int64_t T = hidden_rows.size(0), S = context_lens.size(0), R = wanted ? wanted->size(0) : T;
  TORCH_CHECK(slots.is_contiguous() && slots.numel() == views * T && positions.is_contiguous() &&
              positions.size(0) == T);
  TORCH_CHECK(tables.size(-2) == S && tables.stride(-1) == 1 && query_start.size(0) == S + 1);
  const int64_t* rows = wanted ? wanted->const_data_ptr<int64_t>() : nullptr;
  TORCH_CHECK(!wanted || wanted->is_contiguous());
  for (int64_t i = 0; i < R && wanted; ++i)
    TORCH_CHECK(rows[i] >= (i == 0 ? 0 : rows[i - 1] + 1) && rows[i] < T, "rows must ascend");
  const auto [out, drawn] = compute({
      .hidden = hidden_rows,
      .cos = cos,
      .sin = sin,
      .pool = pool,
      .scales = scales,
      .rows = T,
      .sequences = S,
      .positions = positions.const_data_ptr<int64_t>(),
      .slots = slots.const_data_ptr<int64_t>(),
      .tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(-2),
      .places = places,
      .slots_of_view = T,
      .tables_of_view = views > 1 ? tables.stride(0) : 0,
      .query_start = query_start.const_data_ptr<int32_t>(),
      .context_lens = context_lens.const_data_ptr<int32_t>(),
      .wanted = rows,
      .num_wanted = R,
      .draws = draws,
      .adapters = adapters ? adapters->get() : nullptr,
      .taps = taps,
      .states = given ? &*given : nullptr,
      .table_rows = table_rows,
  });
  return {out, at::tensor(drawn, positions.options())};
}

std::pair<at::Tensor, std::vector<int64_t>> Decoder::compute(const Pass& pass) const {
  const int64_t T = pass.rows, R = pass.num_wanted;
  for (int64_t row = 0; row < T; ++row)
    TORCH_CHECK(pass.positions[row] >= 0 && pass.positions[row] < pass.cos[0].size(0),
                "no such position");
  const at::Tensor& pool = pass.pool;
  const bool bf16 = is_bf16(pass.hidden);
  if (pass.adapters != nullptr) check(*pass.adapters, T, bf16);
  TORCH_CHECK(delta.has_value() == (pass.states != nullptr),
              "states are for models with layers that keep some");
  if (delta)
    pass.states->check(*delta, most_place, pass.query_start, pass.sequences, T,
                       pass.hidden.scalar_type());
  const int64_t most_threads = at::get_num_threads(), drawing = pass.draws ? most_threads : 0;
  Step step{
      .barrier = {},
      .counters = std::vector<std::atomic<int64_t>>(layers.size() * MOST_STAGES + FIRST_STAGES +
                                                    LAST_STAGES),
      .progress =
          std::vector<Progress>((layers.size() * shared_stages() + OTHER_LINEARS) * most_threads),
      .buffers = buffers(T, most_threads, pass.hidden.scalar_type(),
                         pass.adapters == nullptr ? 0 : pass.adapters->most_ranks()),
      .hidden = as_float(pass.hidden, pass.joint != nullptr),
      .out = empty({R, hidden}, pass.hidden.scalar_type()),
      .is_bf16 = bf16,
      .rounds_once = rounds_once(pass.hidden),
      .rows = T,
      .wanted = pass.wanted,
      .num_wanted = R,
      .tasks = std::vector<HeadTasks>(kinds.size()),
      .delta = {},
      .latent = {},
      .mixture = {},
      .picked = picked_rows(pass),
      .writes_alone = false,
      .highest = empty({drawing, R, PANEL}, at::kFloat),
      .highest_panel = empty({drawing, R, PANEL}, at::kInt),
      .adapters = pass.adapters,
      .wanted_adapters = {},
      .taps = pass.taps,
      .joint = pass.joint,
      .embeds = pass.hidden,
      .table_rows = pass.table_rows,
  };
  if (pass.adapters != nullptr && pass.wanted != nullptr) {
    std::vector<int32_t> numbers(R);
    for (int64_t i = 0; i < R; ++i) numbers[i] = pass.adapters->all.adapter[pass.wanted[i]];
    step.wanted_adapters.emplace(std::move(numbers), pass.adapters->adapters.size());
  }
  if (delta)
    step.delta.emplace(*delta, pass.query_start, pass.sequences, most_threads,
                       pass.hidden.scalar_type());
  const at::ScalarType type = pass.hidden.scalar_type();
  if (latent)
    step.latent.emplace(*latent, T,
                        is_small(T, std::max<int64_t>(1, latent->query_rank)) ? most_threads : 1,
                        type, pass.scales.has_value());
  if (mixed) {
    const Mixture& like = *layers[*mixed].mixture;
    const bool in_float = bf16 && like.router.format == Format::F32;
    const int64_t copies = !in_float ? 0 : is_small(T, hidden) ? most_threads * T : T;
    step.mixture.emplace(like, T, copies, hidden, most_threads, type);
  }
  Buffers& b = step.buffers;
  std::vector<AttentionArgs> attention;
  std::vector<RopeArgs> rope;
  std::vector<DeltaArgs> states(layers.size());
  const int64_t part = pool.stride(1), scale_part = pass.scales ? pass.scales->stride(1) : 0,
                scale_stride = pass.scales ? pass.scales->size(4) : 0;
  for (size_t i = 0; i < layers.size(); ++i) {
    const Layer& layer = layers[i];
    if (layer.delta) {
      states[i] = step.delta->args(*layer.delta, *pass.states, pass.query_start, b.qkv, b.attended,
                                   eps, bf16);
      attention.emplace_back(), rope.emplace_back();
      continue;
    }
    const int64_t place = pass.place(layer.keys), column = pass.column(layer.keys);
    const bool is_picked = step.is_picked(i);
    // Of compressed keys the values are a part.
    const int64_t kept = layer.latent ? 1 : 2;
    char* keys = (char*)pool.data_ptr() + (kept * place * part + column) * pool.element_size();
    char* values = keys + (kept - 1) * part * pool.element_size();
    float* key_scales = pass.scales ? pass.scales->data_ptr<float>() + kept * place * scale_part +
                                          column / layer.head_dim
                                    : nullptr;
    float* value_scales = pass.scales ? key_scales + (kept - 1) * scale_part : nullptr;
    const at::Tensor &q = layer.latent ? step.latent->q : b.q,
                     &out = layer.latent ? step.latent->mean : b.attended;
    attention.push_back({
        .q = q.const_data_ptr(),
        .out = out.data_ptr(),
        .keys = keys,
        .values = values,
        .key_scales = key_scales,
        .value_scales = value_scales,
        .block_tables = pass.tables_at(layer.keys),
        .table_stride = pass.table_stride,
        .query_start = is_picked ? step.picked.query_start.data() : pass.query_start,
        .context_lens = pass.context_lens,
        .q_stride = layer.heads_width(num_heads),
        .out_stride = out.stride(0),
        .slot_stride = pool.stride(3),
        .scale_stride = scale_stride,
        .head_dim = int(layer.head_dim),
        .num_heads = int(num_heads),
        .num_kv_heads = int(layer.num_kv_heads),
        .block_size = int(pool.size(3)),
        .value_dim = int(layer.latent ? step.latent->mean_dim() : layer.head_dim),
        .window = layer.window,
        .scale = attention_scale,
        .is_bf16 = bf16,
        .softcap = softcap,
        .sinks = data<float>(layer.sinks),
    });
    rope.push_back({
        .qkv = (const char*)b.qkv.const_data_ptr() +
               (layer.has_gates ? layer.heads_width(num_heads) * b.qkv.itemsize() : 0),
        .qkv_stride = b.qkv.size(1),
        .cos = pass.cos[layer.turn].const_data_ptr(),
        .sin = pass.sin[layer.turn].const_data_ptr(),
        .positions = is_picked ? step.picked.positions.data() : pass.positions,
        .q_norm = data<char>(layer.q_norm),
        .k_norm = data<char>(layer.k_norm),
        .q = b.q.data_ptr(),
        .keys = keys,
        .values = values,
        .key_scales = key_scales,
        .value_scales = value_scales,
        .slots = pass.slots_at(layer.keys),
        .slot_stride = pool.stride(3),
        .scale_stride = scale_stride,
        .num_heads = int(num_heads),
        .num_kv_heads = int(layer.num_kv_heads),
        .head_dim = int(layer.head_dim),
        .eps = eps,
        .is_bf16 = bf16,
        .norms_round_once = rounds_once(pass.hidden),
        .parts = layer.parts,
        .norms_values = layer.norms_values,
    });
  }
  for (size_t kind = 0; kind < kinds.size(); ++kind) {
    HeadTasks& tasks = step.tasks[kind];
    AttentionArgs args = attention[kinds[kind]];
    args.query_start = pass.query_start;
    tasks.all = attention_tasks(args, pass.sequences, most_threads);
    if (pass.wanted == nullptr) continue;
    if (kind == kind_of[step.picked.layer] && !layers[step.picked.layer].delta)
      tasks.picking = tasks_of(args, tasks.all, pass.wanted, R);
    if (step.picked.layer + 1 == layers.size()) continue;
    args.query_start = step.picked.query_start.data();
    tasks.picked = attention_tasks(args, pass.sequences, most_threads);
  }
  step.writes_alone = !latent;
  // Views of equal windows share alike, so one of each is asked, and for each kind of heads.
  std::vector<std::pair<int64_t, size_t>> asked;
  for (size_t i = 0; i < layers.size() && step.writes_alone && !step.is_picked(i); ++i) {
    if (layers[i].delta) continue;
    const std::pair kind(pass.places.empty() ? 0 : layers[i].window, kind_of[i]);
    if (std::find(asked.begin(), asked.end(), kind) != asked.end()) continue;
    asked.push_back(kind);
    step.writes_alone =
        can_write_alone(attention[i], step.tasks[kind_of[i]].all, pass.slots_at(layers[i].keys),
                        pass.sequences, pool.size(2));
  }
#pragma omp parallel num_threads(most_threads)
  {
#pragma omp single
    step.barrier.set_threads(omp_get_num_threads());
    Walk walk{omp_get_thread_num(), T, pass.adapters == nullptr ? nullptr : &pass.adapters->all};
    if (void* own = residual_of(step, walk); own != step.hidden.data_ptr())
      std::memcpy(own, step.hidden.const_data_ptr(), step.hidden.nbytes());
    if (token_inputs) make_tokens(step, walk);
    for (size_t i = 0; i < layers.size() && walk.rows > 0; ++i)
      run(step, walk, i, attention[i], rope[i], states[i]);
    if (R > 0) step.joint == nullptr ? finish(step, walk) : score(step, walk);
  }
  return {step.out, pass.draws ? argmax_ids(step, step.barrier.threads()) : std::vector<int64_t>{}};
}

std::vector<int64_t> Decoder::decode(std::vector<int64_t> ids, std::vector<int64_t> lengths,
                                     at::Tensor tables, std::optional<at::Tensor> embedding,
                                     std::vector<at::Tensor> cos, std::vector<at::Tensor> sin,
                                     at::Tensor pool, std::optional<at::Tensor> scales,
                                     OptionalAdapters adapters, std::vector<int64_t> places,
                                     Taps taps, std::optional<at::Tensor> token_table) const {
  const int64_t S = ids.size(), block_size = pool.size(3),
                views = tables.dim() == 3 ? tables.size(0) : 1;
  TORCH_CHECK(int64_t(lengths.size()) == S && (tables.dim() == 2 || tables.dim() == 3) &&
              tables.size(-2) == S && tables.stride(-1) == 1);
  std::vector<int64_t> positions(S), slots(views * S);
  std::vector<int32_t> starts(S + 1), context_lens(S);
  const int32_t* table = tables.const_data_ptr<int32_t>();
  for (int64_t s = 0; s < S; ++s) {
    const int64_t at = lengths[s] - 1, block = at / block_size;
    TORCH_CHECK(at >= 0 && block < tables.size(-1), "a sequence is longer than its table");
    positions[s] = at, context_lens[s] = lengths[s];
    for (int64_t v = 0; v < views; ++v) {
      const int32_t* row = table + (views > 1 ? v * tables.stride(0) : 0) + s * tables.stride(-2);
      slots[v * S + s] = row[block] * block_size + at % block_size;
    }
  }
  std::iota(starts.begin(), starts.end(), 0);
  TORCH_CHECK(!cos.empty(), "there is no rotary embedding");
  const at::Tensor hidden_rows = embedded(ids, embedding, cos[0].scalar_type());
  check(hidden_rows, cos, sin, pool, scales, places, views);
  check(taps, hidden_rows, true);
  std::optional<at::Tensor> table_rows;
  if (token_table) table_rows = rows_of(*token_table, ids);
  check_table_rows(table_rows, hidden_rows);
  return compute({
                     .hidden = hidden_rows,
                     .cos = cos,
                     .sin = sin,
                     .pool = pool,
                     .scales = scales,
                     .rows = S,
                     .sequences = S,
                     .positions = positions.data(),
                     .slots = slots.data(),
                     .tables = table,
                     .table_stride = tables.stride(-2),
                     .places = places,
                     .slots_of_view = S,
                     .tables_of_view = views > 1 ? tables.stride(0) : 0,
                     .query_start = starts.data(),
                     .context_lens = context_lens.data(),
                     .wanted = nullptr,
                     .num_wanted = S,
                     .draws = true,
                     .adapters = adapters ? adapters->get() : nullptr,
                     .taps = taps,
                     .table_rows = table_rows,
                 })
      .second;
}

at::Tensor Decoder::embedded(const std::vector<int64_t>& ids,
                             const std::optional<at::Tensor>& embedding,
                             at::ScalarType type) const {
  const int64_t count = ids.size();
  if (!embedding)
    return scaled(
        head.format == Format::GGUF
            ? block_rows(head.weight, ids.data(), count, hidden, head.width, type == at::kBFloat16)
            : packed_rows(head.weight, ids.data(), count, hidden, head.width,
                          head.format == Format::BF16));
  TORCH_CHECK(embedding->is_contiguous() && embedding->dim() == 2 && embedding->size(1) == hidden &&
              (embedding->scalar_type() == final_norm.scalar_type() ||
               final_norm.scalar_type() == at::kFloat));
  return scaled(rows_of(*embedding, ids));
}

template <typename T>
static void multiply_all(T* numbers, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) numbers[i] = T(float(numbers[i]) * factor);
}

at::Tensor Decoder::scaled(at::Tensor rows) const {
  if (embedding_scale == 1.0f) return rows;
  if (is_bf16(rows))
    multiply_all(rows.data_ptr<at::BFloat16>(), rows.numel(), embedding_scale);
  else
    multiply_all(rows.data_ptr<float>(), rows.numel(), embedding_scale);
  return rows;
}

// Writes a thread's share of the rows to each of the taps of this number; `rows` are float, or of
// the rows' dtype after the final norm. The stream is whole here, and nothing adds to it before all
// threads have met again.
void Decoder::tap(const Step& step, const Walk& walk, int64_t number, Inputs rows) const {
  const auto& [numbers, out] = *step.taps;
  const int64_t count = numbers.size(), threads = step.barrier.threads(),
                first = walk.rows * walk.thread / threads,
                last = walk.rows * (walk.thread + 1) / threads;
  const bool is_stream = number < int64_t(layers.size());
  for (int64_t place = 0; place < count; ++place) {
    if (numbers[place] != number) continue;
    char* to = (char*)out.data_ptr() + place * hidden * out.itemsize();
    if (is_stream) {
      KERNEL(add_norm)({.hidden = rows.rows,
                        .x = nullptr,
                        .weight = nullptr,
                        .out = to,
                        .width = hidden,
                        .out_stride = count * hidden,
                        .eps = eps,
                        .is_bf16 = step.is_bf16,
                        .is_float_stream = true},
                       first, last);
      continue;
    }
    for (int64_t row = first; row < last; ++row)
      std::memcpy(to + row * count * hidden * out.itemsize(),
                  (const char*)rows.rows + row * rows.stride * out.itemsize(),
                  hidden * out.itemsize());
  }
}

void Decoder::check_table_rows(const std::optional<at::Tensor>& rows,
                               const at::Tensor& hidden_rows) const {
  TORCH_CHECK(rows.has_value() == token_inputs.has_value(),
              "rows of tokens' vectors are for models that have some");
  TORCH_CHECK(!rows || (rows->is_contiguous() && rows->scalar_type() == hidden_rows.scalar_type() &&
                        rows->sizes() == at::IntArrayRef({hidden_rows.size(0),
                                                          token_dim() * int64_t(layers.size())})),
              "the rows of tokens' vectors have the wrong size");
}

// Rows go on alone after the last layer that writes keys, where nothing else needs the others; as a
// rule that is the last layer.
PickedRows Decoder::picked_rows(const Pass& pass) const {
  PickedRows picked{.layer = layers.size() - 1, .positions = {}, .query_start = {}};
  if (pass.wanted == nullptr) return picked;
  size_t writer = layers.size();
  while (layers[--writer].parts == 1) continue;
  if (writer == picked.layer) return picked;
  if (pass.taps)
    for (int64_t number : std::get<0>(*pass.taps))
      if (number > int64_t(writer)) return picked;
  std::vector<int32_t> starts{0};
  const int64_t* row = pass.wanted;
  const int64_t* end = row + pass.num_wanted;
  for (int64_t s = 0; s < pass.sequences; ++s) {
    const int64_t* first = row;
    while (row < end && *row < pass.query_start[s + 1]) ++row;
    // Otherwise they would not be the newest ones of a context.
    if (row > first &&
        (row[-1] != pass.query_start[s + 1] - 1 || row[-1] - *first != row - first - 1))
      return picked;
    starts.push_back(int32_t(row - pass.wanted));
  }
  picked.layer = writer;
  picked.query_start = std::move(starts);
  for (const int64_t* one = pass.wanted; one < end; ++one)
    picked.positions.push_back(pass.positions[*one]);
  return picked;
}

void Decoder::make_tokens(Step& step, Walk& walk) const {
  at::Tensor& tokens = step.buffers.tokens;
  linear(step, walk, token_inputs->product, NO_SITE, inputs_of(step.embeds), tokens,
         &layers[0].qkv);
  step.barrier.wait(walk.prefetch);
  const TokenInputArgs args{
      .products = tokens.const_data_ptr(),
      .rows = step.table_rows->const_data_ptr(),
      .out = tokens.data_ptr(),
      .weight = token_inputs->norm.const_data_ptr<float>(),
      .width = tokens.size(1),
      .dim = token_dim(),
      .eps = eps,
      .product_factor = token_product,
      .row_factor = token_row,
      .factor = token_sum,
      .is_bf16 = step.is_bf16,
  };
  over_rows(step, walk, tokens.size(1),
            [&](int64_t first, int64_t last) { KERNEL(token_inputs)(args, first, last); });
}

void Decoder::add_token(Step& step, Walk& walk, size_t i, const Linear* then) const {
  const Layer& layer = layers[i];
  const TokenGate& own = *layer.token_gate;
  Buffers& b = step.buffers;
  const Inputs stream = norm(step, walk, std::nullopt, true, layer.mlp_out_norm);
  linear(step, walk, own.gate, NO_SITE, stream, b.gates, &own.out);
  step.barrier.wait(walk.prefetch);
  const int64_t dim = token_dim(), stride = b.gated.stride(0), size = b.gated.itemsize();
  const bool small = is_small(step.rows, dim);
  const GeluTimesArgs args{
      .gates = b.gates.const_data_ptr(),
      .x = (const char*)b.tokens.const_data_ptr() + i * dim * size,
      .out = (char*)b.gated.data_ptr() + (small ? walk.thread * step.rows * stride * size : 0),
      .width = dim,
      .gates_stride = dim,
      .x_stride = b.tokens.size(1),
      .out_stride = stride,
      .x_rows = step.rows_after(i),
      .is_bf16 = step.is_bf16,
  };
  if (small)
    by_row(walk, [&](int64_t row) { KERNEL(gelu_times)(args, row, row + 1); });
  else
    over_rows(step, walk, dim,
              [&](int64_t first, int64_t last) { KERNEL(gelu_times)(args, first, last); });
  linear(step, walk, own.out, NO_SITE, {args.out, stride}, b.added, then);
  step.barrier.wait(walk.prefetch);
}

// The rest of the layer is for the wanted rows: their results of attention and their residuals
// come to the front, each thread's share of the columns. All threads have to meet after it.
void Decoder::pick(Step& step, Walk& walk) const {
  const auto move = [&](void* rows, int64_t stride, int64_t first, int64_t last) {
    for (int64_t i = 0; i < step.num_wanted; ++i)
      if (step.wanted[i] != i)
        std::memcpy((char*)rows + i * stride + first, (char*)rows + step.wanted[i] * stride + first,
                    last - first);
  };
  const int64_t threads = step.barrier.threads(), size = step.out.itemsize(),
                stream = step.hidden.itemsize();
  const auto share = [&](int64_t width, int64_t thread) { return width * thread / threads; };
  const Inputs attended = inputs_of(step.buffers.attended);
  const int64_t heads = layers[step.picked.layer].output.inputs;
  move(attended.rows, attended.stride * size, share(heads, walk.thread) * size,
       share(heads, walk.thread + 1) * size);
  if (is_small(step.rows, hidden))
    move(residual_of(step, walk), hidden * stream, 0, hidden * stream);
  else
    move(residual_of(step, walk), hidden * stream, share(hidden, walk.thread) * stream,
         share(hidden, walk.thread + 1) * stream);
  walk.rows = step.num_wanted;
  if (step.adapters != nullptr) walk.adapted = &*step.wanted_adapters;
}

// The final norm, and the head where tokens are drawn.
void Decoder::finish(Step& step, Walk& walk) const {
  const Inputs normed =
      norm(step, walk, final_norm, true, layers.back().last_norm(), layers.back().factor);
  const int64_t size = step.out.itemsize(),
                last = walk.rows * (walk.thread + 1) / step.barrier.threads();
  for (int64_t row = walk.rows * walk.thread / step.barrier.threads(); row < last; ++row)
    std::memcpy((char*)step.out.data_ptr() + row * hidden * size,
                (const char*)normed.rows + row * normed.stride * size, hidden * size);
  if (step.taps) tap(step, walk, layers.size(), normed);
  if (step.highest.numel() == 0) return;
  const int64_t own = walk.thread * walk.rows * PANEL;
  float* highest = step.highest.data_ptr<float>() + own;
  int32_t* panel = step.highest_panel.data_ptr<int32_t>() + own;
  std::fill_n(highest, walk.rows * PANEL, -INFINITY);
  std::fill_n(panel, walk.rows * PANEL, INT32_MAX);
  LinearArgs args = linear_args(head, normed);
  args.highest = highest, args.highest_panel = panel;
  multiply(step, walk, head, layers.size() * LINEARS, normed, args);
}

// Joins the results of the threads.
std::vector<int64_t> Decoder::argmax_ids(const Step& step, int64_t threads) {
  std::vector<int64_t> ids(step.num_wanted);
  const float* found = step.highest.const_data_ptr<float>();
  const int32_t* panel = step.highest_panel.const_data_ptr<int32_t>();
  for (int64_t row = 0; row < step.num_wanted; ++row) {
    float best = -INFINITY;
    int64_t id = -1;
    for (int64_t thread = 0; thread < threads && !std::isnan(best); ++thread)
      for (int64_t column = 0; column < PANEL; ++column) {
        const int64_t at = (thread * step.num_wanted + row) * PANEL + column,
                      here = int64_t(panel[at]) * PANEL + column;
        if (found[at] > best || (found[at] == best && here < id) || std::isnan(found[at]))
          best = found[at], id = here;
      }
    ids[row] = std::isfinite(best) ? id : -1;
  }
  return ids;
}

void Decoder::attend(Step& step, Walk& walk, size_t i, Inputs normed,
                     const AttentionArgs& attention, const RopeArgs& rope) const {
  const Layer& layer = layers[i];
  Buffers& b = step.buffers;
  const bool is_picked = step.is_picked(i),
             picks = step.wanted != nullptr && i == step.picked.layer,
             writes_alone = step.writes_alone && !picks && !is_picked;
  const HeadTasks& of_heads = step.tasks[kind_of[i]];
  const std::vector<AttentionTask>& tasks = picks       ? of_heads.picking
                                            : is_picked ? of_heads.picked
                                                        : of_heads.all;
  linear(step, walk, layer.qkv, i * LINEARS + QKV, normed, b.qkv, &layer.output,
         PREFETCH_DURING_ATTENTION);
  const int64_t threads = step.barrier.threads();
  if (walk.thread < int64_t(tasks.size())) KERNEL(prepare)(attention, tasks[walk.thread]);
  step.barrier.wait(walk.prefetch);
  if (!writes_alone)
    over_rows(step, walk, b.qkv.size(1), [&](int64_t first, int64_t last) {
      KERNEL(rope)(rope, first, last, 0, int(layer.num_kv_heads));
    });
  attend_share(attention, writes_alone ? &rope : nullptr, tasks,
               &step.progress[walk.shared++ * threads], walk.prefetch, walk.thread, threads);
  step.barrier.wait(walk.prefetch);
  if (layer.has_gates) apply_gates(step, walk, layer);
}

void Decoder::apply_gates(Step& step, Walk& walk, const Layer& layer) const {
  Buffers& b = step.buffers;
  const GateArgs args{
      .gates = b.qkv.const_data_ptr(),
      .x = b.attended.const_data_ptr(),
      .out = b.attended.data_ptr(),
      .width = layer.heads_width(num_heads),
      .gates_stride = b.qkv.stride(0),
      .stride = b.attended.stride(0),
      .is_bf16 = step.is_bf16,
  };
  over_rows(step, walk, args.width,
            [&](int64_t first, int64_t last) { KERNEL(sigmoid_mul)(args, first, last); });
}

void Decoder::take_states(Step& step, Walk& walk, size_t i, Inputs normed,
                          const DeltaArgs& args) const {
  const Layer& layer = layers[i];
  DeltaStep& own = *step.delta;
  linear(step, walk, layer.qkv, i * LINEARS + QKV, normed, step.buffers.qkv, &layer.delta->numbers);
  // The rows of the first product may be quantised in the place of those of the second.
  if (layer.delta->numbers.format >= Format::INT8) step.barrier.wait(walk.prefetch);
  linear(step, walk, layer.delta->numbers, NO_SITE, normed, own.numbers, &layer.output,
         PREFETCH_DURING_ATTENTION);
  step.barrier.wait(walk.prefetch);
  const auto over_heads = [&](const std::vector<HeadTask>& tasks, auto work) {
    take_heads(tasks, step.counters[walk.stage++], work);
    step.barrier.wait(walk.prefetch);
  };
  over_heads(own.turns, [&](int64_t s, int64_t head) { KERNEL(convolve_head)(args, s, head); });
  over_heads(own.heads, [&](int64_t s, int64_t head) { KERNEL(delta_head)(args, s, head); });
}

void Decoder::run(Step& step, Walk& walk, size_t i, const AttentionArgs& attention,
                  const RopeArgs& rope, const DeltaArgs& states) const {
  const Layer &layer = layers[i], &before = layers[i - (i > 0)];
  const int64_t site = i * LINEARS;
  Buffers& b = step.buffers;
  const Inputs first = step.joint != nullptr && i == 0 ? join(step, walk)
                                                       : norm(step, walk, layer.input_norm, i > 0,
                                                              before.last_norm(), before.factor);
  if (step.taps) tap(step, walk, i, {residual_of(step, walk), hidden});
  if (layer.delta)
    take_states(step, walk, i, first, states);
  else if (layer.latent)
    attend_latent(step, walk, i, first, attention, rope);
  else
    attend(step, walk, i, first, attention, rope);
  if (step.wanted != nullptr && i == step.picked.layer) {
    pick(step, walk);
    if (walk.rows == 0) return;
    step.barrier.wait(walk.prefetch);
  }
  linear(step, walk, layer.output, site + OUTPUT, inputs_of(b.attended), b.added,
         &layer.next_to_output());
  step.barrier.wait(walk.prefetch);
  const Linear* next = i + 1 < layers.size()                               ? &layers[i + 1].qkv
                       : step.highest.numel() > 0 || step.joint != nullptr ? &head
                                                                           : nullptr;
  add_mlp(step, walk, i, layer.token_gate ? &layer.token_gate->gate : next);
  if (layer.token_gate) add_token(step, walk, i, next);
}

void Decoder::add_mlp(Step& step, Walk& walk, size_t i, const Linear* then) const {
  const Layer& layer = layers[i];
  const int64_t site = i * LINEARS;
  Buffers& b = step.buffers;
  const Inputs normed = norm(step, walk, layer.post_attention_norm, true, layer.attention_out_norm);
  if (layer.mixture) {
    mix(step, walk, i, normed, then);
    return;
  }
  linear(step, walk, layer.mlp->gated, site + GATED, normed, b.inner, &layer.mlp->down);
  step.barrier.wait(walk.prefetch);
  linear(step, walk, layer.mlp->down, site + DOWN, inputs_of(b.inner), b.added, then);
  step.barrier.wait(walk.prefetch);
}

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  // Decoder's methods take them.
  define_adapters(m);
  m.class_<Decoder>("Decoder")
      .def(torch::init<const Sizes&, const c10::Dict<std::string, double>&,
                       const std::vector<Tensors>&, const std::vector<Sizes>&, const Tensors&>())
      .def("forward", &Decoder::forward)
      .def("decode", &Decoder::decode)
      .def("draft_step", &Decoder::draft_step)
      .def("draft_chain", &Decoder::draft_chain);
}

}  // namespace penstock
