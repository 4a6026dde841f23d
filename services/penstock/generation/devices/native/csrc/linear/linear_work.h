// The work of a linear layer, shared by threads: each calls `multiply_share`.
#pragma once
#include <algorithm>

#include "linear/compact.h"
#include "linear/gguf_blocks.h"
#include "linear/linear.h"
#include "util/dispatch.h"
#include "util/progress.h"

namespace penstock {

inline int64_t granule_inputs(Format format) {
  return format == Format::F32 ? 1 : format == Format::BF16 ? 2 : format == Format::INT8 ? 4 : 8;
}

inline int64_t granules_of(Format format, int64_t inputs) {
  const int64_t unit = is_grouped(format) ? GROUP : granule_inputs(format);
  return (inputs + unit - 1) / unit * unit / granule_inputs(format);
}

// Byte of a weight at which a panel begins; the end of the last for the number of panels.
inline int64_t panel_offset(const LinearArgs& args, int64_t panel) {
  if (args.is_compact) return panel * CompactPanel::bytes(args.granules);
  return args.format == Format::GGUF ? PanelTable(args.weight).offset(panel)
                                     : panel * args.granules * PANEL * 4;
}

// Bytes from a row to the next where many are multiplied at once: an odd number of cache lines. A
// power of two would put the rows of a tile on the same few lines of the first-level cache, which
// then holds none of them.
inline int64_t spread(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }
// Rows that still fit on such lines.
constexpr int64_t CROWD = 8;

// Tasks are blocks of rows times runs of panels, and a thread's share is a run of tasks: it reads
// the weight from end to end, which suits the hardware's prefetch, and only then helps others.
struct LinearShare {
  // Small enough for all threads to end together.
  static constexpr int64_t TASK_BYTES = 64 << 10;

  int64_t rows, panels, threads, blocks, parts;

  LinearShare(const LinearArgs& args, int64_t rows, int64_t panels, int64_t threads)
      : rows(rows), panels(panels), threads(threads), blocks((rows + ROW_BLOCK - 1) / ROW_BLOCK) {
    const int64_t each =
        std::max<int64_t>(KERNEL(panels_at_once)(args.format, rows), TASK_BYTES / mean_panel(args));
    // The same number for each thread, if there are enough.
    const int64_t turns = std::max<int64_t>(1, (panels + each * threads - 1) / (each * threads));
    parts = std::min(panels, turns * threads);
  }

  // Bytes of a panel; at least 1.
  int64_t mean_panel(const LinearArgs& args) const {
    const int64_t all = panel_offset(args, panels) - panel_offset(args, 0);
    return std::max<int64_t>(1, panels > 0 ? all / panels : 0);
  }
  int64_t first_of(int64_t thread) const { return blocks * parts * thread / threads; }
  LinearTask task(int64_t number) const {
    const int64_t block = number / parts, part = number % parts;
    return {
        .first_row = rows * block / blocks,
        .last_row = rows * (block + 1) / blocks,
        .first_panel = panels * part / parts,
        .last_panel = panels * (part + 1) / parts,
    };
  }
  // Bytes of the weight that `thread` reads in its own share, where rows are one block.
  int64_t bytes_of(const LinearArgs& args, int64_t thread) const {
    const int64_t first = first_of(thread), end = first_of(thread + 1);
    if (first == end) return 0;
    return std::max<int64_t>(0, panel_offset(args, task(end - 1).last_panel) -
                                    panel_offset(args, task(first).first_panel));
  }
  // The bytes that `thread` will read first.
  const char* beginning(const LinearArgs& args, int64_t thread) const {
    return args.weight + panel_offset(args, task(first_of(thread)).first_panel);
  }
};

// One thread's part; `progress` is that of all threads.
inline void multiply_share(const LinearArgs& args, const LinearShare& share, Progress* progress,
                           int64_t thread) {
  for (int64_t i = 0; i < share.threads; ++i) {
    const int64_t owner = (thread + i) % share.threads, end = share.first_of(owner + 1);
    for (int64_t task; (task = share.first_of(owner) + progress[owner].next.fetch_add(1)) < end;)
      KERNEL(multiply)(args, share.task(task));
  }
}

}  // namespace penstock
