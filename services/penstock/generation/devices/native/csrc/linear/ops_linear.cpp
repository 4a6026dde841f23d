// The operators of linear layers for torch (torch.ops.penstock.*).
#include <sys/mman.h>

#include <cmath>
#include <cstring>
#include <vector>

#include "linear/adapters.h"
#include "linear/linear_work.h"
#include "linear/packed_rows.h"

namespace penstock {
namespace {

void run(const LinearArgs& args, int64_t rows, int64_t panels) {
  const LinearShare share(args, rows, panels, at::get_num_threads());
  std::vector<Progress> progress(share.threads);
  at::parallel_for(0, share.threads, 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread)
      multiply_share(args, share, progress.data(), thread);
  });
}

// Inputs as granules: rows are padded with zeros to whole granules, and many rows are spread.
at::Tensor whole_granules(const at::Tensor& x, int64_t inputs, int64_t padded) {
  const int64_t size = x.element_size(),
                stride = x.size(0) > CROWD ? spread(padded * size) / size : padded;
  if (stride == inputs) return x.contiguous();
  auto wide_rows = at::empty({x.size(0), stride}, x.options());
  wide_rows.narrow(1, inputs, padded - inputs).zero_();
  wide_rows.narrow(1, 0, inputs).copy_(x);
  return wide_rows;
}

template <typename T>
const T* pointer(const std::optional<at::Tensor>& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// The rows of x that have an adapter, times its A.
at::Tensor shrink(const AdapterBatch& batch, int64_t site, const at::Tensor& x) {
  TORCH_CHECK(x.size(0) == int64_t(batch.all.adapter.size()) && is_bf16(x) == batch.is_bf16,
              "x is not of the batch's rows and dtype");
  const at::Tensor dense = x.contiguous();
  auto shrunk = at::empty({x.size(0), shrunk_stride(batch.ranks[site])}, x.options());
  std::atomic<int64_t> next{0};
  at::parallel_for(0, at::get_num_threads(), 1, [&](int64_t first, int64_t last) {
    for (int64_t thread = first; thread < last; ++thread)
      shrink_share(batch, batch.all, site, dense.const_data_ptr(), x.size(1), x.size(1),
                   shrunk.data_ptr(), shrunk.stride(0), next);
  });
  return shrunk;
}

int64_t packed_size(int64_t outputs, int64_t inputs, int64_t format, bool gated) {
  const int64_t columns = gated ? PANEL / 2 : PANEL, width = gated ? outputs / 2 : outputs;
  return (width + columns - 1) / columns * granules_of(product_of(Format(format)), inputs) * PANEL *
         4;
}

// Rows that one thread packs at a time: half a panel, which is what a gated one has of either kind.
constexpr int64_t PACKED_AT_ONCE = PANEL / 2;

// Columns without an output, in the last panel: zeros, in place of the memory's old content.
void clear_padding(const PackArgs& args, int64_t outputs, int64_t panels, bool gated) {
  if (panels == 0 || outputs == panels * PANEL) return;
  const int64_t last = panels - 1, groups = args.granules * 8 / GROUP;
  std::memset(args.weight + last * args.granules * PANEL * 4, 0, args.granules * PANEL * 4);
  if (args.format == Format::INT8) {
    std::fill_n((float*)args.scale + last * PANEL, PANEL, 0.0f);
    std::fill_n(args.sum + last * PANEL, PANEL, 0);
  } else if (args.format == Format::INT4) {
    std::memset((char*)args.scale + byte_scales(last, groups), 0, byte_scales(1, groups));
  }
}

// Rows of one kind: `from` is the place of the first among them. The first row with a number that
// is none, or -1.
int64_t pack_kind(const PackArgs& args, const char* rows, int64_t from, int64_t count,
                  int64_t columns, int first_column) {
  std::atomic<int64_t> bad{count};
  const int64_t row_bytes = args.inputs * (args.is_bf16 ? 2 : 4), first = from / PACKED_AT_ONCE;
  const int64_t units = count == 0 ? 0 : (from + count - 1) / PACKED_AT_ONCE - first + 1;
  at::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t unit = first + begin; unit < first + end; ++unit) {
      const int64_t low = std::max(from, unit * PACKED_AT_ONCE),
                    high = std::min(from + count, (unit + 1) * PACKED_AT_ONCE);
      if (KERNEL(pack)(args, rows + (low - from) * row_bytes, int(high - low), low / columns,
                       first_column + int(low % columns)))
        continue;
      int64_t known = bad;
      while (low - from < known && !bad.compare_exchange_weak(known, low - from)) {}
    }
  });
  return bad < count ? int64_t(bad) : -1;
}

// `rows` are those from `first` on of a weight with `outputs` rows; all pieces together make the
// packed weight. Returns a row near a NaN or infinity in a piece for int8 or int4; else -1.
// `importance` of the inputs, for int4.
int64_t pack_rows(const at::Tensor& rows, int64_t first, int64_t outputs, at::Tensor& out,
                  at::Tensor& scale, at::Tensor& sum, int64_t format_number, bool gated,
                  const std::optional<at::Tensor>& importance) {
  const Format format = product_of(Format(format_number));
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && out.is_contiguous());
  const int64_t count = rows.size(0), inputs = rows.size(1);
  TORCH_CHECK(first >= 0 && first + count <= outputs &&
                  out.numel() == packed_size(outputs, inputs, format_number, gated),
              "out has the wrong size");
  const bool bf16 = is_bf16(rows);
  TORCH_CHECK(format >= Format::INT8 || bf16 == (format == Format::BF16),
              "the weight is not of the format's dtype");
  const int64_t granules = granules_of(format, inputs),
                panels = out.numel() / std::max<int64_t>(1, granules * PANEL * 4);
  const int64_t scales = format == Format::INT8   ? panels * PANEL
                         : format == Format::INT4 ? byte_scales(panels, granules * 8 / GROUP)
                                                  : 0;
  TORCH_CHECK(scale.scalar_type() == (format == Format::INT4 ? at::kByte : at::kFloat));
  TORCH_CHECK(scale.numel() == scales && sum.numel() == (format == Format::INT8 ? scales : 0));
  TORCH_CHECK(!importance || (importance->is_contiguous() && importance->numel() == inputs &&
                              importance->scalar_type() == at::kFloat),
              "importance is of the weight's inputs, in float");
  const PackArgs args{
      .format = format,
      .is_bf16 = bf16,
      .inputs = inputs,
      .granules = granules,
      .rotation = rotation_of(Format(format_number), inputs),
      .weight = (char*)out.data_ptr<uint8_t>(),
      .scale = scale.data_ptr(),
      .sum = sum.data_ptr<int32_t>(),
      .importance = pointer<float>(importance),
  };
  if (first == 0) clear_padding(args, outputs, panels, gated);
  const char* data = (const char*)rows.const_data_ptr();
  if (!gated) return pack_kind(args, data, first, count, PANEL, 0);
  const int64_t half = outputs / 2, gates = std::clamp<int64_t>(half - first, 0, count);
  const int64_t bad = pack_kind(args, data, first, gates, PANEL / 2, 0);
  if (bad >= 0) return bad;
  const char* values = data + gates * inputs * (bf16 ? 2 : 4);
  const int64_t bad_value =
      pack_kind(args, values, first + gates - half, count - gates, PANEL / 2, PANEL / 2);
  return bad_value < 0 ? -1 : gates + bad_value;
}

// Asks for large pages: a weight is read from end to end in every step, and small pages cost it a
// fifth of the bandwidth.
void advise_large_pages(const at::Tensor& memory) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t PAGE = 2 << 20;
  const uintptr_t first = (uintptr_t(memory.data_ptr()) + PAGE - 1) / PAGE * PAGE;
  const uintptr_t last = (uintptr_t(memory.data_ptr()) + memory.nbytes()) / PAGE * PAGE;
  if (first < last) madvise((void*)first, last - first, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::Tensor linear(const at::Tensor& x, const at::Tensor& weight, int64_t format_number,
                  int64_t width, const std::optional<at::Tensor>& bias,
                  const std::optional<at::Tensor>& column_scale,
                  const std::optional<at::Tensor>& column_sum,
                  const std::optional<at::Tensor>& column_offset, int64_t gate, bool as_float,
                  const AdapterBatch* adapters, int64_t site) {
  const Format format = product_of(Format(format_number));
  TORCH_CHECK(gate >= int(Gate::NONE) && gate <= int(Gate::CLAMPED), "there is no such gate");
  TORCH_CHECK(adapters == nullptr || (site >= 0 && site < adapters->num_sites));
  const int64_t rows = x.size(0), inputs = x.size(1), granules = granules_of(format, inputs);
  const int64_t panels =
      panels_of(weight, format, inputs, granules, width, gate != int(Gate::NONE));
  TORCH_CHECK(x.dim() == 2 && weight.is_contiguous() && panels >= 0, "x is not the weight's input");
  TORCH_CHECK(format >= Format::INT8 || is_bf16(x) == (format == Format::BF16),
              "x is not of the weight's dtype");
  TORCH_CHECK(width <= panels * (gate != int(Gate::NONE) ? PANEL / 2 : PANEL) &&
              (!bias || bias->numel() == panels * PANEL));
  TORCH_CHECK(!column_offset || (format == Format::INT4 && column_scale &&
                                 column_scale->scalar_type() == at::kFloat &&
                                 column_offset->numel() == column_scale->numel()),
              "offsets are of int4, one for each scale in float");
  const bool scale_is_bytes = column_scale && column_scale->scalar_type() == at::kByte;
  TORCH_CHECK(
      !scale_is_bytes || (format == Format::INT4 &&
                          column_scale->numel() == byte_scales(panels, granules * 8 / GROUP)),
      "scales in bytes are of int4, with a line for each group and one more");
  const bool out_bf16 = is_bf16(x) && !as_float;
  auto out = at::empty({rows, width}, x.options().dtype(out_bf16 ? at::kBFloat16 : at::kFloat));
  if (rows == 0) return out;
  LinearArgs args{
      .format = format,
      .x = nullptr,
      .x_stride = granules,
      .weight = (const char*)weight.const_data_ptr<uint8_t>(),
      .granules = granules,
      .bias = pointer<float>(bias),
      .row_scale = nullptr,
      .column_scale = column_scale ? column_scale->const_data_ptr() : nullptr,
      .scale_is_bytes = scale_is_bytes,
      .column_sum = pointer<int32_t>(column_sum),
      .column_offset = pointer<float>(column_offset),
      .row_sum = nullptr,
      .out = out.data_ptr(),
      .width = width,
      .out_stride = width,
      .out_bf16 = out_bf16,
      .gate = Gate(gate),
      .is_compact = is_compact(weight, format, granules, panels),
  };
  at::Tensor source, scale, sum;
  if (format >= Format::INT8) {
    const bool grouped = is_grouped(format);
    const int64_t padded = granules * granule_inputs(format), groups = grouped ? padded / GROUP : 1,
                  stride = spread(padded);
    source = at::empty({rows, stride}, x.options().dtype(at::kChar));
    scale = at::empty({rows, groups}, x.options().dtype(at::kFloat));
    sum = at::empty({grouped ? rows : 0, groups * sums_of_group(format)},
                    x.options().dtype(at::kInt));
    const at::Tensor dense = x.contiguous();
    const QuantizeArgs quantization{
        .x = dense.const_data_ptr(),
        .width = inputs,
        .x_stride = inputs,
        .is_bf16 = is_bf16(x),
        .grouped = grouped,
        .sums = sums_of_group(format),
        .rotation = rotation_of(Format(format_number), inputs),
        .out = (int8_t*)source.data_ptr(),
        .padded = padded,
        .stride = stride,
        .scale = scale.data_ptr<float>(),
        .sum = sum.data_ptr<int32_t>(),
    };
    at::parallel_for(0, rows, grain(inputs), [&](int64_t first, int64_t last) {
      KERNEL(quantize)(quantization, first, last);
    });
    args.x_stride = stride / 4;
    args.row_scale = scale.const_data_ptr<float>();
    args.row_sum = sum.const_data_ptr<int32_t>();
  } else {
    source = whole_granules(x, inputs, granules * granule_inputs(format));
    args.x_stride = source.size(1) / granule_inputs(format);
  }
  args.x = source.const_data_ptr();
  at::Tensor shrunk;
  AdapterRows adapted;
  if (adapters != nullptr && adapters->ranks[site] > 0) {
    adapters->check(site, inputs, panels);
    shrunk = shrink(*adapters, site, x);
    adapted = {
        .adapter = adapters->all.adapter.data(),
        .matrices = adapters->matrices.data() + site * adapters->adapters.size(),
        .is_bf16 = is_bf16(x),
        .shrunk = shrunk.const_data_ptr(),
        .stride = shrunk.stride(0) * x.element_size() / 4,
    };
    args.adapters = &adapted;
  }
  run(args, rows, panels);
  return out;
}

at::Tensor packed_rows(const at::Tensor& weight, const int64_t* id, int64_t count, int64_t inputs,
                       int64_t outputs, bool bf16) {
  const int64_t size = bf16 ? 2 : 4, per = 4 / size, granules = (inputs + per - 1) / per;
  at::Tensor out = at::detail::empty_cpu({count, inputs}, bf16 ? at::kBFloat16 : at::kFloat);
  for (int64_t row = 0; row < count; ++row)
    TORCH_CHECK_INDEX(id[row] >= 0 && id[row] < outputs, "index out of range in self");
  const char* source = (const char*)weight.const_data_ptr<uint8_t>();
  char* target = (char*)out.data_ptr();
  const bool compact = is_compact(weight, bf16 ? Format::BF16 : Format::F32, granules,
                                  (outputs + PANEL - 1) / PANEL);
  at::parallel_for(0, count, grain(inputs * 2), [&](int64_t first, int64_t last) {
    std::vector<char> whole(compact ? granules * 4 : 0);
    for (int64_t row = first; row < last; ++row) {
      if (compact) {
        const CompactPanel panel(source, id[row] / PANEL, granules);
        unpack_column(panel, granules, int(id[row] % PANEL), whole.data());
        std::memcpy(target + row * inputs * size, whole.data(), inputs * size);
        continue;
      }
      const char* from = source + id[row] / PANEL * granules * PANEL * 4 + id[row] % PANEL * 4;
      char* to = target + row * inputs * size;
      for (int64_t g = 0; g < granules; ++g)
        std::memcpy(to + g * 4, from + g * PANEL * 4, std::min<int64_t>(4, inputs * size - g * 4));
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def(
      "linear(Tensor x, Tensor weight, int format, int width, Tensor? bias, Tensor? column_scale, "
      "Tensor? column_sum, Tensor? column_offset, int gate, "
      "bool as_float) -> Tensor");
  m.def("packed_size(int outputs, int inputs, int format, bool gated) -> int", packed_size);
  m.def(
      "pack_rows(Tensor rows, int first, int outputs, Tensor(a!) out, Tensor(b!) scale, Tensor(c!) "
      "sum, int format, bool gated, Tensor? importance=None) -> "
      "int");
  m.def("packed_rows(Tensor weight, Tensor ids, int inputs, int outputs, bool bf16) -> Tensor");
  m.def("advise_large_pages(Tensor memory) -> ()");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("linear",
         [](const at::Tensor& x, const at::Tensor& weight, int64_t format, int64_t width,
            const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& column_scale,
            const std::optional<at::Tensor>& column_sum,
            const std::optional<at::Tensor>& column_offset, int64_t gate, bool as_float) {
           return linear(x, weight, format, width, bias, column_scale, column_sum, column_offset,
                         gate, as_float, nullptr, 0);
         });
  m.impl("pack_rows", pack_rows);
  m.impl("packed_rows", [](const at::Tensor& weight, const at::Tensor& ids, int64_t inputs,
                           int64_t outputs, bool bf16) {
    return packed_rows(weight, ids.const_data_ptr<int64_t>(), ids.size(0), inputs, outputs, bf16);
  });
  m.impl("advise_large_pages", advise_large_pages);
}

}  // namespace penstock
