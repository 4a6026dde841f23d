// LoRA adapters in memory (torch.classes.penstock.Adapter), and those of a step's rows
// (torch.classes.penstock.AdapterBatch).
#pragma once
#include <torch/custom_class.h>

#include <atomic>
#include <vector>

#include "linear/linear.h"

namespace penstock {

// One adapter. A site is a linear layer of the model: four of every decoder layer, and the head.
struct Adapter : torch::CustomClassHolder {
  struct Site {
    at::Tensor a, b, scale;
    std::vector<AdapterHalf> halves;
    int64_t inputs;
    AdapterMatrices matrices;
  };
  bool is_bf16;
  std::vector<Site> sites;

  // For each site, in order: A (ranks, inputs), B (bytes), the halves of its panels (any, 3) and
  // the scales of the ranks; all of them empty if the adapter does not change the site.
  Adapter(const std::vector<at::Tensor>& tensors, bool is_bf16);
};

// Rows of a product, and for each adapter of the batch the numbers of its rows.
struct AdaptedRows {
  std::vector<int32_t> adapter;
  std::vector<std::vector<int32_t>> rows;
  AdaptedRows(std::vector<int32_t> adapter, int64_t num_adapters);
};

struct AdapterBatch : torch::CustomClassHolder {
  bool is_bf16;
  std::vector<c10::intrusive_ptr<Adapter>> adapters;
  AdaptedRows all;
  int64_t num_sites;
  // By site and adapter; the most ranks of a site's.
  std::vector<AdapterMatrices> matrices;
  std::vector<int64_t> ranks;

  // `counts` rows at a time have the adapter with the number beside it in `numbers`, or none (-1).
  AdapterBatch(std::vector<c10::intrusive_ptr<Adapter>> adapters,
               const std::vector<int64_t>& numbers, const std::vector<int64_t>& counts);

  // Ranks of the widest shrunk row of any site.
  int64_t most_ranks() const;
  // Raises if site `site` of some adapter does not fit a layer with these numbers of inputs and
  // panels.
  void check(int64_t site, int64_t inputs, int64_t panels) const;
};

// A thread's share of the shrunk rows of site `site`; `next` is shared by all threads. `out` (rows,
// stride) of the dtype of x.
void shrink_share(const AdapterBatch& batch, const AdaptedRows& rows, int64_t site, const void* x,
                  int64_t x_stride, int64_t inputs, void* out, int64_t out_stride,
                  std::atomic<int64_t>& next);

// Elements from a shrunk row to the next.
inline int64_t shrunk_stride(int64_t ranks) { return (ranks + 31) / 32 * 32; }

// The linear operator of ops_linear.cpp; `adapters` null: no row has one.
at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t format, int64_t width,
                  const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& column_scale,
                  const std::optional<at::Tensor>& column_sum,
                  const std::optional<at::Tensor>& column_offset, int64_t gate, bool as_float,
                  const AdapterBatch* adapters, int64_t site);

// Must run before the classes and operators that take a batch are defined.
void define_adapters(torch::Library& library);

}  // namespace penstock
