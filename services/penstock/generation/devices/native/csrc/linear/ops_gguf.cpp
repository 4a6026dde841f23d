// The operators of weights in blocks (gguf_blocks.h), and what others ask of any packed weight.
#include <atomic>
#include <cstring>

#include "linear/gguf_blocks.h"
#include "linear/linear_work.h"
#include "linear/packed_rows.h"

namespace penstock {

int64_t panels_of(const at::Tensor& weight, Format format, int64_t inputs, int64_t granules,
                  int64_t width, bool gated) {
  const int64_t columns = gated ? PANEL / 2 : PANEL, panels = (width + columns - 1) / columns;
  if (is_compact(weight, format, granules, panels)) return panels;
  if (format != Format::GGUF) {
    const int64_t bytes = granules * PANEL * 4, whole = weight.numel() / bytes;
    return whole * bytes == weight.numel() ? whole : -1;
  }
  const PanelTable table((const char*)weight.const_data_ptr());
  return table.is_whole(weight.nbytes(), panels, inputs) ? panels : -1;
}

namespace {

int64_t block_panel_bytes(int64_t type, int64_t inputs) {
  const BlockTraits traits = traits_of(BlockType(type));
  TORCH_CHECK(traits.inputs > 0 && inputs > 0 && inputs % traits.inputs == 0,
              "there is no such block, or the inputs are no whole ones");
  return panel_bytes(BlockType(type), inputs);
}

// `rows`: those from `first` on of a weight with `outputs` rows, each in the blocks of its panel's
// type. `out` has its table already. Returns a row with a scale that is NaN or infinite, or -1.
int64_t pack_blocks(const at::Tensor& rows, int64_t first, int64_t outputs, int64_t inputs,
                    at::Tensor& out, bool gated) {
  TORCH_CHECK(rows.dim() == 2 && rows.is_contiguous() && rows.scalar_type() == at::kByte &&
              out.is_contiguous() && out.scalar_type() == at::kByte);
  const int64_t count = rows.size(0), half = gated ? outputs / 2 : outputs;
  TORCH_CHECK(first >= 0 && first + count <= outputs && (!gated || outputs % 2 == 0));
  const int64_t panels = panels_of(out, Format::GGUF, inputs, 0, half, gated),
                columns = gated ? PANEL / 2 : PANEL;
  TORCH_CHECK(panels > 0, "out has the wrong size");
  char* weight = (char*)out.data_ptr();
  const PanelTable table(weight);
  const auto panel_of = [&](int64_t row) { return row % half / columns; };
  for (int64_t row = first; row < first + count; ++row) {
    const BlockTraits traits = traits_of(table.type(panel_of(row)));
    TORCH_CHECK(rows.size(1) == inputs / traits.inputs * traits.stored_bytes,
                "the rows are not of their panel's type");
  }
  if (first == 0)
    std::memset(weight + table.offset(panels - 1), 0,
                table.offset(panels) - table.offset(panels - 1));
  const uint8_t* data = rows.const_data_ptr<uint8_t>();
  std::atomic<int64_t> bad{count};
  const int64_t units = (count + columns - 1) / columns;
  at::parallel_for(0, units, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * columns; i < std::min(count, end * columns); ++i) {
      const int64_t row = first + i, panel = panel_of(row);
      const int column = int(row % half % columns + row / half * columns);
      if (KERNEL(pack_block_row)(table.type(panel), data + i * rows.size(1), inputs,
                                 weight + table.offset(panel), column))
        continue;
      int64_t known = bad;
      while (i < known && !bad.compare_exchange_weak(known, i)) {}
    }
  });
  return bad < count ? int64_t(bad) : -1;
}

}  // namespace

at::Tensor block_rows(const at::Tensor& weight, const int64_t* ids, int64_t count, int64_t inputs,
                      int64_t outputs, bool bf16) {
  for (int64_t i = 0; i < count; ++i)
    TORCH_CHECK_INDEX(ids[i] >= 0 && ids[i] < outputs, "index out of range in self");
  at::Tensor out = at::detail::empty_cpu({count, inputs}, bf16 ? at::kBFloat16 : at::kFloat);
  const char* source = (const char*)weight.const_data_ptr();
  const PanelTable table(source);
  at::parallel_for(0, count, grain(inputs * 4), [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int64_t panel = ids[i] / PANEL;
      KERNEL(unpack_block_row)(table.type(panel), source + table.offset(panel), inputs,
                               int(ids[i] % PANEL),
                               (char*)out.data_ptr() + i * inputs * int64_t(out.itemsize()), bf16);
    }
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("block_panel_bytes(int type, int inputs) -> int", block_panel_bytes);
  m.def(
      "pack_blocks(Tensor rows, int first, int outputs, int inputs, Tensor(a!) out, bool gated) -> "
      "int");
  m.def("block_rows(Tensor weight, Tensor ids, int inputs, int outputs, bool bf16) -> Tensor");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("pack_blocks", pack_blocks);
  m.impl("block_rows", [](const at::Tensor& weight, const at::Tensor& ids, int64_t inputs,
                          int64_t outputs, bool bf16) {
    TORCH_CHECK(panels_of(weight, Format::GGUF, inputs, 0, outputs, false) > 0,
                "the weight has another size");
    return block_rows(weight, ids.const_data_ptr<int64_t>(), ids.size(0), inputs, outputs, bf16);
  });
}

}  // namespace penstock
