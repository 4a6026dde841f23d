// The operators of attention that torch sees (torch.ops.penstock.*): they check shapes and share
// the work among threads.
#include "attention/attention_work.h"
#include "util/dispatch.h"
#include "util/turned_block.h"

namespace penstock {
namespace {

using Scales = std::optional<at::Tensor>;

// True where the heads of a token lie side by side, and tokens at one distance: in whole blocks, or
// in a part of each slot.
bool is_in_slots(const at::Tensor& blocks) {
  const bool heads = blocks.dim() == 3 || blocks.stride(3) == 1,
             tokens = blocks.size(2) == 1 ||
                      blocks.stride(2) == (blocks.dim() == 3 ? 1 : blocks.size(3));
  return heads && tokens && blocks.stride(0) == blocks.size(1) * blocks.stride(1);
}

// A layer of the pool: of the rows' dtype, or int8 with scales.
void check_pool(const at::Tensor& rows, const at::Tensor& keys, const at::Tensor& values,
                const Scales& key_scales, const Scales& value_scales) {
  TORCH_CHECK(is_in_slots(keys) && is_in_slots(values) && keys.sizes() == values.sizes() &&
              keys.stride(1) == values.stride(1) && keys.size(3) <= MAX_HEAD_DIM);
  TORCH_CHECK(keys.scalar_type() == (key_scales ? at::kChar : rows.scalar_type()) &&
              keys.scalar_type() == values.scalar_type());
  TORCH_CHECK(key_scales.has_value() == value_scales.has_value());
  for (const Scales* scales : {&key_scales, &value_scales})
    if (*scales)
      TORCH_CHECK(is_in_slots(**scales) && (*scales)->scalar_type() == at::kFloat &&
                  (*scales)->stride(1) == (*key_scales).stride(1) &&
                  (*scales)->sizes() == keys.sizes().slice(0, 3));
}

int64_t scale_stride(const Scales& scales) { return scales ? scales->stride(1) : 0; }

float* scale_data(const Scales& scales) { return scales ? scales->data_ptr<float>() : nullptr; }

at::Tensor paged_attention(const at::Tensor& q, const at::Tensor& keys, const at::Tensor& values,
                           const Scales& key_scales, const Scales& value_scales,
                           const at::Tensor& tables, const at::Tensor& query_start,
                           const at::Tensor& context_lens, double scale, int64_t window,
                           double softcap, const std::optional<at::Tensor>& sinks,
                           int64_t values_read, const std::optional<at::Tensor>& slopes) {
  const int64_t T = q.size(0), H = q.size(1), D = q.size(2), K = keys.size(2),
                S = context_lens.size(0);
  check_pool(q, keys, values, key_scales, value_scales);
  TORCH_CHECK(q.stride(2) == 1 && q.stride(1) == D && keys.size(3) == D && H % K == 0);
  TORCH_CHECK(tables.size(0) == S && tables.stride(1) == 1 && query_start.size(0) == S + 1);
  TORCH_CHECK(softcap >= 0 && (!sinks || (sinks->is_contiguous() && sinks->numel() == H &&
                                          sinks->scalar_type() == at::kFloat)));
  TORCH_CHECK(!slopes || (slopes->is_contiguous() && slopes->numel() == H &&
                          slopes->scalar_type() == at::kFloat));
  TORCH_CHECK(values_read >= 0 && values_read <= D);
  // Outputs are turned back in the blocks of the whole head.
  const bool cuts = values_read > 0 && (!key_scales || values_read % turned_head(D) == 0);
  const int64_t DV = cuts ? values_read : D;
  auto out = at::empty({T, H, DV}, q.options());
  const AttentionArgs args{
      .q = q.const_data_ptr(),
      .out = out.data_ptr(),
      .keys = keys.const_data_ptr(),
      .values = values.const_data_ptr(),
      .key_scales = scale_data(key_scales),
      .value_scales = scale_data(value_scales),
      .block_tables = tables.const_data_ptr<int32_t>(),
      .table_stride = tables.stride(0),
      .query_start = query_start.const_data_ptr<int32_t>(),
      .context_lens = context_lens.const_data_ptr<int32_t>(),
      .q_stride = q.stride(0),
      .out_stride = H * DV,
      .slot_stride = keys.stride(1),
      .scale_stride = scale_stride(key_scales),
      .head_dim = int(D),
      .num_heads = int(H),
      .num_kv_heads = int(K),
      .block_size = int(keys.size(1)),
      .value_dim = int(DV),
      .window = window,
      .scale = float(scale),
      .is_bf16 = is_bf16(q),
      .softcap = float(softcap),
      .sinks = sinks ? sinks->const_data_ptr<float>() : nullptr,
      .slopes = slopes ? slopes->const_data_ptr<float>() : nullptr,
  };
  const std::vector<AttentionTask> tasks = attention_tasks(args, S, at::get_num_threads());
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks.size());
  std::vector<Progress> progress(threads);
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    Prefetch nothing;
    for (int64_t thread = first; thread < last; ++thread)
      attend_share(args, nullptr, tasks, progress.data(), nothing, thread, threads);
  });
  return out;
}

at::Tensor rope_and_cache(const at::Tensor& qkv, const at::Tensor& cos, const at::Tensor& sin,
                          at::Tensor& keys, at::Tensor& values, const Scales& key_scales,
                          const Scales& value_scales, const at::Tensor& slots, int64_t num_heads,
                          const std::optional<at::Tensor>& q_norm,
                          const std::optional<at::Tensor>& k_norm, double eps, int64_t parts,
                          bool norms_values) {
  const int64_t T = qkv.size(0), K = keys.size(2), D = keys.size(3);
  check_pool(qkv, keys, values, key_scales, value_scales);
  TORCH_CHECK(parts >= 1 && parts <= 3 && qkv.dim() == 2 && qkv.stride(1) == 1 &&
              qkv.size(1) == (num_heads + (parts - 1) * K) * D);
  TORCH_CHECK(cos.is_contiguous() && sin.is_contiguous() && cos.numel() == T * D / 2 &&
              sin.numel() == T * D / 2);
  TORCH_CHECK(slots.is_contiguous() && slots.size(0) == T &&
              qkv.scalar_type() == cos.scalar_type());
  for (const auto* norm : {&q_norm, &k_norm})
    TORCH_CHECK(!*norm || ((*norm)->is_contiguous() && (*norm)->numel() == D &&
                           ((*norm)->scalar_type() == qkv.scalar_type() ||
                            (*norm)->scalar_type() == at::kFloat)),
                "a norm of the heads has the wrong size or dtype");
  auto q = at::empty({T, num_heads, D}, qkv.options());
  const RopeArgs args{
      .qkv = qkv.const_data_ptr(),
      .qkv_stride = qkv.stride(0),
      .cos = cos.const_data_ptr(),
      .sin = sin.const_data_ptr(),
      .positions = nullptr,
      .q_norm = q_norm ? q_norm->const_data_ptr() : nullptr,
      .k_norm = k_norm ? k_norm->const_data_ptr() : nullptr,
      .q = q.data_ptr(),
      .keys = keys.data_ptr(),
      .values = values.data_ptr(),
      .key_scales = scale_data(key_scales),
      .value_scales = scale_data(value_scales),
      .slots = slots.const_data_ptr<int64_t>(),
      .slot_stride = keys.stride(1),
      .scale_stride = scale_stride(key_scales),
      .num_heads = int(num_heads),
      .num_kv_heads = int(K),
      .head_dim = int(D),
      .eps = float(eps),
      .is_bf16 = is_bf16(qkv),
      .norms_round_once = q_norm && q_norm->scalar_type() != qkv.scalar_type(),
      .parts = int(parts),
      .norms_values = norms_values,
  };
  at::parallel_for(0, T, grain(qkv.size(1)), [&](int64_t first, int64_t last) {
    KERNEL(rope)(args, first, last, 0, int(K));
  });
  return q;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "paged_attention(Tensor q, Tensor keys, Tensor values, Tensor? key_scales, Tensor? "
      "value_scales, Tensor tables, "
      "Tensor query_start, Tensor context_lens, float scale, int window, float softcap=0.0, "
      "Tensor? sinks=None, int values_read=0, Tensor? slopes=None) -> Tensor");
  m.def(
      "rope_and_cache(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
      "Tensor(c!)? key_scales, "
      "Tensor(d!)? value_scales, Tensor slots, int num_heads, Tensor? q_norm, Tensor? k_norm, "
      "float eps, int parts=3, bool norms_values=False) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("paged_attention", paged_attention);
  m.impl("rope_and_cache", rope_and_cache);
}

}  // namespace penstock
