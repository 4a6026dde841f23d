// The products of a layer's experts in one parallel region: torch.classes.penstock.Experts. Rows
// are sorted by expert, so that a weight is read once for all of its rows; a row's sums have one
// order, with any rows beside it.
#include <omp.h>

#include <vector>

#include "decoder/expert_rows.h"
#include "decoder/expert_sums.h"
#include "linear/many_products.h"
#include "util/barrier.h"

namespace penstock {
namespace {

struct Experts : torch::CustomClassHolder {
  Format format;
  Gate gate;
  int64_t hidden, inner;
  std::vector<Linear> gated, down;

  // `sizes`: format, gate, hidden, inner; `experts`: tensors of each by name, those of gated and
  // down.
  Experts(const Sizes& sizes, const std::vector<Tensors>& experts) {
    Named<int64_t> from("a mixture of experts", sizes);
    format = Format(from.take("format")), gate = Gate(from.take("gate"));
    hidden = from.take("hidden"), inner = from.take("inner");
    from.check_all_taken();
    TORCH_CHECK(gate != Gate::NONE && gate <= Gate::CLAMPED, "experts are gated");
    for (const Tensors& tensors : experts) {
      Named<at::Tensor> own("an expert", tensors);
      gated.emplace_back(own, "gated", format, hidden, inner, gate);
      down.emplace_back(own, "down", format, inner, hidden, Gate::NONE);
      own.check_all_taken();
    }
  }

  // (T, hidden) in float: the sum of each row's experts times its shares in them, in the order of
  // `chosen` (T, any), which are numbers of experts; `shares` of the same shape.
  at::Tensor forward(at::Tensor x, at::Tensor chosen, at::Tensor shares) const {
    TORCH_CHECK(x.dim() == 2 && x.size(1) == hidden &&
                    (format >= Format::INT8 || is_bf16(x) == (format == Format::BF16)),
                "x is not the experts' input");
    TORCH_CHECK(chosen.dim() == 2 && chosen.is_contiguous() && chosen.size(0) == x.size(0) &&
                chosen.sizes() == shares.sizes() && shares.is_contiguous() &&
                chosen.scalar_type() == at::kLong && shares.scalar_type() == at::kFloat);
    x = x.contiguous();
    const int64_t T = x.size(0), each = chosen.size(1), count = T * each, size = x.itemsize();
    const int64_t* expert = chosen.const_data_ptr<int64_t>();
    std::vector<int64_t> starts(gated.size() + 1), place(count), row(count);
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_INDEX(expert[i] >= 0 && expert[i] < int64_t(gated.size()), "no such expert");
      ++starts[expert[i] + 1];
    }
    for (size_t e = 0; e < gated.size(); ++e) starts[e + 1] += starts[e];
    std::vector<int64_t> next(starts);
    for (int64_t i = 0; i < count; ++i) {
      place[i] = next[expert[i]]++;
      row[place[i]] = i / each;
    }
    const int64_t threads = at::get_num_threads();
    ExpertInputs inputs(format, count, hidden, x.scalar_type()),
        middle(format, count, inner, x.scalar_type());
    const at::Tensor inner_rows = at::detail::empty_cpu({count, inner}, x.scalar_type()),
                     products = at::detail::empty_cpu({count, hidden}, at::kFloat);
    at::Tensor out = at::detail::empty_cpu({T, hidden}, at::kFloat);
    ManyProducts first(threads), second(threads);
    for (size_t e = 0; e < gated.size(); ++e) {
      const int64_t begin = starts[e], rows = starts[e + 1] - begin;
      if (rows == 0) continue;
      LinearArgs up = inputs.args(gated[e], begin), back = middle.args(down[e], begin);
      up.out = (char*)inner_rows.data_ptr() + begin * inner * size;
      up.out_stride = inner, up.out_bf16 = is_bf16(x);
      back.out = products.data_ptr<float>() + begin * hidden, back.out_stride = hidden;
      first.add(up, rows, gated[e].panels);
      second.add(back, rows, down[e].panels);
    }
    Barrier barrier;
#pragma omp parallel num_threads(threads)
    {
#pragma omp single
      barrier.set_threads(omp_get_num_threads());
      const int64_t thread = omp_get_thread_num(), running = barrier.threads();
      const auto own_rows = [&](int64_t rows, auto work) {
        for (int64_t i = rows * thread / running; i < rows * (thread + 1) / running; ++i) work(i);
      };
      Prefetch nothing;
      own_rows(count, [&](int64_t i) {
        inputs.fill(i, (const char*)x.const_data_ptr() + row[i] * hidden * size);
      });
      barrier.wait(nothing);
      first.run(thread);
      barrier.wait(nothing);
      own_rows(count, [&](int64_t i) {
        middle.fill(i, (const char*)inner_rows.const_data_ptr() + i * inner * size);
      });
      barrier.wait(nothing);
      second.run(thread);
      barrier.wait(nothing);
      own_rows(T, [&](int64_t i) {
        KERNEL(sum_experts)
        ({.products = products.const_data_ptr<float>(),
          .places = &place[i * each],
          .shares = shares.const_data_ptr<float>() + i * each,
          .experts = each,
          .width = hidden,
          .added = nullptr,
          .added_share = 0,
          .out = out.data_ptr<float>() + i * hidden},
         0, hidden);
      });
    }
    return out;
  }
};

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.class_<Experts>("Experts")
      .def(torch::init<const Sizes&, const std::vector<Tensors>&>())
      .def("forward", &Experts::forward);
}

}  // namespace penstock
