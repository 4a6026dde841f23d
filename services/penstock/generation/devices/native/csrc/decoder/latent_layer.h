// A decoder's layer with compressed keys and values, and what a step needs of it.
#pragma once
#include <optional>

#include "attention/attention_work.h"
#include "decoder/latent_rows.h"
#include "decoder/linear_layer.h"
#include "linear/head_work.h"
#include "util/turned_block.h"

namespace penstock {

// Widths of a layer's heads: of every one of a model the same. `query_rank`: numbers between the
// two products of queries; 0: there is one product.
struct LatentSizes {
  int64_t heads, rank, plain_dim, turned_dim, value_dim, query_rank;

  int64_t row_dim() const { return rank + turned_dim; }
  int64_t query_dim() const { return plain_dim + turned_dim; }
  int64_t queries() const { return heads * query_dim(); }
  int64_t values() const { return heads * value_dim; }
  // Of the layer's first product.
  int64_t first_outputs() const { return query_rank > 0 ? query_rank : queries(); }
  bool operator==(const LatentSizes&) const = default;
};

// The second product of queries, and the norm before it.
struct LatentQueries {
  at::Tensor norm;
  Linear up;
};

// What it has beside the first and the last product of any layer.
struct LatentLayer {
  LatentSizes sizes;
  // What makes a token's row.
  Linear row;
  std::optional<LatentQueries> queries;
  // Of the latent; and packed weights of the heads, which map plain dims to the rank, and the rank
  // to values, of the rows' dtype.
  at::Tensor norm, keys, values;
  Format format;

  void check() const {
    TORCH_CHECK(format < Format::INT8, "the weights of heads are not quantised");
    TORCH_CHECK(sizes.heads > 0 && sizes.rank > 0 && sizes.plain_dim > 0 && sizes.turned_dim > 0 &&
                    sizes.turned_dim % 2 == 0 && sizes.value_dim > 0 &&
                    sizes.row_dim() <= MAX_HEAD_DIM,
                "a layer has no such heads");
    const auto fits = [&](const at::Tensor& packed, int64_t inputs, int64_t outputs) {
      return packed.is_contiguous() && packed.scalar_type() == at::kByte &&
             packed.numel() == sizes.heads * HeadProducts::weight_bytes(format, inputs, outputs);
    };
    TORCH_CHECK(
        fits(keys, sizes.plain_dim, sizes.rank) && fits(values, sizes.rank, sizes.value_dim),
        "the packed weights of heads have the wrong size");
    TORCH_CHECK(norm.is_contiguous() && norm.numel() == sizes.rank,
                "the norm of latents has the wrong size");
    TORCH_CHECK(
        !queries || (queries->norm.is_contiguous() && queries->norm.numel() == sizes.query_rank),
        "the norm of queries has the wrong size");
  }
};

// What all such layers of a step share: buffers, and the products of heads.
struct LatentStep {
  // First results of queries, where there are two products, and what the second reads; queries, and
  // tokens' rows, as their products give them; queries of the pool's rows; and what heads read.
  at::Tensor narrow, normed, queries, row, q, mean;

  // `own`: copies of the normed rows.
  LatentStep(const LatentSizes& sizes, int64_t rows, int64_t own, at::ScalarType type,
             bool is_quantised)
      : sizes_(sizes), type_(type) {
    const auto memory = [&](at::IntArrayRef shape) { return at::detail::empty_cpu(shape, type); };
    const int64_t size = at::elementSize(type);
    narrow = memory({rows, sizes.query_rank});
    normed = memory({own * rows, spread(sizes.query_rank * size) / size});
    queries = memory({rows, sizes.queries()});
    row = memory({rows, sizes.row_dim()});
    q = memory({rows, sizes.heads * sizes.row_dim()});
    // Outputs over int8 are turned back in the blocks of the whole row.
    const bool cuts = !is_quantised || sizes.rank % turned_head(sizes.row_dim()) == 0;
    mean_dim_ = cuts ? sizes.rank : sizes.row_dim();
    mean = memory({rows, sizes.heads * mean_dim_});
  }

  int64_t mean_dim() const { return mean_dim_; }

  HeadProducts keys(const LatentLayer& layer) const {
    return HeadProducts(layer.format, heads_of(queries, sizes_.query_dim()),
                        layer.keys.const_data_ptr(), heads_of(q, sizes_.row_dim()), sizes_.heads,
                        sizes_.plain_dim, sizes_.rank);
  }
  HeadProducts values(const LatentLayer& layer, const at::Tensor& out) const {
    return HeadProducts(layer.format, heads_of(mean, mean_dim_), layer.values.const_data_ptr(),
                        heads_of(out, sizes_.value_dim), sizes_.heads, sizes_.rank,
                        sizes_.value_dim);
  }

  // Finishes rows [first, last): turns their queries into `q`, and writes them into the pool,
  // normed and turned. `rope`: what it needs of the pool and of the turns; `eps`: of the norm.
  void finish(const LatentLayer& layer, const RopeArgs& rope, float eps, int64_t first,
              int64_t last) const {
    type_ == at::kBFloat16 ? finish_rows<at::BFloat16>(layer, rope, eps, first, last)
                           : finish_rows<float>(layer, rope, eps, first, last);
  }

 private:
  static HeadRows heads_of(const at::Tensor& rows, int64_t dim) {
    return {rows.data_ptr(), rows.stride(0), dim};
  }

  template <typename T>
  void finish_rows(const LatentLayer& layer, const RopeArgs& rope, float eps, int64_t first,
                   int64_t last) const {
    const int64_t half = sizes_.turned_dim / 2, width = sizes_.row_dim(),
                  query = sizes_.query_dim();
    for (int64_t t = first; t < last; ++t) {
      const T *cos = (const T*)rope.cos + rope.positions[t] * half,
              *sin = (const T*)rope.sin + rope.positions[t] * half;
      T *own = (T*)row.data_ptr() + t * width, *to = (T*)q.data_ptr() + t * sizes_.heads * width;
      T* from = (T*)queries.data_ptr() + t * sizes_.queries();
      finish_row(own, layer.norm, eps, cos, sin, half);
      for (int64_t h = 0; h < sizes_.heads; ++h) {
        T* turned = to + h * width + sizes_.rank;
        std::memcpy(turned, from + h * query + sizes_.plain_dim, sizeof(T) * 2 * half);
        turn(turned, cos, sin, half);
      }
      const int64_t slot = rope.slots[t];
      if (rope.key_scales == nullptr)
        std::memcpy((T*)rope.keys + slot * rope.slot_stride, own, sizeof(T) * width);
      else
        rope.key_scales[slot * rope.scale_stride] = KERNEL(store_head)(
            own, (int8_t*)rope.keys + slot * rope.slot_stride, int(width), rope.is_bf16);
    }
  }

  LatentSizes sizes_;
  at::ScalarType type_;
  int64_t mean_dim_;
};

}  // namespace penstock
