// Arguments of the kernels by which an indexer chooses positions, and the two builds of each.
#pragma once
#include <cstddef>
#include <cstdint>

#include "util/instruction_sets.h"

namespace penstock {

// Rows of sequences, as in AttentionArgs; the index keys of one layer as they lie in the pool:
// (blocks, block_size, D), of q's dtype. A call is for the rows [first_row, last_row).
struct IndexArgs {
  const void* q;         // (T, H, D)
  const float* weights;  // (T, H)
  const void* keys;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  float* scores;  // (last_row - first_row, scores_stride)
  int64_t scores_stride;
  int32_t* chosen;  // (T, most)
  int64_t most;
  int num_heads, dim, block_size;
  bool is_bf16;
  bool gives_slots;  // else positions
  int64_t first_row = 0, last_row = 0;
};
constexpr int MAX_INDEX_DIM = 256;
// Positions of a task, whole tiles.
constexpr int64_t INDEX_SPAN = 1024;

#define PENSTOCK_INDEX_KERNELS                                                                   \
  size_t index_scratch_bytes();                                                                  \
  /* Writes the scores of a sequence's rows for the positions from `first` on. */                \
  void score_positions(const IndexArgs&, int64_t seq, int64_t first, void* scratch);             \
  /* Writes the positions that row `row` of a sequence attends to, ascending, or their slots. */ \
  void choose_positions(const IndexArgs&, int64_t seq, int64_t row);
PENSTOCK_DECLARE(PENSTOCK_INDEX_KERNELS)
#undef PENSTOCK_INDEX_KERNELS

}  // namespace penstock
