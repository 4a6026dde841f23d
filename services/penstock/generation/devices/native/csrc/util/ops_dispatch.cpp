// The instruction set that the kernels use.
#include "util/dispatch.h"

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace penstock {
namespace {

#ifdef __aarch64__
bool has_narrow() { return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) != 0; }
bool has_wide() {
  const unsigned long needed = HWCAP2_BF16 | HWCAP2_I8MM;
  return has_narrow() && (getauxval(AT_HWCAP2) & needed) == needed;
}
#else
bool has_narrow() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __builtin_cpu_supports("f16c");
}
bool has_wide() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
}
#endif

#define NAME_OF(set) NAME_OF_EXPANDED(set)
#define NAME_OF_EXPANDED(set) #set
const std::string WIDE_NAME = NAME_OF(PENSTOCK_WIDE), NARROW_NAME = NAME_OF(PENSTOCK_NARROW);

// Instruction set of this CPU, or the narrower one that was asked for (tests run both); "" where
// the CPU has neither.
std::string instruction_set(const std::string& wanted) {
  if (!wanted.empty()) wide = wanted == WIDE_NAME && has_wide();
  return wide ? WIDE_NAME : has_narrow() ? NARROW_NAME : "";
}

}  // namespace

bool wide = has_wide();

TORCH_LIBRARY(penstock, m) { m.def("instruction_set(str wanted) -> str", instruction_set); }

}  // namespace penstock
