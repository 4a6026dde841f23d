// LoRA adapters as classes of torch, and the work of their first half, shared by threads.
#include <numeric>

#include "linear/adapters.h"
#include "util/dispatch.h"

namespace penstock {
namespace {

constexpr int64_t TENSORS_A_SITE = 4;
// Ranks and rows of a task: a part of A stays in the second-level cache while the rows go by.
constexpr int64_t TASK_RANKS = 16, TASK_ROWS = 64;

Adapter::Site site_of(const at::Tensor& a, const at::Tensor& b, const at::Tensor& halves,
                      const at::Tensor& scale, bool is_bf16) {
  Adapter::Site site{.a = a, .b = b, .scale = scale, .halves = {}, .inputs = 0, .matrices = {}};
  if (a.numel() == 0) return site;
  const auto type = is_bf16 ? at::kBFloat16 : at::kFloat;
  const int64_t granule = is_bf16 ? 2 : 1;
  TORCH_CHECK(
      a.dim() == 2 && a.is_contiguous() && a.scalar_type() == type && a.size(0) % granule == 0,
      "an adapter's A must be whole granules of ranks");
  TORCH_CHECK(b.is_contiguous() && b.scalar_type() == at::kByte);
  TORCH_CHECK(scale.is_contiguous() && scale.scalar_type() == at::kFloat &&
              scale.numel() == a.size(0));
  TORCH_CHECK(halves.is_contiguous() && halves.scalar_type() == at::kLong && halves.dim() == 2 &&
              halves.size(1) == 3);
  const int64_t* numbers = halves.const_data_ptr<int64_t>();
  for (int64_t h = 0; h < halves.size(0); ++h, numbers += 3) {
    const AdapterHalf half{.offset = numbers[0], .first = numbers[1], .count = numbers[2]};
    TORCH_CHECK(half.offset >= 0 && half.first >= 0 && half.count >= 0 &&
                    half.offset + half.count * HALF * 4 <= b.numel() &&
                    (half.first + half.count) * granule <= a.size(0),
                "a half of an adapter's B is out of its bounds");
    site.halves.push_back(half);
  }
  site.inputs = a.size(1);
  return site;
}

}  // namespace

Adapter::Adapter(const std::vector<at::Tensor>& tensors, bool is_bf16) : is_bf16(is_bf16) {
  TORCH_CHECK(tensors.size() % TENSORS_A_SITE == 0);
  for (size_t i = 0; i < tensors.size(); i += TENSORS_A_SITE)
    sites.push_back(site_of(tensors[i], tensors[i + 1], tensors[i + 2], tensors[i + 3], is_bf16));
  // Only after the vectors have stopped moving.
  for (Site& site : sites)
    if (site.a.numel() > 0)
      site.matrices = {
          .ranks = site.a.size(0),
          .a = site.a.const_data_ptr(),
          .scale = site.scale.const_data_ptr<float>(),
          .b = (const char*)site.b.const_data_ptr(),
          .halves = site.halves.data(),
      };
}

AdaptedRows::AdaptedRows(std::vector<int32_t> numbers, int64_t num_adapters)
    : adapter(std::move(numbers)), rows(num_adapters) {
  for (size_t row = 0; row < adapter.size(); ++row)
    if (adapter[row] >= 0) rows[adapter[row]].push_back(int32_t(row));
}

static std::vector<int32_t> by_row(const std::vector<int64_t>& numbers,
                                   const std::vector<int64_t>& counts, int64_t num_adapters) {
  TORCH_CHECK(numbers.size() == counts.size());
  std::vector<int32_t> adapter;
  for (size_t i = 0; i < numbers.size(); ++i) {
    TORCH_CHECK(numbers[i] >= -1 && numbers[i] < num_adapters && counts[i] >= 0);
    adapter.insert(adapter.end(), counts[i], int32_t(numbers[i]));
  }
  return adapter;
}

AdapterBatch::AdapterBatch(std::vector<c10::intrusive_ptr<Adapter>> list,
                           const std::vector<int64_t>& numbers, const std::vector<int64_t>& counts)
    : is_bf16(!list.empty() && list[0]->is_bf16),
      adapters(std::move(list)),
      all(by_row(numbers, counts, adapters.size()), adapters.size()),
      num_sites(adapters.empty() ? 0 : adapters[0]->sites.size()),
      ranks(num_sites) {
  for (const auto& adapter : adapters)
    TORCH_CHECK(int64_t(adapter->sites.size()) == num_sites && adapter->is_bf16 == is_bf16,
                "adapters of different models");
  for (int64_t site = 0; site < num_sites; ++site)
    for (const auto& adapter : adapters) {
      matrices.push_back(adapter->sites[site].matrices);
      ranks[site] = std::max(ranks[site], matrices.back().ranks);
    }
}

int64_t AdapterBatch::most_ranks() const {
  return ranks.empty() ? 0 : *std::max_element(ranks.begin(), ranks.end());
}

void AdapterBatch::check(int64_t site, int64_t inputs, int64_t panels) const {
  TORCH_CHECK(site >= 0 && site < num_sites, "the adapters have no such site");
  for (const auto& adapter : adapters) {
    const Adapter::Site& one = adapter->sites[site];
    TORCH_CHECK(one.matrices.ranks == 0 ||
                    (one.inputs == inputs && int64_t(one.halves.size()) == panels * (PANEL / HALF)),
                "an adapter is not for this layer");
  }
}

void shrink_share(const AdapterBatch& batch, const AdaptedRows& rows, int64_t site, const void* x,
                  int64_t x_stride, int64_t inputs, void* out, int64_t out_stride,
                  std::atomic<int64_t>& next) {
  const int64_t num_adapters = batch.adapters.size();
  int64_t number = 0, mine = next.fetch_add(1);
  for (int64_t i = 0; i < num_adapters; ++i) {
    const AdapterMatrices& matrices = batch.matrices[site * num_adapters + i];
    const int64_t count = rows.rows[i].size();
    const ShrinkArgs args{
        .x = x,
        .x_stride = x_stride,
        .inputs = inputs,
        .is_bf16 = batch.is_bf16,
        .matrices = &matrices,
        .rows = rows.rows[i].data(),
        .out = out,
        .out_stride = out_stride,
    };
    for (int64_t rank = 0; rank < matrices.ranks; rank += TASK_RANKS)
      for (int64_t row = 0; row < count; row += TASK_ROWS) {
        if (number++ != mine) continue;
        KERNEL(shrink)(args, row, std::min(count, row + TASK_ROWS), rank,
                       std::min(matrices.ranks, rank + TASK_RANKS));
        mine = next.fetch_add(1);
      }
  }
}

void define_adapters(torch::Library& library) {
  library.class_<Adapter>("Adapter").def(torch::init<const std::vector<at::Tensor>&, bool>());
  library.class_<AdapterBatch>("AdapterBatch")
      .def(torch::init<std::vector<c10::intrusive_ptr<Adapter>>, const std::vector<int64_t>&,
                       const std::vector<int64_t>&>())
      .def("linear",
           [](const c10::intrusive_ptr<AdapterBatch>& self, int64_t site, const at::Tensor& x,
              const at::Tensor& weight, int64_t format, int64_t width,
              const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& column_scale,
              const std::optional<at::Tensor>& column_sum,
              const std::optional<at::Tensor>& column_offset, int64_t gate, bool as_float) {
             return linear(x, weight, format, width, bias, column_scale, column_sum, column_offset,
                           gate, as_float, self.get(), site);
           });
}

}  // namespace penstock
