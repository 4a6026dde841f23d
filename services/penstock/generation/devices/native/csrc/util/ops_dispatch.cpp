// The instruction set that the kernels use.
#include "util/dispatch.h"

#ifdef __aarch64__
#include <asm/hwcap.h>
#include <sys/auxv.h>
#else
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace penstock {
namespace {

#ifdef __aarch64__
bool has_tiles() { return false; }
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
// Tile registers, their products in bfloat16 and of bytes, and Linux's leave to use them:
// since 5.16 a process has to ask (Documentation/arch/x86/xstate.rst).
bool has_tiles() {
#ifdef PENSTOCK_NARROW_ONLY
  return false;
#endif
  constexpr unsigned needed = 1u << 22 | 1u << 24 | 1u << 25;
  constexpr long request_permission = 0x1023, tile_data = 18;
  unsigned a, b, c, d = 0;
  return has_wide() && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & needed) == needed &&
         syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
}
#endif

#define NAME_OF(set) NAME_OF_EXPANDED(set)
#define NAME_OF_EXPANDED(set) #set
const std::string WIDE_NAME = NAME_OF(PENSTOCK_WIDE), NARROW_NAME = NAME_OF(PENSTOCK_NARROW),
                  TILES_NAME = "amx";

}  // namespace

bool wide = has_wide(), tiles = has_tiles();

namespace {

// Instruction set of this CPU, or the narrower one that was asked for (tests run all); "" where the
// CPU has none. "amx" is the wider one with tile registers.
std::string instruction_set(const std::string& wanted) {
  if (!wanted.empty()) {
    tiles = wanted == TILES_NAME && has_tiles();
    wide = tiles || (wanted == WIDE_NAME && has_wide());
  }
  return tiles ? TILES_NAME : wide ? WIDE_NAME : has_narrow() ? NARROW_NAME : "";
}

}  // namespace

TORCH_LIBRARY(penstock, m) { m.def("instruction_set(str wanted) -> str", instruction_set); }

}  // namespace penstock
