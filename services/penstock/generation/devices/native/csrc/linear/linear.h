// Arguments of the linear layers. A weight is kept in panels of 32 outputs; within a panel the
// inputs are granules of 4 bytes (2 bfloat16, 1 float32, 4 int8 or 8 int4), and a granule's 32
// outputs lie side by side: (panels, granules, 32, 4 B).
#pragma once
#include <cstdint>
#include <initializer_list>

#include "util/instruction_sets.h"
#include "util/turned_block.h"

namespace penstock {

constexpr int PANEL = 32;
// Inputs that share a scale in int4.
constexpr int GROUP = 32;
// Steps of a zero of int4 between two of its numbers.
constexpr int ZERO_STEPS = 16;
// Most rows of a task, which stay in the cache while the panels go by: whole tiles.
constexpr int64_t ROW_BLOCK = 264;

// ROTATED_INT8 differs from INT8 only in the quantisation of a weight and its rows; the product is
// INT8's.
// GGUF has its parts and their types in the weight itself (gguf_blocks.h). TURNED_GROUPS is Q8_0 of
// turned rows, and differs from GGUF in the same way.
enum class Format : int {
  F32 = 0,
  BF16 = 1,
  INT8 = 2,
  INT4 = 3,
  ROTATED_INT8 = 4,
  GGUF = 5,
  TURNED_GROUPS = 6,
};
constexpr Format LAST_FORMAT = Format::TURNED_GROUPS;

// True if rows are quantised by groups, and not as a whole.
inline bool is_grouped(Format format) { return format == Format::INT4 || format == Format::GGUF; }
// Sums of a group of a row: GGUF may have two scales in one.
inline int64_t sums_of_group(Format format) { return format == Format::GGUF ? 2 : 1; }

inline Format product_of(Format format) {
  if (format == Format::TURNED_GROUPS) return Format::GGUF;
  return format == Format::ROTATED_INT8 ? Format::INT8 : format;
}
// Inputs of a block that is turned before a row is rounded; 1: nothing is turned.
inline int64_t rotation_of(Format format, int64_t inputs) {
  const bool turns = format == Format::ROTATED_INT8 || format == Format::TURNED_GROUPS;
  return turns ? turned_block(inputs) : 1;
}

// Bytes of the scales of int4 that is quantised here: of a panel first a line of its outputs' units
// in bfloat16, and then of each group a line with the outputs' scales and zeros, a byte each.
inline int64_t byte_scales(int64_t panels, int64_t groups) {
  return panels * (1 + groups) * 2 * PANEL;
}

// The function of the gates of a gated weight; numbered as core/model_config.py's Activation.
enum class Gate : int { NONE = 0, SILU = 1, GELU_TANH = 2, CLAMPED = 3 };

// Adjacent columns of an adapter's B: a granule of them is a cache line.
constexpr int HALF = PANEL / 2;

// Half a panel of an adapter's B: `count` granules of (HALF, 4 B) at byte `offset`, for those of
// the shrunk row from `first` on.
struct AdapterHalf {
  int64_t offset;
  int64_t first, count;
};

// A LoRA adapter's matrices of one linear layer: it adds B (A x * scale). Those of several modules
// in one product are side by side, each with whole granules of ranks.
struct AdapterMatrices {
  int64_t ranks;       // 0: the adapter leaves this layer as it is
  const void* a;       // (ranks, inputs), in the dtype of x
  const float* scale;  // (ranks)
  const char* b;
  const AdapterHalf* halves;  // (panels * 2)
};

// The adapters of the rows of a product.
struct AdapterRows {
  const int32_t* adapter;  // (rows): a row's place in `matrices`, -1: it has none
  const AdapterMatrices* matrices;
  bool is_bf16;
  const void* shrunk;  // (rows, stride) granules: A x * scale, in the dtype of x
  int64_t stride;
};

struct ShrinkArgs {
  const void* x;  // (any, x_stride) elements
  int64_t x_stride, inputs;
  bool is_bf16;
  const AdapterMatrices* matrices;
  const int32_t* rows;  // numbers of the rows of x, and of `out`
  void* out;
  int64_t out_stride;  // in elements
};

struct LinearArgs {
  Format format;
  const void* x;     // (rows, x_stride) granules; int8: unsigned, 128 is 0; int4: signed
  int64_t x_stride;  // in granules
  const char* weight;
  int64_t granules;          // of a row of the weight
  const float* bias;         // (panels * 32) or null
  const float* row_scale;    // int8: (rows); int4, blocks: (rows, groups)
  const void* column_scale;  // int8: (panels * 32) floats; int4: (panels, groups, 32) floats, or
                             // the bytes of byte_scales
  bool scale_is_bytes;
  const int32_t* column_sum;   // int8: (panels * 32)
  const float* column_offset;  // int4: as column_scale, of numbers from 0 to 15; null: they are
                               // from -8 to 7
  const int32_t* row_sum;      // int4: (rows, groups); blocks: (rows, groups, 2)
  void* out;                   // (rows, width)
  int64_t width, out_stride;   // in elements
  bool out_bf16;
  Gate gate;  // not NONE: a panel is 16 gates and the 16 values that they gate, and out, such as
              // silu(gate) * value, is half as wide
  // Not null: nothing is written to `out`; (rows, PANEL) of the highest output in each column of
  // the panels so far, NaN where there was one, and of the first panel that has it.
  float* highest = nullptr;
  int32_t* highest_panel = nullptr;
  // Null: no row has an adapter.
  const AdapterRows* adapters = nullptr;
  // BF16: the weight is as compact.h has it.
  bool is_compact = false;
};

// Rows times panels of one thread.
struct LinearTask {
  int64_t first_row, last_row, first_panel, last_panel;
};

struct QuantizeArgs {
  const void* x;  // (rows, width)
  int64_t width, x_stride;
  bool is_bf16;
  bool grouped;  // int4's and blocks': signed, a scale and sums for each group; else unsigned with
                 // 128 as 0, a scale a row
  int64_t sums;  // of a group: 1 or 2, of its halves
  int64_t rotation;  // inputs of a block, 1 for none; grouped: of blocks' alone
  int8_t* out;       // (rows, padded)
  int64_t padded;    // a multiple of a granule, of a group where grouped
  int64_t stride;
  float* scale;
  int32_t* sum;
};

// A packed weight, and what the rows are that it is made of.
struct PackArgs {
  Format format;
  bool is_bf16;
  int64_t inputs, granules;
  int64_t rotation;  // of INT8: inputs of a block, 1 for none
  char* weight;
  void* scale;  // float; int4's bytes
  int32_t* sum;
  const float* importance;  // int4: (inputs), none negative; null: all are alike
};

#define PENSTOCK_LINEAR_KERNELS                                                                    \
  /* Fewest panels of a task, for its number of rows. */                                           \
  int64_t panels_at_once(Format, int64_t rows);                                                    \
  void multiply(const LinearArgs&, const LinearTask&);                                             \
  void quantize(const QuantizeArgs&, int64_t first, int64_t last);                                 \
  /* `count` dense rows to the columns from `column` on; false: int8 or int4, and a number is none \
   * or infinite. */                                                                               \
  bool pack(const PackArgs&, const void* rows, int count, int64_t panel, int column);              \
  /* Of ShrinkArgs::rows those from `first` on, and ranks likewise. */                             \
  void shrink(const ShrinkArgs&, int64_t first, int64_t last, int64_t first_rank,                  \
              int64_t last_rank);
PENSTOCK_DECLARE(PENSTOCK_LINEAR_KERNELS)
#undef PENSTOCK_LINEAR_KERNELS

}  // namespace penstock
