// The operators of linear layers that torch sees (torch.ops.penstock.*).
#include <sys/mman.h>

#include <cmath>
#include <cstring>

#include "linear_work.h"

namespace penstock {
namespace {

void run(const LinearArgs& args, int64_t rows, int64_t panels) {
  const LinearShare share(args, rows, panels, at::get_num_threads());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), share.tasks()), 1, [&](int64_t, int64_t) { multiply_share(args, share, next); });
}

// Inputs as granules: rows whose width is no multiple of one are padded with zeros.
at::Tensor whole_granules(const at::Tensor& x, int64_t inputs, int64_t padded) {
  if (padded == inputs) return x.contiguous();
  auto wide_rows = at::zeros({x.size(0), padded}, x.options());
  wide_rows.narrow(1, 0, inputs).copy_(x);
  return wide_rows;
}

template <typename T>
const T* pointer(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t format_number, int64_t width,
                  const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& column_scale,
                  const std::optional<at::Tensor>& column_sum, bool gated, bool as_float) {
  const Format format = Format(format_number);
  const int64_t rows = x.size(0), inputs = x.size(1), granules = granules_of(format, inputs);
  const int64_t panels = weight.numel() / (granules * PANEL * 4);
  TORCH_CHECK(x.dim() == 2 && weight.is_contiguous() && panels * granules * PANEL * 4 == weight.numel(), "x is not the weight's input");
  TORCH_CHECK(format >= Format::INT8 || is_bf16(x) == (format == Format::BF16), "x is not of the weight's dtype");
  TORCH_CHECK(width <= panels * (gated ? PANEL / 2 : PANEL) && (!bias || bias->numel() == panels * PANEL));
  const bool out_bf16 = is_bf16(x) && !as_float;
  auto out = at::empty({rows, width}, x.options().dtype(out_bf16 ? at::kBFloat16 : at::kFloat));
  if (rows == 0) return out;
  LinearArgs args{format, nullptr, granules, weight.const_data_ptr<uint8_t>() ? (const char*)weight.const_data_ptr<uint8_t>() : nullptr,
                  granules, pointer<float>(bias), nullptr, pointer<float>(column_scale), pointer<int32_t>(column_sum), nullptr,
                  out.data_ptr(), width, out_bf16, gated};
  at::Tensor source, scale, sum;
  if (format >= Format::INT8) {
    const bool grouped = format == Format::INT4;
    const int64_t stride = granules * granule_inputs(format), groups = grouped ? stride / GROUP : 1;
    source = at::empty({rows, stride}, x.options().dtype(at::kChar));
    scale = at::empty({rows, groups}, x.options().dtype(at::kFloat));
    sum = at::empty({grouped ? rows : 0, groups}, x.options().dtype(at::kInt));
    const at::Tensor dense = x.contiguous();
    const QuantizeArgs quantization{dense.const_data_ptr(), inputs, is_bf16(x), grouped, (int8_t*)source.data_ptr(), stride,
                                    scale.data_ptr<float>(), sum.data_ptr<int32_t>()};
    at::parallel_for(0, rows, grain(inputs), [&](int64_t first, int64_t last) { KERNEL(quantize)(quantization, first, last); });
    args.x_stride = stride / 4;
    args.row_scale = scale.const_data_ptr<float>();
    args.row_sum = sum.const_data_ptr<int32_t>();
  } else {
    source = whole_granules(x, inputs, granules * granule_inputs(format));
  }
  args.x = source.const_data_ptr();
  run(args, rows, panels);
  return out;
}

int64_t packed_size(int64_t outputs, int64_t inputs, int64_t format, bool gated) {
  const int64_t columns = gated ? PANEL / 2 : PANEL, width = gated ? outputs / 2 : outputs;
  return (width + columns - 1) / columns * granules_of(Format(format), inputs) * PANEL * 4;
}

// The row of the weight behind output `c` of a panel; -1: padding.
int64_t source_row(int64_t panel, int c, int64_t outputs, bool gated) {
  if (!gated) return panel * PANEL + c < outputs ? panel * PANEL + c : -1;
  const int64_t half = PANEL / 2, row = panel * half + c % half;
  return row < outputs / 2 ? (c < half ? row : outputs / 2 + row) : -1;
}

float value_at(const at::BFloat16* p) { return float(*p); }
float value_at(const float* p) { return *p; }

struct Packed {
  char* weight;
  float* scale;
  int32_t* sum;
};

template <typename T>
void pack_int8(const T* row, int64_t inputs, int64_t granules, int c, char* panel, float& scale, int32_t& sum) {
  float most = 0;
  for (int64_t i = 0; i < inputs; ++i) most = std::max(most, std::fabs(value_at(row + i)));
  scale = most / 127.0f;
  const float inverse = most > 0 ? 127.0f / most : 0.0f;
  sum = 0;
  for (int64_t i = 0; i < inputs; ++i) {
    const int q = int(std::nearbyintf(value_at(row + i) * inverse));
    sum += q;
    panel[i / 4 * PANEL * 4 + c * 4 + i % 4] = char(q);
  }
}

// The largest of a group becomes -8 (as in GGML's q4_0), so that all 16 values are used; the scale is a bfloat16.
template <typename T>
void pack_int4(const T* row, int64_t inputs, int64_t groups, int c, char* panel, float* scales) {
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t first = g * GROUP, count = std::min<int64_t>(GROUP, inputs - first);
    float most = 0;
    for (int64_t i = 0; i < count; ++i) {
      const float v = value_at(row + first + i);
      if (std::fabs(v) > std::fabs(most)) most = v;
    }
    const float scale = float(at::BFloat16(most / -8.0f)), inverse = scale != 0 ? 1.0f / scale : 0.0f;
    scales[g * PANEL + c] = scale;
    for (int64_t i = 0; i < GROUP; ++i) {
      const float v = i < count ? value_at(row + first + i) * inverse : 0.0f;
      const int q = std::clamp(int(std::nearbyintf(v)) + 8, 0, 15);
      char& target = panel[(first + i) / 8 * PANEL * 4 + c * 4 + i % 4];
      target = char((target & (i % 8 < 4 ? 0xF0 : 0x0F)) | (i % 8 < 4 ? q : q << 4));
    }
  }
}

template <typename T>
void pack_panel(const at::Tensor& weight, Format format, int64_t panel, int64_t granules, bool gated, const Packed& out) {
  const int64_t inputs = weight.size(1), groups = granules * 8 / GROUP;
  char* target = out.weight + panel * granules * PANEL * 4;
  std::memset(target, 0, granules * PANEL * 4);
  for (int c = 0; c < PANEL; ++c) {
    const int64_t from = source_row(panel, c, weight.size(0), gated);
    const int64_t column = panel * PANEL + c;
    if (from < 0) {
      if (format == Format::INT8) out.scale[column] = 0, out.sum[column] = 0;
      if (format == Format::INT4)
        for (int64_t g = 0; g < groups; ++g) out.scale[(panel * groups + g) * PANEL + c] = 0;
      continue;
    }
    const T* row = weight.const_data_ptr<T>() + from * inputs;
    if (format == Format::INT8) {
      pack_int8(row, inputs, granules, c, target, out.scale[column], out.sum[column]);
    } else if (format == Format::INT4) {
      pack_int4(row, inputs, groups, c, target, out.scale + panel * groups * PANEL);
    } else {
      constexpr int64_t per = 4 / sizeof(T);
      for (int64_t g = 0; g < granules; ++g)
        std::memcpy(target + (g * PANEL + c) * 4, row + g * per, sizeof(T) * std::min<int64_t>(per, inputs - g * per));
    }
  }
}

void pack(const at::Tensor& weight, at::Tensor& out, at::Tensor& scale, at::Tensor& sum, int64_t format_number, bool gated) {
  const Format format = Format(format_number);
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous() && out.is_contiguous());
  TORCH_CHECK(out.numel() == packed_size(weight.size(0), weight.size(1), format_number, gated), "out has the wrong size");
  const bool bf16 = is_bf16(weight);
  TORCH_CHECK(format >= Format::INT8 || bf16 == (format == Format::BF16), "the weight is not of the format's dtype");
  const int64_t granules = granules_of(format, weight.size(1)), panels = out.numel() / (granules * PANEL * 4);
  const int64_t scales = format == Format::INT8 ? panels * PANEL : format == Format::INT4 ? panels * granules * 8 / GROUP * PANEL : 0;
  TORCH_CHECK(scale.numel() == scales && sum.numel() == (format == Format::INT8 ? scales : 0));
  const Packed packed{(char*)out.data_ptr<uint8_t>(), scale.data_ptr<float>(), sum.data_ptr<int32_t>()};
  at::parallel_for(0, panels, 1, [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      bf16 ? pack_panel<at::BFloat16>(weight, format, panel, granules, gated, packed)
           : pack_panel<float>(weight, format, panel, granules, gated, packed);
  });
}

// Rows of the weight: what an embedding that shares it looks up.
at::Tensor packed_rows(const at::Tensor& weight, const at::Tensor& ids, int64_t inputs, int64_t outputs, bool bf16) {
  const int64_t size = bf16 ? 2 : 4, per = 4 / size, granules = (inputs + per - 1) / per;
  auto out = at::empty({ids.size(0), inputs}, weight.options().dtype(bf16 ? at::kBFloat16 : at::kFloat));
  const int64_t* id = ids.const_data_ptr<int64_t>();
  for (int64_t row = 0; row < ids.size(0); ++row)
    TORCH_CHECK_INDEX(id[row] >= 0 && id[row] < outputs, "index out of range in self");
  const char* source = (const char*)weight.const_data_ptr<uint8_t>();
  char* target = (char*)out.data_ptr();
  at::parallel_for(0, ids.size(0), grain(inputs * 16), [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) {
      const char* from = source + id[row] / PANEL * granules * PANEL * 4 + id[row] % PANEL * 4;
      char* to = target + row * inputs * size;
      for (int64_t g = 0; g < granules; ++g)
        std::memcpy(to + g * 4, from + g * PANEL * 4, std::min<int64_t>(4, inputs * size - g * 4));
    }
  });
  return out;
}

// Asks for large pages: a weight is read from end to end in every step, and small pages cost it a fifth of the bandwidth.
void advise_large_pages(const at::Tensor& memory) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t first = (uintptr_t(memory.data_ptr()) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t last = (uintptr_t(memory.data_ptr()) + memory.nbytes()) / PAGE * PAGE;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "linear(Tensor x, Tensor weight, int format, int width, Tensor? bias, Tensor? column_scale, Tensor? column_sum, bool gated, "
      "bool as_float) -> Tensor");
  m.def("packed_size(int outputs, int inputs, int format, bool gated) -> int", packed_size);
  m.def("pack_linear(Tensor weight, Tensor(a!) out, Tensor(b!) scale, Tensor(c!) sum, int format, bool gated) -> ()");
  m.def("packed_rows(Tensor weight, Tensor ids, int inputs, int outputs, bool bf16) -> Tensor");
  m.def("advise_large_pages(Tensor memory) -> ()");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("linear", linear);
  m.impl("pack_linear", pack);
  m.impl("packed_rows", packed_rows);
  m.impl("advise_large_pages", advise_large_pages);
}

}  // namespace penstock
