// Drafts of a trained head: its one layer as a decoder's, which reads two rows side by side, and a
// chain of drafts in one call.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "decoder/decoder.h"
#include "sampling/sampling.h"

namespace penstock {

// What the layer reads: the norms of an embedding and of a state. With few rows, of a copy for each
// thread.
Inputs Decoder::join(Step& step, Walk& walk) const {
  Buffers& b = step.buffers;
  const bool small = is_small(step.rows, hidden);
  const int64_t own = small ? walk.thread : 0, stride = b.normed.stride(0),
                size = b.normed.itemsize();
  char* out = (char*)b.normed.data_ptr() + own * step.rows * stride * size;
  const auto args = [&](const at::Tensor& rows, const at::Tensor& weight, int64_t column) {
    return NormArgs{
        // Nothing is added, so they are only read.
        .hidden = const_cast<void*>(rows.const_data_ptr()),
        .x = nullptr,
        .weight = weight.const_data_ptr(),
        .out = out + column * size,
        .width = hidden,
        .out_stride = stride,
        .eps = eps,
        .is_bf16 = step.is_bf16,
    };
  };
  const NormArgs embed = args(step.joint->embeds, joint_norms->embed, 0),
                 state = args(step.joint->states, joint_norms->state, hidden);
  float* stream = (float*)residual_of(step, walk);
  const auto work = [&](int64_t first, int64_t last) {
    KERNEL(add_norm)(embed, first, last);
    KERNEL(add_norm)(state, first, last);
    if (joint == Joint::STATE) return;
    for (int64_t row = first; row < last; ++row) {
      const char* from = out + (row * stride + hidden) * size;
      if (step.is_bf16)
        std::copy_n((const at::BFloat16*)from, hidden, stream + row * hidden);
      else
        std::copy_n((const float*)from, hidden, stream + row * hidden);
    }
  };
  if (small)
    by_row(walk, [&](int64_t row) { work(row, row + 1); });
  else
    over_rows(step, walk, hidden, work);
  return {out, stride};
}

// The layer's results in the rows' dtype, and their scores.
void Decoder::score(Step& step, Walk& walk) const {
  const Inputs rounded = norm(step, walk, std::nullopt, true, std::nullopt);
  const int64_t size = step.out.itemsize(), threads = step.barrier.threads(),
                last = walk.rows * (walk.thread + 1) / threads;
  for (int64_t row = walk.rows * walk.thread / threads; row < last; ++row)
    std::memcpy((char*)step.out.data_ptr() + row * hidden * size,
                (const char*)rounded.rows + row * rounded.stride * size, hidden * size);
  step.barrier.wait(walk.prefetch);
  const NormArgs args{
      .hidden = step.out.data_ptr(),
      .x = nullptr,
      .weight = final_norm.const_data_ptr(),
      .out = rounded.rows,
      .width = hidden,
      .out_stride = rounded.stride,
      .eps = eps,
      .is_bf16 = step.is_bf16,
  };
  if (is_small(step.rows, hidden))
    by_row(walk, [&](int64_t row) { KERNEL(add_norm)(args, row, row + 1); });
  else
    over_rows(step, walk, hidden,
              [&](int64_t first, int64_t last) { KERNEL(add_norm)(args, first, last); });
  LinearArgs product = linear_args(head, rounded);
  at::Tensor scores = step.joint->scores;
  product.out = scores.data_ptr(), product.out_stride = scores.stride(0);
  multiply(step, walk, head, LINEARS, rounded, product);
}

std::tuple<at::Tensor, at::Tensor> Decoder::draft_pass(const DraftRows& rows) const {
  const std::vector<int64_t> no_places;
  const Taps no_taps;
  TORCH_CHECK(joint != Joint::NOT, "this is no draft head");
  check(rows.states, rows.cos, rows.sin, rows.pool, rows.scales, no_places, 1);
  TORCH_CHECK(rows.embeds.is_contiguous() && rows.embeds.sizes() == rows.states.sizes() &&
                  rows.embeds.scalar_type() == rows.states.scalar_type() &&
                  !rounds_once(rows.states),
              "embeddings and states of a draft head must be of its dtype, and as many");
  const int64_t T = rows.states.size(0), S = rows.sequences;
  std::vector<int64_t> wanted(S);
  for (int64_t s = 0; s < S; ++s) wanted[s] = rows.query_start[s + 1] - 1;
  const JointRows read{rows.embeds, rows.states, empty({S, vocab}, at::kFloat)};
  at::Tensor out = compute({
                               .hidden = rows.states,
                               .cos = rows.cos,
                               .sin = rows.sin,
                               .pool = rows.pool,
                               .scales = rows.scales,
                               .rows = T,
                               .sequences = S,
                               .positions = rows.positions,
                               .slots = rows.slots,
                               .tables = rows.tables,
                               .table_stride = rows.table_stride,
                               .places = no_places,
                               .slots_of_view = T,
                               .tables_of_view = 0,
                               .query_start = rows.query_start,
                               .context_lens = rows.context_lens,
                               .wanted = S < T ? wanted.data() : nullptr,
                               .num_wanted = S,
                               .draws = false,
                               .adapters = nullptr,
                               .taps = no_taps,
                               .joint = &read,
                           })
                       .first;
  return {out, read.scores};
}

std::tuple<at::Tensor, at::Tensor> Decoder::draft_step(
    at::Tensor embeds, at::Tensor states, std::vector<at::Tensor> cos, std::vector<at::Tensor> sin,
    at::Tensor positions, at::Tensor slots, at::Tensor tables, at::Tensor query_start,
    at::Tensor context_lens, at::Tensor pool, std::optional<at::Tensor> scales) const {
  const int64_t T = states.size(0), S = context_lens.size(0);
  TORCH_CHECK(slots.is_contiguous() && slots.numel() == T && positions.is_contiguous() &&
              positions.numel() == T);
  TORCH_CHECK(tables.dim() == 2 && tables.size(0) == S && tables.stride(1) == 1 &&
              query_start.size(0) == S + 1);
  return draft_pass({
      .embeds = embeds,
      .states = states,
      .cos = cos,
      .sin = sin,
      .pool = pool,
      .scales = scales,
      .sequences = S,
      .positions = positions.const_data_ptr<int64_t>(),
      .slots = slots.const_data_ptr<int64_t>(),
      .tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .query_start = query_start.const_data_ptr<int32_t>(),
      .context_lens = context_lens.const_data_ptr<int32_t>(),
  });
}

std::vector<std::vector<int64_t>> Decoder::draft_chain(
    at::Tensor embeds, at::Tensor states, std::vector<at::Tensor> cos, std::vector<at::Tensor> sin,
    at::Tensor positions, at::Tensor slots, at::Tensor tables, at::Tensor query_start,
    at::Tensor context_lens, at::Tensor pool, std::optional<at::Tensor> scales,
    c10::intrusive_ptr<Decoder> served, std::optional<at::Tensor> embedding,
    std::optional<at::Tensor> served_ids, std::vector<int64_t> counts, std::vector<double> least,
    std::vector<std::vector<int64_t>> ends) const {
  const int64_t S = context_lens.size(0), block_size = pool.size(3), width = tables.size(1);
  TORCH_CHECK(
      int64_t(counts.size()) == S && int64_t(least.size()) == S && int64_t(ends.size()) == S,
      "numbers for every sequence");
  TORCH_CHECK(!served_ids || (served_ids->is_contiguous() && served_ids->numel() == vocab &&
                              served_ids->scalar_type() == at::kLong),
              "an id for every score");
  auto [given, scores] = draft_step(embeds, states, cos, sin, positions, slots, tables, query_start,
                                    context_lens, pool, scales);
  const int32_t *table = tables.const_data_ptr<int32_t>(),
                *lengths = context_lens.const_data_ptr<int32_t>();
  std::vector<std::vector<int64_t>> drafts(S);
  // Sequences of the last pass's rows.
  std::vector<int64_t> active(S);
  std::iota(active.begin(), active.end(), 0);
  for (;;) {
    std::vector<int64_t> going_on, rows, ids;
    for (int64_t row = 0; row < int64_t(active.size()); ++row) {
      const int64_t s = active[row];
      const float* own = scores.const_data_ptr<float>() + row * vocab;
      const float best = KERNEL(row_max)(own, vocab);
      if (!std::isfinite(best)) continue;
      const int64_t place = std::find(own, own + vocab, best) - own,
                    id = served_ids ? served_ids->const_data_ptr<int64_t>()[place] : place;
      if (std::find(ends[s].begin(), ends[s].end(), id) != ends[s].end()) continue;
      drafts[s].push_back(id);
      if (int64_t(drafts[s].size()) >= counts[s]) continue;
      // The draft itself still counts.
      if (least[s] > 0 && std::exp(best - KERNEL(log_total)(own, vocab)) < least[s]) continue;
      going_on.push_back(s), rows.push_back(row), ids.push_back(id);
    }
    const int64_t R = going_on.size();
    if (R == 0) return drafts;
    const int64_t size = hidden * given.itemsize();
    at::Tensor next = empty({R, hidden}, given.scalar_type());
    std::vector<int64_t> places(R), into(R);
    std::vector<int32_t> starts(R + 1), lens(R), blocks(R * width);
    std::iota(starts.begin(), starts.end(), 0);
    for (int64_t i = 0; i < R; ++i) {
      const int64_t s = going_on[i];
      places[i] = lengths[s] + int64_t(drafts[s].size()) - 1, lens[i] = int32_t(places[i]) + 1;
      TORCH_CHECK(places[i] / block_size < width, "a chain is longer than its table");
      const int32_t* own = table + s * tables.stride(0);
      std::copy_n(own, width, blocks.data() + i * width);
      into[i] = int64_t(own[places[i] / block_size]) * block_size + places[i] % block_size;
      std::memcpy((char*)next.data_ptr() + i * size,
                  (const char*)given.const_data_ptr() + rows[i] * size, size);
    }
    std::tie(given, scores) = draft_pass({
        .embeds = served->embedded(ids, embedding, next.scalar_type()),
        .states = next,
        .cos = cos,
        .sin = sin,
        .pool = pool,
        .scales = scales,
        .sequences = R,
        .positions = places.data(),
        .slots = into.data(),
        .tables = blocks.data(),
        .table_stride = width,
        .query_start = starts.data(),
        .context_lens = lens.data(),
    });
    active = std::move(going_on);
  }
}

}  // namespace penstock
