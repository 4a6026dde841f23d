// Matrices in the tile registers of x86's AMX: up to 16 rows of 64 bytes each. The operating system
// gives them to a process that asks (ops_dispatch.cpp). Source: Intel 64 and IA-32 Architectures
// Software Developer's Manual, volume 2, LDTILECFG, TILELOADD, TDPBF16PS, TDPBUSD.
#pragma once
#ifdef __AVX512F__
#define PENSTOCK_TILES
#include <cstdint>

namespace penstock {

// Set once when the library is loaded, changed only by tests; only where `wide` is.
extern bool tiles;

namespace NS {

// Rows of a tile, and the 32-bit words of one.
constexpr int TILE_ROWS = 16, TILE_WORDS = 16;

// Shapes of the registers, as LDTILECFG reads them.
struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int64_t count, int64_t words = TILE_WORDS) {
    bytes[tile] = uint16_t(words * 4);
    rows[tile] = uint8_t(count);
  }
};

// Assembly, so that no other file of this instruction set may use the registers, and any compiler
// takes it.
static inline void set_shapes(const TileShapes& shapes) {
  asm volatile("ldtilecfg %0" : : "m"(shapes));
}
static inline void release_tiles() { asm volatile("tilerelease"); }
template <int T>
static inline void clear_tile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(T));
}
// `stride`: bytes from a row to the next.
template <int T>
static inline void load_tile(const void* from, int64_t stride) {
  asm volatile("tileloadd (%1,%2,1), %%tmm%c0" : : "i"(T), "r"(from), "r"(stride) : "memory");
}
template <int T>
static inline void store_tile(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c0, (%1,%2,1)" : : "i"(T), "r"(to), "r"(stride) : "memory");
}

// Adds A (rows, words) times B (words, columns) to C. A word is two bfloat16: their products are
// summed apart over the words, in float32, and both sums are added to C. Subnormal numbers are 0.
template <int C, int A, int B>
static inline void add_bf16_product() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// A word is four bytes, unsigned in A and signed in B; sums are whole numbers of 32 bits.
template <int C, int A, int B>
static inline void add_byte_product() {
  asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace NS
}  // namespace penstock
#endif
