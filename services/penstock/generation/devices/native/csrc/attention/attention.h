// Arguments of the attention kernels and of the writers of the KV pool, and the two builds of each.
#pragma once
#include <cstddef>
#include <cstdint>

#include "util/instruction_sets.h"
#include "util/prefetch.h"

namespace penstock {

// The pool as one layer of it lies in memory: (blocks, block_size, K, D), with (blocks, block_size,
// K) scales for int8. Slots of it may have the keys of other layers, too: a token's are
// `slot_stride` numbers, and its scales `scale_stride`, behind those of the token before.
struct AttentionArgs {
  const void* q;  // (T, H, D), row stride q_stride
  void* out;      // (T, H, value_dim), row stride out_stride
  const void* keys;
  const void* values;
  const float* key_scales;  // null: keys and values are of q's dtype; else their heads
                            // are turned (util/rotate.h)
  const float* value_scales;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* query_start;
  const int32_t* context_lens;
  int64_t q_stride, out_stride, slot_stride, scale_stride;
  int head_dim, num_heads, num_kv_heads, block_size;
  int value_dim;  // dims of an output: the first ones of a value, all but where keys are the values
  int64_t window;  // 0: none
  float scale;
  bool is_bf16;
  float softcap = 0.0f;  // not 0: scores s become softcap * tanh(s / softcap)
  // (H), null: none. A score of each head that takes weight and has no value.
  const float* sinks = nullptr;
  // (H), null: none. A score of a key at position p gets slope * p.
  const float* slopes = nullptr;
};
// Rows [first, first + count) of the rows of one sequence and key/value head: (query, head of the
// group), query first. `heads` above 1 adds the same rows of the following heads: at most
// most_heads() for this number of rows.
struct AttentionTask {
  int seq = 0, kv_head = 0;
  int64_t first = 0;
  int count;
  int heads;
  int64_t cost = 0;
};
constexpr int MAX_HEAD_DIM = 576;
constexpr int MAX_TASK_ROWS = 256;

struct RopeArgs {
  const void* qkv;
  int64_t qkv_stride;
  const void* cos;
  const void* sin;           // (rows, D / 2)
  const int64_t* positions;  // row of cos and sin of each row, or null: its own
  const void* q_norm;        // (D) or null; floats where norms_round_once, else as qkv
  const void* k_norm;
  void* q;
  void* keys;
  void* values;
  float* key_scales;  // null: as in AttentionArgs
  float* value_scales;
  const int64_t* slots;
  int64_t slot_stride, scale_stride;  // as in AttentionArgs
  int num_heads, num_kv_heads, head_dim;
  float eps;
  bool is_bf16;
  bool norms_round_once = false;
  // Of `qkv`: queries, keys and values; without values, which are the keys then, before norm and
  // turn; queries alone, and nothing is written.
  int parts = 3;
  bool norms_values = false;  // without a weight
};

// `next`: the task that the thread probably gets after this one; its first keys are fetched
// meanwhile; may be null. `prefetch`: the memory that it reads after all of its tasks.
#define PENSTOCK_ATTENTION_KERNELS                                                        \
  size_t attention_scratch_bytes();                                                       \
  int most_heads(const AttentionArgs&, int64_t rows);                                     \
  /* Fetches what a task reads first. */                                                  \
  void prepare(const AttentionArgs&, const AttentionTask&);                               \
  void attend(const AttentionArgs&, const AttentionTask&, const AttentionTask* next,      \
              Prefetch& prefetch, void* scratch);                                         \
  /* Rotates these key/value heads and the query heads that go with them. */              \
  void rope(const RopeArgs&, int64_t first, int64_t last, int first_head, int last_head); \
  /* Stores `dims` numbers as int8, turned, and returns their scale. */                   \
  float store_head(const void* x, int8_t* to, int dims, bool is_bf16);
PENSTOCK_DECLARE(PENSTOCK_ATTENTION_KERNELS)
#undef PENSTOCK_ATTENTION_KERNELS

}  // namespace penstock
