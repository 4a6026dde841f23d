// Paged attention: which of three ways a task of decode rows, drafts or a prefill chunk takes. All
// give a row the same bits.
//
// * attention_prefill.h: SIMD lanes are query rows. Any number of rows, every format, every
// instruction set.
// * attention_decode.h: lanes are keys, then dims. Up to MAX_DECODE_ROWS rows, AVX-512.
// * attention_decode_bf16.h: as that, over bf16 keys and values where they lie in the pool: nothing
// is turned or copied.
//
// bf16 is multiplied in pairs (vdpbf16ps, bfdot) and int8 in fours (vpdpbusd, usdot) where the CPU
// has such instructions, else in fp32.
#include "attention/attention_decode.h"
#include "attention/attention_decode_bf16.h"
#include "attention/attention_prefill.h"

namespace penstock {
namespace NS {

template <typename T, typename S, Mode MODE>
static void run(const AttentionArgs& a, const AttentionTask& task, const AttentionTask* next,
                void* scratch) {
#ifdef __AVX512BF16__
  if constexpr (MODE != Mode::FLOATS || std::is_same_v<S, float>)
    if (task.count <= MAX_DECODE_ROWS && a.head_dim % L == 0 && a.value_dim % L == 0)
      return attend_decode<T, S, MODE>(a, task, next, *(DecodeWork*)scratch);
#endif
  if (task.count <= L)
    attend_prefill<T, S, MODE>(a, task, *(PrefillWork<1, 1>*)scratch);
  else if (task.count <= 2 * L)
    attend_prefill<T, S, MODE>(a, task, *(PrefillWork<2, 1>*)scratch);
  else
    attend_prefill<T, S, MODE>(a, task, *(PrefillWork<4, BLOCKS>*)scratch);
}

#ifdef PENSTOCK_TILES
static void run_tiled(const AttentionArgs& a, const AttentionTask& task, const AttentionTask* next,
                      Prefetch& prefetch, void* scratch) {
  if (can_attend_decode_bf16(a, task)) {
    set_decode_shapes(task.count, MAX_DECODE_ROWS);
    attend_decode_bf16<true>(a, task, next, prefetch, *(Bf16DecodeWork*)scratch);
  } else {
    set_prefill_shapes();
    if (task.count <= L)
      attend_prefill<bf16, bf16, Mode::PAIRS, 1, 1, true>(a, task, *(PrefillWork<1, 1>*)scratch);
    else if (task.count <= 2 * L)
      attend_prefill<bf16, bf16, Mode::PAIRS, 2, 1, true>(a, task, *(PrefillWork<2, 1>*)scratch);
    else
      attend_prefill<bf16, bf16, Mode::PAIRS, 4, BLOCKS, true>(a, task,
                                                               *(PrefillWork<4, BLOCKS>*)scratch);
  }
  release_tiles();
}
#endif

template <typename T>
static void run_stored(const AttentionArgs& a, const AttentionTask& task, const AttentionTask* next,
                       void* scratch) {
  constexpr Mode quads = HAS_UNITS ? Mode::QUADS : Mode::FLOATS;
  if (a.key_scales == nullptr)
    run<T, T, Mode::FLOATS>(a, task, next, scratch);
  else if (a.head_dim % 4 == 0)
    run<T, int8_t, quads>(a, task, next, scratch);
  else
    run<T, int8_t, Mode::FLOATS>(a, task, next, scratch);
}

#ifdef __AVX512BF16__
size_t attention_scratch_bytes() {
  return std::max(sizeof(PrefillWork<4, BLOCKS>), sizeof(Bf16DecodeWork));
}
int most_heads(const AttentionArgs& a, int64_t rows) {
  return can_attend_decode_bf16(a, {.count = int(rows), .heads = 1}) ? MOST_HEADS : 1;
}
void prepare(const AttentionArgs& a, const AttentionTask& task) {
  if (can_attend_decode_bf16(a, task)) fetch_first(a, task);
}
#else
size_t attention_scratch_bytes() { return sizeof(PrefillWork<4, BLOCKS>); }
int most_heads(const AttentionArgs&, int64_t) { return 1; }
void prepare(const AttentionArgs&, const AttentionTask&) {}
#endif
void attend(const AttentionArgs& a, const AttentionTask& task, const AttentionTask* next,
            Prefetch& prefetch, void* scratch) {
  constexpr Mode pairs = HAS_UNITS ? Mode::PAIRS : Mode::FLOATS;
#ifdef __AVX512BF16__
#ifdef PENSTOCK_TILES
  if (has_tile_products(a)) return run_tiled(a, task, next, prefetch, scratch);
#endif
  if (can_attend_decode_bf16(a, task))
    return attend_decode_bf16<false>(a, task, next, prefetch, *(Bf16DecodeWork*)scratch);
#endif
  if (!a.is_bf16)
    run_stored<float>(a, task, next, scratch);
  else if (a.key_scales == nullptr && a.head_dim % 2 == 0)
    run<bf16, bf16, pairs>(a, task, next, scratch);
  else
    run_stored<bf16>(a, task, next, scratch);
}

}  // namespace NS
}  // namespace penstock
