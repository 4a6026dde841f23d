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

// Scores in memory at once.
constexpr int64_t MOST_SCORES = 1 << 24;

at::Tensor index_choice(const at::Tensor& q, const at::Tensor& weights, const at::Tensor& keys,
                        const at::Tensor& tables, const at::Tensor& query_start,
                        const at::Tensor& context_lens, int64_t longest, int64_t most,
                        bool gives_slots) {
  const int64_t T = q.size(0), H = q.size(1), D = q.size(2), S = context_lens.size(0);
  TORCH_CHECK(q.is_contiguous() && keys.is_contiguous() && weights.is_contiguous());
  TORCH_CHECK(keys.size(2) == D && D <= MAX_INDEX_DIM && keys.scalar_type() == q.scalar_type());
  TORCH_CHECK(weights.scalar_type() == at::kFloat && weights.size(0) == T && weights.size(1) == H);
  TORCH_CHECK(tables.size(0) == S && tables.stride(1) == 1 && query_start.size(0) == S + 1);
  TORCH_CHECK(longest > 0 && most > 0);
  const int64_t each = std::min(T, std::max<int64_t>(1, MOST_SCORES / longest));
  auto scores = at::empty({each, longest}, weights.options());
  auto chosen = at::empty({T, most}, tables.options());
  IndexArgs args{
      .q = q.const_data_ptr(),
      .weights = weights.const_data_ptr<float>(),
      .keys = keys.const_data_ptr(),
      .block_tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .query_start = query_start.const_data_ptr<int32_t>(),
      .context_lens = context_lens.const_data_ptr<int32_t>(),
      .scores = scores.data_ptr<float>(),
      .scores_stride = longest,
      .chosen = chosen.data_ptr<int32_t>(),
      .most = most,
      .num_heads = int(H),
      .dim = int(D),
      .block_size = int(keys.size(1)),
      .is_bf16 = is_bf16(q),
      .gives_slots = gives_slots,
  };
  TORCH_CHECK(args.query_start[0] == 0 && args.query_start[S] == T);
  for (int64_t s = 0; s < S; ++s) TORCH_CHECK(args.context_lens[s] <= longest);
  for (int64_t begin = 0; begin < T; begin += each) {
    args.first_row = begin, args.last_row = std::min(T, begin + each);
    // (sequence, first position), then (sequence, row).
    std::vector<std::pair<int64_t, int64_t>> spans, rows;
    for (int64_t s = 0; s < S; ++s) {
      const int64_t last = std::min<int64_t>(args.query_start[s + 1], args.last_row);
      int64_t row = std::max<int64_t>(args.query_start[s], args.first_row);
      if (row >= last) continue;
      for (; row < last; ++row) rows.emplace_back(s, row);
      // Nothing behind the last of these rows.
      const int64_t seen = args.context_lens[s] - (args.query_start[s + 1] - last);
      for (int64_t first = 0; first < seen; first += INDEX_SPAN) spans.emplace_back(s, first);
    }
    at::parallel_for(0, spans.size(), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        KERNEL(score_positions)(args, spans[i].first, spans[i].second, index_scratch());
    });
    at::parallel_for(0, rows.size(), 1, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        KERNEL(choose_positions)(args, rows[i].first, rows[i].second);
    });
  }
  return chosen;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "index_choice(Tensor q, Tensor weights, Tensor keys, Tensor tables, Tensor query_start, "
      "Tensor context_lens, int longest, int most, bool gives_slots) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("index_choice", index_choice); }

}  // namespace penstock
