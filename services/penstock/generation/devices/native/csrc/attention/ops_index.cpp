// The operator of an indexer that torch sees (torch.ops.penstock.index_choice): it checks shapes
// and shares the work among threads.
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "attention/index_scores.h"
#include "util/dispatch.h"

namespace penstock {
namespace {

// Scratch memory of the calling thread.
void* index_scratch() {
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  thread_local std::unique_ptr<void, Free> memory(std::aligned_alloc(
      64, (std::max(PENSTOCK_WIDE::index_scratch_bytes(), PENSTOCK_NARROW::index_scratch_bytes()) +
           63) /
              64 * 64));
  return memory.get();
}

at::Tensor index_choice(const at::Tensor& q, const at::Tensor& weights, const at::Tensor& keys,
                        const at::Tensor& tables, const at::Tensor& query_start,
                        const at::Tensor& context_lens, int64_t longest, int64_t most) {
  const int64_t T = q.size(0), H = q.size(1), D = q.size(2), S = context_lens.size(0);
  TORCH_CHECK(q.is_contiguous() && keys.is_contiguous() && weights.is_contiguous());
  TORCH_CHECK(keys.size(2) == D && D <= MAX_INDEX_DIM && keys.scalar_type() == q.scalar_type());
  TORCH_CHECK(weights.scalar_type() == at::kFloat && weights.size(0) == T && weights.size(1) == H);
  TORCH_CHECK(tables.size(0) == S && tables.stride(1) == 1 && query_start.size(0) == S + 1);
  TORCH_CHECK(longest > 0 && most > 0);
  auto scores = at::empty({T, longest}, weights.options());
  auto slots = at::empty({T, most}, tables.options());
  const IndexArgs args{
      .q = q.const_data_ptr(),
      .weights = weights.const_data_ptr<float>(),
      .keys = keys.const_data_ptr(),
      .block_tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .query_start = query_start.const_data_ptr<int32_t>(),
      .context_lens = context_lens.const_data_ptr<int32_t>(),
      .scores = scores.data_ptr<float>(),
      .scores_stride = longest,
      .slots = slots.data_ptr<int32_t>(),
      .most = most,
      .num_heads = int(H),
      .dim = int(D),
      .block_size = int(keys.size(1)),
      .is_bf16 = is_bf16(q),
  };
  // (sequence, first position), then (sequence, row).
  std::vector<std::pair<int64_t, int64_t>> spans, rows;
  for (int64_t s = 0; s < S; ++s) {
    TORCH_CHECK(args.context_lens[s] <= longest);
    for (int64_t first = 0; first < args.context_lens[s]; first += INDEX_SPAN)
      spans.emplace_back(s, first);
    for (int64_t row = args.query_start[s]; row < args.query_start[s + 1]; ++row)
      rows.emplace_back(s, row);
  }
  TORCH_CHECK(int64_t(rows.size()) == T);
  at::parallel_for(0, spans.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      KERNEL(score_positions)(args, spans[i].first, spans[i].second, index_scratch());
  });
  at::parallel_for(0, rows.size(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      KERNEL(choose_slots)(args, rows[i].first, rows[i].second);
  });
  return slots;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "index_choice(Tensor q, Tensor weights, Tensor keys, Tensor tables, Tensor query_start, "
      "Tensor context_lens, int longest, int most) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("index_choice", index_choice); }

}  // namespace penstock
