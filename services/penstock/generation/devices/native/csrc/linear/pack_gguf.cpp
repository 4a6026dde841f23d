// Rows of a GGUF file into the panels of gguf_blocks.h, and back into numbers. Codes go by words of
// four.
#include <algorithm>
#include <bit>
#include <cstring>

#include "linear/gguf_blocks.h"
#include "linear/gguf_codes.h"

namespace penstock {
namespace NS {
namespace {

constexpr int WORDS = GROUP / 4;

static uint32_t word(const uint8_t* p) {
  uint32_t w;
  std::memcpy(&w, p, 4);
  return w;
}
static uint16_t half(const uint8_t* p) {
  uint16_t h;
  std::memcpy(&h, p, 2);
  return h;
}
// Exact for all but NaN and infinity, which are refused.
static float to_float_of_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, part = h & 1023;
  if (exponent == 0) {
    const float tiny = float(part) * 0x1p-24f;
    return sign != 0 ? -tiny : tiny;
  }
  return std::bit_cast<float>(sign | (exponent + 112) << 23 | part << 13);
}
static bool is_finite(uint16_t h) { return (h & 0x7C00) != 0x7C00; }

// Four bits as the lowest of four bytes.
static uint32_t spread_bits(uint32_t bits) { return (bits * 0x00204081) & 0x01010101; }

// A group of a row: codes as words, and its scales and offset as they are stored.
struct StoredGroup {
  uint32_t codes[WORDS];
  uint16_t scale[2], offset;
};
struct StoredHead {
  uint16_t scale, offset;
};

// 16 bytes: the lower halves, then the higher ones.
static void halves_of(const uint8_t* p, uint32_t (&codes)[WORDS]) {
  for (int i = 0; i < 4; ++i) {
    codes[i] = word(p + 4 * i) & 0x0F0F0F0F;
    codes[i + 4] = word(p + 4 * i) >> 4 & 0x0F0F0F0F;
  }
}

// Bytes of groups 2 * n (lower halves) and 2 * n + 1 (higher ones).
static void half_of(const uint8_t* p, int64_t g, uint32_t (&codes)[WORDS]) {
  for (int i = 0; i < WORDS; ++i) codes[i] = word(p + g / 2 * 32 + 4 * i) >> g % 2 * 4 & 0x0F0F0F0F;
}

// Scale and minimum of group g in the 12 bytes of Q4_K and Q5_K.
static void six_bits(const uint8_t* p, int64_t g, StoredGroup& group) {
  if (g < 4) {
    group.scale[0] = p[g] & 63, group.offset = p[g + 4] & 63;
    return;
  }
  group.scale[0] = (p[g + 4] & 15) | p[g - 4] >> 6 << 4;
  group.offset = p[g + 4] >> 4 | p[g] >> 6 << 4;
}

static StoredHead head_of(BlockType type, const uint8_t* block) {
  switch (type) {
    case BlockType::Q4_K:
    case BlockType::Q5_K:
      return {half(block), half(block + 2)};
    case BlockType::Q6_K:
      return {half(block + 208), 0};
    case BlockType::IQ4_XS:
      return {half(block), 0};
    default:
      return {0, 0};
  }
}

static StoredGroup group_of(BlockType type, const uint8_t* b, int64_t g) {
  StoredGroup group{};
  group.scale[0] = half(b);
  switch (type) {
    case BlockType::Q4_0:
    case BlockType::IQ4_NL:
      halves_of(b + 2, group.codes);
      break;
    case BlockType::Q4_1:
      group.offset = half(b + 2);
      halves_of(b + 4, group.codes);
      break;
    case BlockType::Q5_0:
    case BlockType::Q5_1: {
      const bool has_offset = type == BlockType::Q5_1;
      const uint8_t* high = b + (has_offset ? 4 : 2);
      if (has_offset) group.offset = half(b + 2);
      halves_of(high + 4, group.codes);
      for (int i = 0; i < WORDS; ++i) group.codes[i] |= spread_bits(word(high) >> 4 * i & 15) << 4;
      break;
    }
    case BlockType::Q8_0:
      for (int i = 0; i < WORDS; ++i) group.codes[i] = word(b + 2 + 4 * i) ^ 0x80808080;
      break;
    case BlockType::Q4_K:
      six_bits(b + 4, g, group);
      half_of(b + 16, g, group.codes);
      break;
    case BlockType::Q5_K:
      six_bits(b + 4, g, group);
      half_of(b + 48, g, group.codes);
      for (int i = 0; i < WORDS; ++i)
        group.codes[i] |= (word(b + 16 + 4 * i) >> g & 0x01010101) << 4;
      break;
    case BlockType::Q6_K: {
      const uint8_t *low = b + g / 4 * 64 + g % 2 * 32, *high = b + 128 + g / 4 * 32;
      for (int i = 0; i < WORDS; ++i)
        group.codes[i] = (word(low + 4 * i) >> (g % 4 / 2 * 4) & 0x0F0F0F0F) |
                         (word(high + 4 * i) >> g % 4 * 2 & 0x03030303) << 4;
      group.scale[0] = b[192 + 2 * g], group.scale[1] = b[193 + 2 * g];
      break;
    }
    case BlockType::IQ4_XS:
      group.scale[0] =
          uint8_t(((b[4 + g / 2] >> g % 2 * 4 & 15) | (half(b + 2) >> 2 * g & 3) << 4) - 32);
      halves_of(b + 8 + 16 * g, group.codes);
      break;
    case BlockType::MXFP4:
      group.scale[0] = b[0];
      halves_of(b + 1, group.codes);
      break;
  }
  return group;
}

static void put_word(char* rows, int row, int column, uint32_t value) {
  std::memcpy(rows + (row * PANEL + column) * 4, &value, 4);
}
static uint32_t word_at(const char* rows, int row, int column) {
  return word((const uint8_t*)rows + (row * PANEL + column) * 4);
}

static void put_group(const BlockTraits& traits, const StoredGroup& from, char* group, int column) {
  if (traits.bits == 8) {
    for (int i = 0; i < WORDS; ++i) put_word(group, i, column, from.codes[i]);
  } else {
    for (int k = 0; k < WORDS / 2; ++k)
      put_word(group, k, column,
               (from.codes[2 * k] & 0x0F0F0F0F) | (from.codes[2 * k + 1] & 0x0F0F0F0F) << 4);
    char* planes = group + GROUP / 2 * PANEL;
    uint32_t bits[2] = {};
    for (int i = 0; i < WORDS; ++i)
      if (traits.bits == 5)
        bits[0] |= (from.codes[i] >> 4 & 0x01010101) << i;
      else
        bits[i / 4] |= (from.codes[i] >> 4 & 0x03030303) << i % 4 * 2;
    for (int p = 0; p < traits.bits - 4; ++p) put_word(planes, p, column, bits[p]);
  }
  const int64_t size = traits.scale_bytes();
  char* to = group + traits.code_bytes() + column * size;
  for (int s = 0; s < traits.scales; ++s) std::memcpy(to + s * PANEL * size, &from.scale[s], size);
  if (traits.has_offset) std::memcpy(to + traits.scales * PANEL * size, &from.offset, size);
}

}  // namespace

bool pack_block_row(BlockType type, const uint8_t* row, int64_t inputs, char* panel, int column) {
  const BlockTraits traits = traits_of(type);
  bool finite = true;
  for (int64_t i = 0; i < inputs; i += traits.inputs, row += traits.stored_bytes) {
    const StoredHead head = head_of(type, row);
    if (traits.kind == Scales::BYTES) {
      std::memcpy(panel + column * 2, &head.scale, 2);
      if (traits.has_offset) std::memcpy(panel + (PANEL + column) * 2, &head.offset, 2);
      finite &= is_finite(head.scale) && is_finite(head.offset);
    }
    panel += traits.head_bytes();
    for (int64_t g = 0; g < traits.inputs / GROUP; ++g, panel += traits.group_bytes()) {
      const StoredGroup group = group_of(type, row, g);
      if (traits.kind == Scales::HALVES)
        finite &= is_finite(group.scale[0]) && is_finite(group.offset);
      put_group(traits, group, panel, column);
    }
  }
  return finite;
}

template <typename T>
static void unpack_row(BlockType type, const char* panel, int64_t inputs, int column, T* out) {
  const BlockTraits traits = traits_of(type);
  const int64_t size = traits.scale_bytes();
  const auto number = [&](const char* p) {
    if (traits.kind == Scales::HALVES) return to_float_of_half(half((const uint8_t*)p));
    const uint32_t e = uint8_t(*p);
    if (traits.kind == Scales::EXPONENTS)
      return std::bit_cast<float>(e < 2 ? (e + 1) << 21 : (e - 1) << 23);
    return traits.has_offset ? float(uint8_t(*p)) : float(int8_t(*p));
  };
  for (int64_t i = 0; i < inputs; i += traits.inputs) {
    float unit = 1, least = 1;
    if (traits.kind == Scales::BYTES) {
      unit = to_float_of_half(half((const uint8_t*)panel + column * 2));
      if (traits.has_offset)
        least = -to_float_of_half(half((const uint8_t*)panel + (PANEL + column) * 2));
    }
    panel += traits.head_bytes();
    for (int64_t g = 0; g < traits.inputs / GROUP; ++g, panel += traits.group_bytes()) {
      const char* scales = panel + traits.code_bytes() + column * size;
      const float offset =
          traits.has_offset ? least * number(scales + traits.scales * PANEL * size) : 0;
      for (int n = 0; n < WORDS; ++n) {
        uint32_t codes;
        if (traits.bits == 8) {
          codes = word_at(panel, n, column);
        } else {
          codes = word_at(panel, n / 2, column) >> n % 2 * 4 & 0x0F0F0F0F;
          const char* planes = panel + GROUP / 2 * PANEL;
          if (traits.bits == 5)
            codes |= (word_at(planes, 0, column) >> n & 0x01010101) << 4;
          else if (traits.bits == 6)
            codes |= (word_at(planes, n / 4, column) >> n % 4 * 2 & 0x03030303) << 4;
        }
        const float scale = unit * number(scales + n / (WORDS / traits.scales) * PANEL * size);
        for (int j = 0; j < 4; ++j) {
          const int stored = codes >> 8 * j & 255,
                    code = traits.codes == Codes::WHOLE ? stored : table_of(traits.codes)[stored];
          const float product = scale * float(code - traits.zero);
          store(out++, traits.has_offset ? product + offset : product);
        }
      }
    }
  }
}

void unpack_block_row(BlockType type, const char* panel, int64_t inputs, int column, void* out,
                      bool is_bf16) {
  is_bf16 ? unpack_row(type, panel, inputs, column, (bf16*)out)
          : unpack_row(type, panel, inputs, column, (float*)out);
}

}  // namespace NS
}  // namespace penstock
