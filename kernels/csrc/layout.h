// How the kernels hold a quantized weight, and how it is packed.
//
// Rows are taken 16 at a time and columns 32 at a time. Within such a block four columns
// of every row lie together, row after row, so that one 32-bit lane holds four columns of
// one row. Four bits: each byte has a code of the first four columns in its low half and
// one of the next four in its high half. A line of 64 bytes with the 16 rows' scales (and one
// with their zero points) stands before the codes of a group, or of two groups where scales
// take 16 bits. So a weight is a single stream from front to back, all in whole cache lines.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace quantkit {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 32;
constexpr int64_t kLine = 64;  // bytes of a cache line

enum class FloatType : int64_t { f32 = 0, f16 = 1, bf16 = 2 };

constexpr int64_t bytes_of(FloatType type) { return type == FloatType::f32 ? 4 : 2; }

struct Layout {
  int64_t rows, columns;  // of the weight
  int64_t group;          // columns that share a scale, a multiple of 32, or all
  int64_t bits;           // 4 or 8
  int64_t zeros;          // whether there is a zero point per group; otherwise it is 8 or 128
  int64_t exact;          // whether activations get 16 bits or 8
  FloatType scales;

  int64_t padded() const { return (columns + kColumns - 1) / kColumns * kColumns; }
  int64_t blocks() const { return padded() / kColumns; }
  int64_t bands() const { return (rows + kRows - 1) / kRows; }
  int64_t groups() const { return group >= columns ? 1 : columns / group; }
  int64_t blocks_per_group() const { return groups() == 1 ? blocks() : group / kColumns; }
  int64_t scale_width() const { return bytes_of(scales); }
  int64_t block_bytes() const { return kRows * kColumns * bits / 8; }
  int64_t group_bytes() const { return blocks_per_group() * block_bytes(); }
  // Groups whose scales share a cache line.
  int64_t groups_per_line() const { return kLine / (kRows * scale_width()); }
  int64_t head_bytes() const { return kLine * (zeros ? 2 : 1); }
  int64_t band_bytes() const {
    return (groups() + groups_per_line() - 1) / groups_per_line() * head_bytes() + groups() * group_bytes();
  }
  int64_t bytes() const { return bands() * band_bytes(); }
  int fixed_zero() const { return bits == 4 ? 8 : 128; }
  bool operator==(const Layout&) const = default;
  // Whether activations become the same integers for both.
  bool like(const Layout& other) const {
    return columns == other.columns && bits == other.bits && zeros == other.zeros && exact == other.exact;
  }
};

// Pack one band of 16 rows. Rows beyond the last have scale 0, columns beyond the last code 0;
// the activations are 0 there.
inline void pack_band(const Layout& at, int64_t band, const uint8_t* codes, const uint8_t* scales,
                      const uint8_t* zeros, uint8_t* packed) {
  const int64_t width = at.scale_width();
  uint8_t* to = packed + band * at.band_bytes();
  std::memset(to, 0, at.band_bytes());
  uint8_t* head = to;
  for (int64_t g = 0; g < at.groups(); ++g, to += at.group_bytes()) {
    const int64_t offset = g % at.groups_per_line() * kRows;
    if (offset == 0) {
      head = to;
      to += at.head_bytes();
    }
    for (int64_t r = 0; r < kRows && band * kRows + r < at.rows; ++r) {
      const int64_t row = band * kRows + r;
      std::memcpy(head + (offset + r) * width, scales + (row * at.groups() + g) * width, width);
      if (at.zeros) head[kLine + offset + r] = zeros[row * at.groups() + g];
      const int64_t first = g * at.blocks_per_group() * kColumns;
      const int64_t count = std::min(at.columns - first, at.blocks_per_group() * kColumns);
      const uint8_t* from = codes + row * at.columns + first;
      for (int64_t i = 0; i < count; ++i) {
        uint8_t* block = to + i / kColumns * at.block_bytes();
        const int64_t c = i % kColumns;
        if (at.bits == 8) {
          block[c / 4 * 64 + r * 4 + c % 4] = from[i];
        } else {
          block[c / 8 * 64 + r * 4 + c % 4] |= c % 8 < 4 ? from[i] : from[i] << 4;
        }
      }
    }
  }
}

// The codes of a row in the order of its columns, and where the scales and zero points of its groups stand, for each
// group: `take(first column, columns, codes, scale, zero)`, the last null where there are none.
template <typename Take>
void unpack_row(const Layout& at, int64_t row, const uint8_t* packed, uint8_t* codes, Take take) {
  const uint8_t* from = packed + row / kRows * at.band_bytes();
  const uint8_t* head = from;
  const int64_t r = row % kRows;
  for (int64_t g = 0; g < at.groups(); ++g, from += at.group_bytes()) {
    const int64_t offset = g % at.groups_per_line() * kRows;
    if (offset == 0) {
      head = from;
      from += at.head_bytes();
    }
    const int64_t first = g * at.blocks_per_group() * kColumns;
    const int64_t count = std::min(at.columns - first, at.blocks_per_group() * kColumns);
    for (int64_t i = 0; i < count; ++i) {
      const uint8_t* block = from + i / kColumns * at.block_bytes();
      const int64_t c = i % kColumns;
      if (at.bits == 8) {
        codes[i] = block[c / 4 * 64 + r * 4 + c % 4];
      } else {
        const uint8_t both = block[c / 8 * 64 + r * 4 + c % 4];
        codes[i] = c % 8 < 4 ? both & 0xF : both >> 4;
      }
    }
    take(first, count, codes, head + (offset + r) * at.scale_width(), at.zeros ? head + kLine + offset + r : nullptr);
  }
}

// Where in the line of a head the scales of group g begin. A head that stands before the group's codes
// becomes `head`, and `codes` goes past it.
inline int64_t enter_group(int64_t g, int64_t groups_per_line, int64_t head_bytes, const uint8_t*& codes,
                           const uint8_t*& head) {
  const int64_t offset = g % groups_per_line * kRows;
  if (offset == 0) {
    head = codes;
    codes += head_bytes;
  }
  return offset;
}

}  // namespace quantkit
