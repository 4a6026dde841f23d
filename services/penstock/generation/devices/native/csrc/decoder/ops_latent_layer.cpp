// A decoder's layer with compressed keys and values: see latent_layer.h.
#include <algorithm>
#include <cstring>
#include <vector>

#include "decoder/decoder.h"

namespace penstock {

void Decoder::attend_latent(Step& step, Walk& walk, size_t i, Inputs normed,
                            const AttentionArgs& attention, const RopeArgs& rope) const {
  const Layer& layer = layers[i];
  const LatentLayer& own = *layer.latent;
  LatentStep& latents = *step.latent;
  const int64_t threads = step.barrier.threads();
  const auto progress = [&] { return &step.progress[walk.shared++ * threads]; };
  linear(step, walk, layer.qkv, NO_SITE, normed, own.queries ? latents.narrow : latents.queries,
         &own.row);
  // The rows of the first product may be quantised in the place of those of the second.
  if (own.row.format >= Format::INT8) step.barrier.wait(walk.prefetch);
  linear(step, walk, own.row, NO_SITE, normed, latents.row,
         own.queries ? &own.queries->up : &layer.output);
  step.barrier.wait(walk.prefetch);
  if (own.queries) {
    linear(step, walk, own.queries->up, NO_SITE, normed_queries(step, walk, *own.queries),
           latents.queries, &layer.output);
    step.barrier.wait(walk.prefetch);
  }
  // The products read other dims of the queries than those that turn.
  const int64_t each = grain(own.sizes.queries()), parts = (walk.rows + each - 1) / each;
  auto& next = step.counters[walk.stage++];
  for (int64_t part; (part = next.fetch_add(1)) < parts;)
    latents.finish(own, rope, latent_eps, part * each, std::min(walk.rows, (part + 1) * each));
  multiply_heads(latents.keys(own), walk.rows, progress(), walk.thread, threads);
  const bool picks = step.wanted != nullptr && i == step.picked.layer;
  const HeadTasks& of_heads = step.tasks[kind_of[i]];
  const std::vector<AttentionTask>& tasks = picks ? of_heads.picking : of_heads.all;
  if (walk.thread < int64_t(tasks.size())) KERNEL(prepare)(attention, tasks[walk.thread]);
  step.barrier.wait(walk.prefetch);
  attend_share(attention, nullptr, tasks, progress(), walk.prefetch, walk.thread, threads);
  step.barrier.wait(walk.prefetch);
  multiply_heads(latents.values(own, step.buffers.attended), walk.rows, progress(), walk.thread,
                 threads);
  step.barrier.wait(walk.prefetch);
}

Inputs Decoder::normed_queries(Step& step, Walk& walk, const LatentQueries& queries) const {
  LatentStep& latents = *step.latent;
  const int64_t width = latents.narrow.size(1), stride = latents.normed.stride(0);
  const bool small = is_small(step.rows, width);
  char* out = (char*)latents.normed.data_ptr() +
              (small ? walk.thread * step.rows * stride * latents.normed.itemsize() : 0);
  const auto work = [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const int64_t size = latents.narrow.itemsize();
      char* to = out + row * stride * size;
      // The kernel reads and writes one row.
      std::memcpy(to, (const char*)latents.narrow.const_data_ptr() + row * width * size,
                  width * size);
      KERNEL(add_norm)({.hidden = to,
                        .x = nullptr,
                        .weight = queries.norm.const_data_ptr(),
                        .out = to,
                        .width = width,
                        .out_stride = stride,
                        .eps = latent_eps,
                        .is_bf16 = step.is_bf16,
                        .rounds_once = step.rounds_once},
                       0, 1);
    }
  };
  if (small)
    by_row(walk, [&](int64_t row) { work(row, row + 1); });
  else
    over_rows(step, walk, width, work);
  return {out, stride};
}

}  // namespace penstock
