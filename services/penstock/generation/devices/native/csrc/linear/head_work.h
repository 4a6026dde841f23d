// Products of heads with a weight of its own each, all of one size, shared by threads.
#pragma once
#include "linear/linear_work.h"

namespace penstock {

// Rows of heads in memory: numbers from a row to the next, and from a head to the next.
struct HeadRows {
  void* data;
  int64_t row_stride, head_stride;
};

struct HeadProducts {
  // Of the first head; the others lie these bytes further on.
  LinearArgs args;
  int64_t x_step, weight_step, out_step;
  int64_t heads, panels;

  static int64_t panels_of(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }
  // Bytes of a head's packed weight.
  static int64_t weight_bytes(Format format, int64_t inputs, int64_t outputs) {
    return granules_of(format, inputs) * PANEL * 4 * panels_of(outputs);
  }

  // `format`: of rows, weights and outputs, bfloat16 or float32. `weights`: of one head after
  // another.
  HeadProducts(Format format, HeadRows x, const void* weights, HeadRows out, int64_t heads,
               int64_t inputs, int64_t outputs)
      : args{
            .format = format,
            .x = x.data,
            .x_stride = x.row_stride / granule_inputs(format),
            .weight = (const char*)weights,
            .granules = granules_of(format, inputs),
            .bias = nullptr,
            .row_scale = nullptr,
            .column_scale = nullptr,
            .scale_is_bytes = false,
            .column_sum = nullptr,
            .column_offset = nullptr,
            .row_sum = nullptr,
            .out = out.data,
            .width = outputs,
            .out_stride = out.row_stride,
            .out_bf16 = format == Format::BF16,
            .gate = Gate::NONE,
        },
        x_step(x.head_stride * size_of(format)),
        weight_step(weight_bytes(format, inputs, outputs)),
        out_step(out.head_stride * size_of(format)),
        heads(heads),
        panels(panels_of(outputs)) {}

 private:
  static int64_t size_of(Format format) { return format == Format::BF16 ? 2 : 4; }
};

// One thread's part: a run of the tasks, which are in the order of the heads, then the rest of
// other threads' tasks. `progress` is that of all threads.
inline void multiply_heads(const HeadProducts& of, int64_t rows, Progress* progress, int64_t thread,
                           int64_t threads) {
  const LinearShare share(of.args, rows, of.panels, threads);
  const int64_t each = share.blocks * share.parts, count = each * of.heads;
  for (int64_t i = 0; i < threads; ++i) {
    const int64_t owner = (thread + i) % threads, first = count * owner / threads,
                  end = count * (owner + 1) / threads;
    for (int64_t task; (task = first + progress[owner].next.fetch_add(1)) < end;) {
      const int64_t head = task / each;
      LinearArgs args = of.args;
      args.x = (const char*)args.x + head * of.x_step;
      args.weight += head * of.weight_step;
      args.out = (char*)args.out + head * of.out_step;
      KERNEL(multiply)(args, share.task(task % each));
    }
  }
}

}  // namespace penstock
