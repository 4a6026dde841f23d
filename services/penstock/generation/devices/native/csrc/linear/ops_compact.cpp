// The operators that make compact weights (compact.h), and their rows.
#include <cstring>
#include <tuple>

#include "linear/compact_packing.h"
#include "linear/linear_work.h"
#include "linear/packed_rows.h"

namespace penstock {

bool is_compact(const at::Tensor& weight, Format format, int64_t granules, int64_t panels) {
  const int64_t exceptions = panels * CompactPanel::bytes(granules);
  if (format != Format::BF16 || panels < 1 || weight.numel() == panels * granules * GRANULE_BYTES ||
      weight.numel() <= exceptions)
    return false;
  const char* data = (const char*)weight.const_data_ptr();
  const auto line = [&](int64_t panel) {
    return (const CompactLine*)(data + panel * CompactPanel::bytes(granules));
  };
  const CompactLine* last = line(panels - 1);
  return line(0)->begin == exceptions && last->exceptions >= 0 && last->exceptions <= granules &&
         last->begin + CompactPanel::exception_bytes(last->exceptions) == weight.numel();
}

void unpack_column(const CompactPanel& panel, int64_t granules, int column, char* to) {
  const CompactLine& line = *panel.line;
  const int at = CompactPanel::byte_of(column);
  for (int64_t g = 0; g < granules; ++g) {
    const uint8_t* pair = (const uint8_t*)panel.pairs + g / 2 * PAIR_BYTES;
    const uint8_t *rest = pair + g % 2 * LINE_BYTES + at, *codes = pair + GRANULE_BYTES + at;
    for (int b = 0; b < 2; ++b) {
      const int code = codes[b] >> g % 2 * 4 & 15;
      const uint16_t number =
          uint16_t((line.high[code] | (rest[b] & 0x80)) << 8 | (line.low[code] | (rest[b] & 0x7F)));
      std::memcpy(to + g * 4 + b * 2, &number, 2);
    }
  }
  for (int64_t i = 0; i < line.exceptions; ++i)
    std::memcpy(to + panel.exceptions[i] * 4, panel.whole + i * GRANULE_BYTES + column * 4, 4);
}

namespace {

int64_t whole_panels(const at::Tensor& weight, int64_t granules) {
  const int64_t bytes = granules * GRANULE_BYTES, panels = bytes > 0 ? weight.numel() / bytes : 0;
  TORCH_CHECK(weight.scalar_type() == at::kByte && weight.is_contiguous() && panels > 0 &&
                  weight.numel() == panels * bytes,
              "a packed weight of these inputs has whole panels");
  return panels;
}

// How a packed weight in bfloat16 becomes compact: a CompactPlan for each panel; and the bytes that
// it then has.
std::tuple<at::Tensor, int64_t> plan(const at::Tensor& weight, int64_t inputs) {
  const int64_t granules = granules_of(Format::BF16, inputs),
                panels = whole_panels(weight, granules);
  at::Tensor out = at::empty({panels * int64_t(sizeof(CompactPlan))}, at::kByte);
  CompactPlan* plans = (CompactPlan*)out.data_ptr();
  const char* data = (const char*)weight.const_data_ptr();
  at::parallel_for(0, panels, grain(granules * PANEL), [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel)
      plans[panel] = KERNEL(plan_compact)(data + panel * granules * GRANULE_BYTES, granules);
  });
  int64_t bytes = panels * CompactPanel::bytes(granules);
  for (int64_t panel = 0; panel < panels; ++panel) {
    plans[panel].begin = bytes;
    bytes += CompactPanel::exception_bytes(plans[panel].exceptions);
  }
  return {out, bytes};
}

// Fills `out`, which has those bytes, as planned.
void write(const at::Tensor& weight, int64_t inputs, const at::Tensor& plans, at::Tensor& out) {
  const int64_t granules = granules_of(Format::BF16, inputs),
                panels = whole_panels(weight, granules);
  TORCH_CHECK(plans.is_contiguous() && plans.scalar_type() == at::kByte &&
                  plans.numel() == panels * int64_t(sizeof(CompactPlan)),
              "there is a plan for each panel");
  const CompactPlan* planned = (const CompactPlan*)plans.const_data_ptr();
  const CompactPlan& end = planned[panels - 1];
  TORCH_CHECK(out.is_contiguous() && out.scalar_type() == at::kByte &&
                  out.numel() == end.begin + CompactPanel::exception_bytes(end.exceptions),
              "out has the wrong size");
  char* to = (char*)out.data_ptr();
  const char* data = (const char*)weight.const_data_ptr();
  at::parallel_for(0, panels, grain(granules * PANEL), [&](int64_t first, int64_t last) {
    for (int64_t panel = first; panel < last; ++panel) KERNEL(write_compact)
    (data + panel * granules * GRANULE_BYTES, granules, planned[panel], to, panel);
  });
}

}  // namespace

TORCH_LIBRARY_FRAGMENT(penstock, m) {
  m.def("plan_compact(Tensor weight, int inputs) -> (Tensor, int)");
  m.def("write_compact(Tensor weight, int inputs, Tensor plans, Tensor(a!) out) -> ()");
}
TORCH_LIBRARY_IMPL(penstock, CPU, m) {
  m.impl("plan_compact", plan);
  m.impl("write_compact", write);
}

}  // namespace penstock
