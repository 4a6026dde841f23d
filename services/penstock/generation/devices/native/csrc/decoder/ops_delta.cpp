// The operator of the gated delta rule that torch sees (torch.ops.penstock.delta_rule).
#include <vector>

#include "decoder/delta_work.h"
#include "util/dispatch.h"
#include "util/progress.h"

namespace penstock {
namespace {

const float* delta_floats(const at::Tensor& x, int64_t count, const char* name) {
  TORCH_CHECK(x.is_contiguous() && x.scalar_type() == at::kFloat && x.numel() == count, name,
              " has the wrong size or dtype");
  return x.const_data_ptr<float>();
}

// Calls `work` with every sequence and head. `width`: elements that a head handles for a row.
template <typename F>
void over_heads(const int32_t* starts, int64_t sequences, int64_t heads, int64_t width, F work) {
  const int64_t most = at::get_num_threads();
  const std::vector<HeadTask> tasks = head_tasks(starts, sequences, heads, most);
  const int64_t worth = starts[sequences] * heads / grain(width),
                threads =
                    std::min<int64_t>({most, int64_t(tasks.size()), std::max<int64_t>(1, worth)});
  Progress progress;
  at::parallel_for(0, threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread) take_heads(tasks, progress.next, work);
  });
}

// `before` (slots, kernel - 1, channels) and `states` (slots, value heads, key dims, value dims):
// both may be views with a stride of slots. `slots`, `kept` and `is_new` (sequences) int64.
at::Tensor delta_rule(const at::Tensor& mixed, const at::Tensor& numbers, const at::Tensor& conv,
                      const at::Tensor& decay, const at::Tensor& bias, const at::Tensor& norm,
                      double eps, int64_t key_heads, at::Tensor& before, at::Tensor& states,
                      const at::Tensor& slots, const at::Tensor& query_start,
                      const at::Tensor& kept, const at::Tensor& is_new) {
  TORCH_CHECK(mixed.dim() == 2 && numbers.dim() == 2 && conv.dim() == 2 && before.dim() == 3 &&
              states.dim() == 4);
  const int64_t T = mixed.size(0), S = slots.numel(), H = states.size(1), K = states.size(2),
                V = states.size(3), kernel = conv.size(0), C = conv.size(1);
  TORCH_CHECK(key_heads > 0 && K > 0 && V > 0 && H > 0 && H % key_heads == 0 && kernel > 0 &&
                  C == 2 * key_heads * K + H * V,
              "the heads do not fit the channels");
  TORCH_CHECK(mixed.size(1) == C + H * V && mixed.stride(1) == 1 && numbers.size(0) == T &&
                  numbers.size(1) == 2 * H && numbers.stride(1) == 1,
              "the rows do not fit the heads");
  TORCH_CHECK(numbers.scalar_type() == mixed.scalar_type() &&
              before.scalar_type() == mixed.scalar_type());
  TORCH_CHECK(before.size(1) == kernel - 1 && before.size(2) == C &&
              (kernel == 1 || (before.stride(2) == 1 && before.stride(1) == C)));
  TORCH_CHECK(states.scalar_type() == at::kFloat && states.stride(3) == 1 &&
              states.stride(2) == V && states.stride(1) == K * V &&
              before.size(0) == states.size(0));
  for (const at::Tensor* one : {&slots, &kept, &is_new})
    TORCH_CHECK(one->is_contiguous() && one->scalar_type() == at::kLong && one->numel() == S);
  TORCH_CHECK(query_start.is_contiguous() && query_start.scalar_type() == at::kInt &&
              query_start.numel() == S + 1);
  const int64_t *places = slots.const_data_ptr<int64_t>(), *keeps = kept.const_data_ptr<int64_t>();
  const int32_t* starts = query_start.const_data_ptr<int32_t>();
  TORCH_CHECK(starts[0] == 0 && starts[S] == T, "the sequences have other rows");
  for (int64_t s = 0; s < S; ++s)
    TORCH_CHECK(places[s] >= 0 && places[s] < states.size(0) && starts[s] < starts[s + 1] &&
                    keeps[s] >= 1 && keeps[s] <= starts[s + 1] - starts[s],
                "a sequence has no slot, no rows, or keeps others");
  auto out = at::empty({T, H * V}, mixed.options());
  auto turned = at::empty({T, C}, mixed.options().dtype(at::kFloat));
  auto summed = at::empty({T, H * V}, turned.options());
  const DeltaArgs args{
      .mixed = mixed.const_data_ptr(),
      .numbers = numbers.const_data_ptr(),
      .mixed_stride = mixed.stride(0),
      .numbers_stride = numbers.stride(0),
      .conv = delta_floats(conv, kernel * C, "conv"),
      .decay = delta_floats(decay, H, "decay"),
      .bias = delta_floats(bias, H, "bias"),
      .norm = delta_floats(norm, V, "norm"),
      .eps = float(eps),
      .is_bf16 = is_bf16(mixed),
      .key_heads = int(key_heads),
      .value_heads = int(H),
      .key_dim = int(K),
      .value_dim = int(V),
      .kernel = int(kernel),
      .before = before.data_ptr(),
      .states = states.data_ptr<float>(),
      .before_stride = before.stride(0),
      .state_stride = states.stride(0),
      .slots = places,
      .query_start = starts,
      .kept = keeps,
      .is_new = is_new.const_data_ptr<int64_t>(),
      .turned = turned.data_ptr<float>(),
      .summed = summed.data_ptr<float>(),
      .out = out.data_ptr(),
      .out_stride = H * V,
  };
  over_heads(starts, S, args.turned_heads(), kernel * std::max(K, V),
             [&](int64_t sequence, int64_t head) { KERNEL(convolve_head)(args, sequence, head); });
  over_heads(starts, S, H, K * V,
             [&](int64_t sequence, int64_t head) { KERNEL(delta_head)(args, sequence, head); });
  return out;
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "delta_rule(Tensor mixed, Tensor numbers, Tensor conv, Tensor decay, Tensor bias, Tensor "
      "norm, float eps, int key_heads, Tensor(a!) before, Tensor(b!) states, Tensor slots, Tensor "
      "query_start, Tensor kept, Tensor is_new) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("delta_rule", delta_rule); }

}  // namespace penstock
