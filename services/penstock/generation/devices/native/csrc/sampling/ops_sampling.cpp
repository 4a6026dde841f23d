// The operators of sampling for torch (torch.ops.penstock.*): rows of fp32 scores, shared among
// threads.
#include "sampling/sampling.h"
#include "util/dispatch.h"

namespace penstock {
namespace {

SamplingScratch& scratch() {
  thread_local SamplingScratch memory;
  return memory;
}

// R rows of scores, (N, V) fp32 with contiguous rows.
struct Rows {
  const float* scores;
  int64_t vocab, stride, count;
  const int64_t* picked;

  Rows(const at::Tensor& scores_NV, const at::Tensor& rows)
      : scores(scores_NV.const_data_ptr<float>()),
        vocab(scores_NV.size(1)),
        stride(scores_NV.stride(0)),
        count(rows.numel()),
        picked(rows.const_data_ptr<int64_t>()) {
    TORCH_CHECK(scores_NV.dim() == 2 && scores_NV.stride(1) == 1 && vocab > 0 &&
                vocab < int64_t(1) << 31);
    TORCH_CHECK(rows.is_contiguous());
    for (int64_t r = 0; r < count; ++r)
      TORCH_CHECK(picked[r] >= 0 && picked[r] < scores_NV.size(0), "no such row");
  }
  const float* operator[](int64_t r) const { return scores + picked[r] * stride; }

  template <typename F>
  void each(F&& work) const {
    at::parallel_for(0, count, 1, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; ++r) work(r, (*this)[r]);
    });
  }
};

template <typename T>
const T* values(const at::Tensor& x, const Rows& rows) {
  TORCH_CHECK(x.is_contiguous() && x.numel() == rows.count, "a value for every row");
  return x.const_data_ptr<T>();
}
at::Tensor of(const at::Tensor& like, at::IntArrayRef shape, at::ScalarType type) {
  return at::empty(shape, like.options().dtype(type));
}

at::Tensor log_totals(const at::Tensor& scores_NV, const at::Tensor& picked) {
  const Rows rows(scores_NV, picked);
  auto totals = of(scores_NV, {rows.count}, at::kDouble);
  auto* total = totals.data_ptr<double>();
  rows.each([&](int64_t r, const float* x) { total[r] = KERNEL(log_total)(x, rows.vocab); });
  return totals;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> draw_rows(
    const at::Tensor& scores_NV, const at::Tensor& picked, const at::Tensor& temperatures,
    const at::Tensor& top_ks, const at::Tensor& top_ps, const at::Tensor& min_ps,
    const at::Tensor& uniforms) {
  const Rows rows(scores_NV, picked);
  const auto* temperature = values<float>(temperatures, rows);
  const auto* top_k = values<int64_t>(top_ks, rows);
  const auto *top_p = values<double>(top_ps, rows), *min_p = values<double>(min_ps, rows),
             *uniform = values<double>(uniforms, rows);
  auto ids = of(scores_NV, {rows.count}, at::kLong),
       lowest = of(scores_NV, {rows.count}, at::kFloat),
       last = of(scores_NV, {rows.count}, at::kLong),
       totals = of(scores_NV, {rows.count}, at::kDouble);
  auto *id = ids.data_ptr<int64_t>(), *end = last.data_ptr<int64_t>();
  auto* low = lowest.data_ptr<float>();
  auto* total = totals.data_ptr<double>();
  rows.each([&](int64_t r, const float* x) {
    const DrawArgs args{
        .scores = x,
        .vocab = rows.vocab,
        .temperature = temperature[r],
        .top_k = top_k[r],
        .top_p = top_p[r],
        .min_p = min_p[r],
        .uniform = uniform[r],
    };
    const Drawn drawn = KERNEL(draw)(args, scratch());
    id[r] = drawn.id, low[r] = drawn.cut.lowest, end[r] = drawn.cut.last,
    total[r] = drawn.log_total;
  });
  return {ids, lowest, last, totals};
}

void warp_rows(at::Tensor& scores_NV, const at::Tensor& picked, const at::Tensor& temperatures,
               const at::Tensor& top_ks, const at::Tensor& top_ps, const at::Tensor& min_ps,
               const at::Tensor& keeps) {
  const Rows rows(scores_NV, picked);
  const auto* temperature = values<float>(temperatures, rows);
  const auto *top_k = values<int64_t>(top_ks, rows), *keep = values<int64_t>(keeps, rows);
  const auto *top_p = values<double>(top_ps, rows), *min_p = values<double>(min_ps, rows);
  float* scores = scores_NV.data_ptr<float>();
  rows.each([&](int64_t r, const float* x) {
    const DrawArgs args{
        .scores = x,
        .vocab = rows.vocab,
        .temperature = temperature[r],
        .top_k = top_k[r],
        .top_p = top_p[r],
        .min_p = min_p[r],
        .uniform = 0.0,
    };
    KERNEL(warp)(scores + (x - rows.scores), args, std::max<int64_t>(keep[r], 1), scratch());
  });
}

// The highest scores with the noise of each row's stream; places beyond those that are finite have
// the id -1.
std::tuple<at::Tensor, at::Tensor> top_noisy_scores(const at::Tensor& scores_NV,
                                                    const at::Tensor& picked,
                                                    const at::Tensor& streams, int64_t count) {
  const Rows rows(scores_NV, picked);
  TORCH_CHECK(count > 0);
  const auto* stream = values<int64_t>(streams, rows);
  auto keys = of(scores_NV, {rows.count, count}, at::kDouble),
       ids = at::full({rows.count, count}, -1, keys.options().dtype(at::kLong));
  auto* key = keys.data_ptr<double>();
  auto* id = ids.data_ptr<int64_t>();
  rows.each([&](int64_t r, const float* x) {
    KERNEL(top_noisy)(x, rows.vocab, uint64_t(stream[r]), count, key + r * count, id + r * count);
  });
  return {keys, ids};
}

// True for each (seed, id) with the id among the first `count` of torch.randperm(n) of that seed.
at::Tensor in_permutation_head(int64_t n, int64_t count, const at::Tensor& seeds,
                               const at::Tensor& ids) {
  TORCH_CHECK(n > 0 && n < int64_t(1) << 27 && count >= 0 && count <= n);
  TORCH_CHECK(seeds.is_contiguous() && ids.is_contiguous() && seeds.numel() == ids.numel());
  const auto *seed = seeds.const_data_ptr<int64_t>(), *id = ids.const_data_ptr<int64_t>();
  auto answers = of(ids, {ids.numel()}, at::kBool);
  bool* answer = answers.data_ptr<bool>();
  at::parallel_for(0, ids.numel(), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i)
      answer[i] = id[i] >= 0 && id[i] < n && KERNEL(is_in_head)(n, count, uint32_t(seed[i]), id[i]);
  });
  return answers;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("log_totals(Tensor scores, Tensor rows) -> Tensor");
  m.def(
      "draw_rows(Tensor scores, Tensor rows, Tensor temperatures, Tensor top_ks, Tensor top_ps, "
      "Tensor min_ps, Tensor uniforms) -> "
      "(Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "warp_rows(Tensor(a!) scores, Tensor rows, Tensor temperatures, Tensor top_ks, Tensor "
      "top_ps, Tensor min_ps, Tensor keeps) "
      "-> ()");
  m.def(
      "top_noisy_scores(Tensor scores, Tensor rows, Tensor streams, int count) -> (Tensor, "
      "Tensor)");
  m.def("in_permutation_head(int n, int count, Tensor seeds, Tensor ids) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("log_totals", log_totals);
  m.impl("draw_rows", draw_rows);
  m.impl("warp_rows", warp_rows);
  m.impl("top_noisy_scores", top_noisy_scores);
  m.impl("in_permutation_head", in_permutation_head);
}

}  // namespace penstock
