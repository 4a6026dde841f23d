// How the work of a linear layer is shared: by anybody's threads, each of which calls `multiply_share`.
#pragma once
#include <algorithm>
#include <atomic>

#include "dispatch.h"
#include "linear.h"

namespace penstock {

inline int64_t granule_inputs(Format format) { return format == Format::F32 ? 1 : format == Format::BF16 ? 2 : format == Format::INT8 ? 4 : 8; }

inline int64_t granules_of(Format format, int64_t inputs) {
  const int64_t unit = format == Format::INT4 ? GROUP : granule_inputs(format);
  return (inputs + unit - 1) / unit * unit / granule_inputs(format);
}

// Tasks are blocks of rows times runs of panels.
struct LinearShare {
  // Large enough for the memory to stream, small enough for all threads to end together.
  static constexpr int64_t TASK_BYTES = 128 << 10;

  int64_t rows, panels, panel_bytes, blocks, each, parts;

  LinearShare(const LinearArgs& args, int64_t rows, int64_t panels, int64_t threads)
      : rows(rows), panels(panels), panel_bytes(args.granules * PANEL * 4), blocks((rows + ROW_BLOCK - 1) / ROW_BLOCK) {
    const int64_t most = std::max<int64_t>(1, panels / (threads * 8));
    each = std::max<int64_t>(1, std::min<int64_t>((panels + threads - 1) / threads, std::max(most, TASK_BYTES / panel_bytes)));
    parts = (panels + each - 1) / each;
  }

  int64_t tasks() const { return blocks * parts; }
  const char* weight_at(const LinearArgs& args, int64_t task) const { return args.weight + task % parts * each * panel_bytes; }
};

// One thread's part. It knows its next task before it begins one, and has that one's first panel fetched meanwhile; after
// its last, what `then` points at (null: nothing).
inline void multiply_share(const LinearArgs& args, const LinearShare& share, std::atomic<int64_t>& next, const char* then = nullptr) {
  const int64_t tasks = share.tasks();
  for (int64_t task = next.fetch_add(1); task < tasks;) {
    const int64_t after = next.fetch_add(1), block = task / share.parts, part = task % share.parts;
    KERNEL(multiply)(args, {share.rows * block / share.blocks, share.rows * (block + 1) / share.blocks, part * share.each,
                            std::min(share.panels, (part + 1) * share.each), after < tasks ? share.weight_at(args, after) : then});
    task = after;
  }
}

}  // namespace penstock
