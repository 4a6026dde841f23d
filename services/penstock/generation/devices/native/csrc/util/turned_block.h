// Sizes of the blocks that are turned before numbers are rounded (rotate.h); rounding/rotation.py
// has the same.
#pragma once
#include <cstdint>

namespace penstock {

// Numbers of a block of a row: the largest of these, at most `most`, that divides it; 1: nothing is
// turned.
inline int64_t turned_block(int64_t width, int64_t most = 64) {
  for (const int64_t block : {256, 128, 64, 32, 16})
    if (block <= most && width % block == 0) return block;
  return 1;
}
// The same of a head of int8 keys or values: as much of it as can be.
inline int64_t turned_head(int64_t head_dim) { return turned_block(head_dim, 256); }
// Power of two by which one side of a product is made smaller than its turned blocks; the other
// side is made smaller by the rest of the block. Then the product is that of rows that are not
// turned, and the numbers stay in their range.
inline float turned_by(int64_t block) {
  int64_t by = 1;
  while (4 * by * by <= block) by *= 2;
  return float(by);
}
inline float turned_by_rest(int64_t block) { return float(block) / turned_by(block); }

}  // namespace penstock
