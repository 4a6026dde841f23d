// The rows of compressed keys and values, and their queries: torch.ops.penstock.finish_latent_rows
// (layers/latent_rows.py has the same in torch's operators).
#include <ATen/Parallel.h>
#include <torch/library.h>

#include "decoder/latent_rows.h"

namespace penstock {
namespace {

template <typename T>
void finish_rows(at::Tensor& q, at::Tensor& row, const at::Tensor& norm, const at::Tensor& cos,
                 const at::Tensor& sin, int64_t heads, float eps, int64_t first, int64_t last) {
  const int64_t half = cos.size(-1), query = q.size(1) / heads, width = row.size(1);
  T *queries = (T*)q.data_ptr(), *rows = (T*)row.data_ptr();
  for (int64_t t = first; t < last; ++t) {
    const T *own_cos = (const T*)cos.const_data_ptr() + t * half,
            *own_sin = (const T*)sin.const_data_ptr() + t * half;
    for (int64_t h = 0; h < heads; ++h)
      turn(queries + (t * heads + h + 1) * query - 2 * half, own_cos, own_sin, half);
    finish_row(rows + t * width, norm, eps, own_cos, own_sin, half);
  }
}

// Turns the last dims of every query in `q` (T, heads * dims) and of every row in `row` (T, rank +
// turned dims), and norms the others of a row, all in place. `cos` and `sin` have half of the
// turned dims of each row.
void finish_latent_rows(at::Tensor& q, at::Tensor& row, const at::Tensor& norm,
                        const at::Tensor& cos, const at::Tensor& sin, int64_t heads, double eps) {
  const int64_t rows = q.size(0), half = cos.size(-1), rank = norm.numel();
  for (const at::Tensor* one : {(const at::Tensor*)&row, &cos, &sin})
    TORCH_CHECK(
        one->is_contiguous() && one->scalar_type() == q.scalar_type() && one->size(0) == rows,
        "queries, rows and their turns are of one dtype and number");
  TORCH_CHECK(q.dim() == 2 && q.is_contiguous() && heads > 0 && q.size(1) % heads == 0 &&
                  q.size(1) / heads >= 2 * half && row.dim() == 2 &&
                  row.size(1) == rank + 2 * half && cos.numel() == rows * half &&
                  cos.sizes() == sin.sizes(),
              "there are other sizes than of the rows' turns");
  TORCH_CHECK(norm.is_contiguous() &&
                  (norm.scalar_type() == q.scalar_type() || norm.scalar_type() == at::kFloat),
              "the norm is of the rows' dtype, or float");
  const auto finish = is_bf16(q) ? finish_rows<at::BFloat16> : finish_rows<float>;
  at::parallel_for(0, rows, grain(q.size(1)), [&](int64_t first, int64_t last) {
    finish(q, row, norm, cos, sin, heads, float(eps), first, last);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "finish_latent_rows(Tensor(a!) q, Tensor(b!) row, Tensor norm, Tensor cos, Tensor sin, int "
      "heads, float eps) -> ()");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) { m.impl("finish_latent_rows", finish_latent_rows); }

}  // namespace penstock
