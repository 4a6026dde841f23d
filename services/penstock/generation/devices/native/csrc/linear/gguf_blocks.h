// Weights in the blocks of GGUF's types, at the size of the file. A weight begins with a table: for
// each panel of 32 outputs the place of its bytes and its type, and then the end of the last, so
// that a product may have panels of several types. A panel is the outputs' blocks, and a block is
//
//   head    bytes as scales: float16 numbers that multiply them, (32), and as many for the offsets
//   groups  of 32 inputs each:
//           codes   halves of bytes as int4 has them (linear.h), (4, 32, 4 B); or bytes, (8, 32, 4
//                   B), 128 for 0
//           planes  further bits: of each output a word for one bit, two words for two, (1 or 2,
//                   32, 4 B); byte j of a word has those of bytes j of the codes, in their order
//           scales  (1 or 2, 32) of the 32 or 16 inputs, as float16, bytes or exponents; and the
//                   offsets, (32), as float16 or bytes
//
// Rows of x are quantised by groups of 32, with a sum for each 16.
#pragma once
#include "linear/linear.h"

namespace penstock {

// Numbered as in ggml.
enum class BlockType : int {
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  IQ4_NL = 20,
  IQ4_XS = 23,
  MXFP4 = 39,
};

enum class Scales : int { HALVES, BYTES, EXPONENTS };
// What a code means: itself, or a number of a table.
enum class Codes : int { WHOLE, IQ4, FP4 };

struct BlockTraits {
  int inputs = 0;        // of a block; 0: there is no such type
  int stored_bytes = 0;  // of a block in a file
  int bits = 4;          // of a code: 4, 5, 6 or 8
  int zero = 0;          // the number that means 0
  int most = 15;         // the largest number
  int scales = 1;        // of a group
  Scales kind = Scales::HALVES;
  bool has_offset = false;
  Codes codes = Codes::WHOLE;

  constexpr int64_t code_bytes() const {
    return bits == 8 ? GROUP * PANEL : (GROUP / 2 + GROUP / 8 * (bits - 4)) * PANEL;
  }
  constexpr int64_t scale_bytes() const { return kind == Scales::HALVES ? 2 : 1; }
  constexpr int64_t group_bytes() const {
    return code_bytes() + scale_bytes() * (scales + has_offset) * PANEL;
  }
  constexpr int64_t head_bytes() const {
    return kind == Scales::BYTES ? 2 * (1 + has_offset) * PANEL : 0;
  }
  constexpr int64_t block_bytes() const { return head_bytes() + inputs / GROUP * group_bytes(); }
};

constexpr BlockTraits traits_of(BlockType type) {
  switch (type) {
    case BlockType::Q4_0:
      return {.inputs = 32, .stored_bytes = 18, .zero = 8};
    case BlockType::Q4_1:
      return {.inputs = 32, .stored_bytes = 20, .has_offset = true};
    case BlockType::Q5_0:
      return {.inputs = 32, .stored_bytes = 22, .bits = 5, .zero = 16, .most = 31};
    case BlockType::Q5_1:
      return {.inputs = 32, .stored_bytes = 24, .bits = 5, .most = 31, .has_offset = true};
    case BlockType::Q8_0:
      return {.inputs = 32, .stored_bytes = 34, .bits = 8, .zero = 128, .most = 255};
    case BlockType::Q4_K:
      return {.inputs = 256, .stored_bytes = 144, .kind = Scales::BYTES, .has_offset = true};
    case BlockType::Q5_K:
      return {
          .inputs = 256,
          .stored_bytes = 176,
          .bits = 5,
          .most = 31,
          .kind = Scales::BYTES,
          .has_offset = true,
      };
    case BlockType::Q6_K:
      return {
          .inputs = 256,
          .stored_bytes = 210,
          .bits = 6,
          .zero = 32,
          .most = 63,
          .scales = 2,
          .kind = Scales::BYTES,
      };
    case BlockType::IQ4_NL:
      return {.inputs = 32, .stored_bytes = 18, .zero = 128, .most = 255, .codes = Codes::IQ4};
    case BlockType::IQ4_XS:
      return {
          .inputs = 256,
          .stored_bytes = 136,
          .zero = 128,
          .most = 255,
          .kind = Scales::BYTES,
          .codes = Codes::IQ4,
      };
    case BlockType::MXFP4:
      return {
          .inputs = 32,
          .stored_bytes = 17,
          .zero = 12,
          .most = 24,
          .kind = Scales::EXPONENTS,
          .codes = Codes::FP4,
      };
  }
  return {};
}

// Bytes of a panel of this many inputs, whole blocks.
inline int64_t panel_bytes(BlockType type, int64_t inputs) {
  const BlockTraits traits = traits_of(type);
  return inputs / traits.inputs * traits.block_bytes();
}

// The table at the beginning of a weight.
struct PanelTable {
  const int64_t* entries;

  explicit PanelTable(const char* weight) : entries((const int64_t*)weight) {}
  int64_t offset(int64_t panel) const { return entries[panel] >> 8; }
  BlockType type(int64_t panel) const { return BlockType(entries[panel] & 255); }

  static int64_t bytes(int64_t panels) { return ((panels + 1) * 8 + 63) / 64 * 64; }
  // True for a table of a weight of this many bytes.
  bool is_whole(int64_t num_bytes, int64_t panels, int64_t inputs) const {
    if (panels < 1 || num_bytes < bytes(panels)) return false;
    int64_t at = bytes(panels);
    for (int64_t panel = 0; panel < panels; ++panel) {
      const int64_t width = traits_of(type(panel)).inputs;
      if (width == 0 || inputs % width != 0 || offset(panel) != at) return false;
      at += panel_bytes(type(panel), inputs);
    }
    return offset(panels) == at && at <= num_bytes;
  }
};

// Takes the sums of rows and a panel, (rows, PANEL), without bias.
typedef void (*FinishPanel)(const LinearArgs&, int64_t row, int64_t rows, int64_t panel,
                            float (*sums)[PANEL]);
// Panels for which the rows of a task are prepared once.
constexpr int64_t BLOCK_PANELS_AT_ONCE = 16;

#define PENSTOCK_BLOCK_KERNELS                                                                    \
  /* Calls `finish` with the sums of each panel of a task. */                                     \
  void sum_blocks(const LinearArgs&, const LinearTask&, FinishPanel finish);                      \
  /* Row `row` of a file, in its blocks, as column `column` of a panel; false: a scale is none or \
   * infinite. */                                                                                 \
  bool pack_block_row(BlockType, const uint8_t* row, int64_t inputs, char* panel, int column);    \
  /* The numbers of a column of a panel, as bfloat16 or float. */                                 \
  void unpack_block_row(BlockType, const char* panel, int64_t inputs, int column, void* out,      \
                        bool bf16);
PENSTOCK_DECLARE(PENSTOCK_BLOCK_KERNELS)
#undef PENSTOCK_BLOCK_KERNELS

}  // namespace penstock
