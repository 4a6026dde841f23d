// A decoder's layer with experts: see mixture.h.
#include <algorithm>

#include "decoder/decoder.h"

namespace penstock {

Inputs Decoder::routed(Step& step, Walk& walk, const Linear& router, Inputs rows) const {
  if (!step.is_bf16 || router.format == Format::BF16) return rows;
  const at::Tensor& floats = step.mixture->floats;
  const bool small = is_small(step.rows, hidden);
  float* own = floats.data_ptr<float>() + (small ? walk.thread * step.rows * hidden : 0);
  const auto copy = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
      std::copy_n((const at::BFloat16*)rows.rows + row * rows.stride, hidden, own + row * hidden);
  };
  if (small)
    by_row(walk, [&](int64_t row) { copy(row, row + 1); });
  else
    over_rows(step, walk, hidden, copy);
  return {own, hidden};
}

void Decoder::mix(Step& step, Walk& walk, size_t i, Inputs normed, const Linear* then) const {
  const Mixture& own = *layers[i].mixture;
  MixtureStep& mixture = *step.mixture;
  Buffers& b = step.buffers;
  const int64_t rows = walk.rows, threads = step.barrier.threads();
  const auto in_parts = [&](int64_t count, int64_t each, auto work) {
    auto& next = step.counters[walk.stage++];
    for (int64_t first; (first = next.fetch_add(1) * each) < count;)
      work(first, std::min(count, first + each));
  };
  const auto over_places = [&](int64_t count, auto work) {
    if (count == 0) {
      ++walk.stage;
      return;
    }
    in_parts(count, 1, [&](int64_t place, int64_t) { work(place); });
    step.barrier.wait(walk.prefetch);
  };
  linear(step, walk, own.router, NO_SITE, routed(step, walk, own.router, normed), mixture.scores,
         own.shared ? &own.shared->gated : nullptr);
  if (own.gate) linear(step, walk, *own.gate, NO_SITE, normed, mixture.gates, &own.shared->gated);
  step.barrier.wait(walk.prefetch);
  // One thread plans the products while the others begin those of the shared MLP.
  const bool few = rows <= CHOICES_AT_ONCE;
  in_parts(rows, CHOICES_AT_ONCE, [&](int64_t first, int64_t last) {
    mixture.choose(own, first, last);
    if (few) mixture.plan(own, normed.rows, normed.stride, rows);
  });
  if (!few) {
    step.barrier.wait(walk.prefetch);
    in_parts(1, 1, [&](int64_t, int64_t) { mixture.plan(own, normed.rows, normed.stride, rows); });
  }
  if (own.shared)
    linear(step, walk, own.shared->gated, NO_SITE, normed, b.inner, &own.shared->down);
  step.barrier.wait(walk.prefetch);
  if (own.shared)
    linear(step, walk, own.shared->down, NO_SITE, inputs_of(b.inner), mixture.shared, nullptr);
  ExpertProducts& products = mixture.products;
  over_places(products.first_fills(),
              [&](int64_t number) { products.fill_first(number, normed.rows, normed.stride); });
  products.multiply_first(walk.thread);
  step.barrier.wait(walk.prefetch);
  over_places(products.second_fills(rows), [&](int64_t place) { products.fill_second(place); });
  products.multiply_second(walk.thread);
  step.barrier.wait(walk.prefetch);
  const int64_t first = hidden * walk.thread / threads, last = hidden * (walk.thread + 1) / threads;
  for (int64_t row = 0; row < rows; ++row)
    mixture.sum(row, first, last, b.added.data_ptr<float>() + row * hidden);
  if (then != nullptr) walk.prefetch = beginning(*then, rows, walk.thread, threads, PREFETCH_BYTES);
  step.barrier.wait(walk.prefetch);
}

}  // namespace penstock
