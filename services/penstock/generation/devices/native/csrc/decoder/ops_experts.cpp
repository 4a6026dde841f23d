// The products of a layer's experts in one parallel region: torch.classes.penstock.Experts.
#include <omp.h>

#include <vector>

#include "decoder/expert_products.h"
#include "util/barrier.h"

namespace penstock {
namespace {

struct Experts : torch::CustomClassHolder {
  Format format;
  Gate gate;
  int64_t hidden, inner;
  std::vector<Mlp> mlps;

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
      mlps.push_back({Linear(own, "gated", format, hidden, inner, gate),
                      Linear(own, "down", format, inner, hidden, Gate::NONE)});
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
    const int64_t T = x.size(0), each = chosen.size(1), experts = mlps.size();
    const int64_t* numbers = chosen.const_data_ptr<int64_t>();
    for (int64_t i = 0; i < T * each; ++i)
      TORCH_CHECK_INDEX(numbers[i] >= 0 && numbers[i] < experts, "no such expert");
    const int64_t threads = at::get_num_threads();
    at::Tensor out = at::detail::empty_cpu({T, hidden}, at::kFloat);
    ExpertProducts products({format, hidden, inner, experts, each}, T, threads, x.scalar_type());
    products.plan(mlps, numbers, x.const_data_ptr(), hidden, T);
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
      own_rows(products.first_fills(),
               [&](int64_t i) { products.fill_first(i, x.const_data_ptr(), hidden); });
      barrier.wait(nothing);
      products.multiply_first(thread);
      barrier.wait(nothing);
      own_rows(products.second_fills(T), [&](int64_t i) { products.fill_second(i); });
      barrier.wait(nothing);
      products.multiply_second(thread);
      barrier.wait(nothing);
      own_rows(T, [&](int64_t i) {
        products.sum(i, shares.const_data_ptr<float>(), nullptr, 0, 0, hidden,
                     out.data_ptr<float>() + i * hidden);
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
