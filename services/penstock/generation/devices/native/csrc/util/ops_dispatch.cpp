// The instruction set that the kernels use.
#include "util/dispatch.h"

namespace penstock {
namespace {

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

// Instruction set of this CPU, or the narrower one that was asked for (tests run both): "avx512",
// "avx2" or "".
std::string instruction_set(const std::string& wanted) {
  if (!wanted.empty()) wide = wanted == "avx512" && has_avx512();
  return wide ? "avx512" : has_avx2() ? "avx2" : "";
}

}  // namespace

bool wide = has_avx512();

TORCH_LIBRARY(penstock, m) { m.def("instruction_set(str wanted) -> str", instruction_set); }

}  // namespace penstock
