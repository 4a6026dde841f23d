// The two builds of every kernel: a file of kernels is compiled once for each, in a namespace of
// its name, and one is picked at run time (dispatch.h). build.py has the compiler's flags of each.
// With PENSTOCK_NARROW_ONLY both are the narrower.
#pragma once

#ifdef __aarch64__
// Armv8.2 with the dot products of bytes; and with those of bfloat16 and of signed by unsigned
// bytes.
#define PENSTOCK_NARROW neon
#define PENSTOCK_WIDE neon_bf16
#else
#define PENSTOCK_NARROW avx2
#define PENSTOCK_WIDE avx512
#endif
#ifdef PENSTOCK_NARROW_ONLY
#undef PENSTOCK_WIDE
#define PENSTOCK_WIDE PENSTOCK_NARROW
#endif

// Declares the same kernels of both.
#define PENSTOCK_DECLARE(kernels) \
  namespace PENSTOCK_WIDE {       \
  kernels                         \
  }                               \
  namespace PENSTOCK_NARROW {     \
  kernels                         \
  }
