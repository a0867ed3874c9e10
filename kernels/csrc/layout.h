// How the kernels hold a quantized weight, and how it is packed.
//
// Rows are taken 16 at a time and columns 32 at a time. Within such a block four columns
// of every row lie together, row after row, so that one 32-bit lane holds four columns of
// one row. Four bits: each byte has a code of the first four columns in its low half and
// one of the next four in its high half. A line of 64 bytes with the 16 rows' scales (and one
// with their zero points) stands before the codes of a group, or of two groups where scales
// take 16 bits. So a weight is a single stream from front to back, all in whole cache lines.
//
// The blocks of llama.cpp add three things. Codes of 2, 3, 5 and 6 bits take as many lines a block as they have bits, in
// planes of 4, 2 and 1 bits, see `planes.h`. Groups may have minima, in a line after that of their scales. And scales
// may be integers times a float16 that 256 columns share ("nested"): then a head stands before each 256 columns, with a
// line of the outer scales, and the outer minima after them, and then 16 bytes for each group's scales, and after all of
// these as many for the minima. So a weight takes hardly more bits than in a file.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "planes.h"

namespace quantkit {

constexpr int64_t kNested = 256;  // columns that share a scale of scales

enum class FloatType : int64_t { f32 = 0, f16 = 1, bf16 = 2 };

constexpr int64_t bytes_of(FloatType type) { return type == FloatType::f32 ? 4 : 2; }

// What is subtracted from codes: half their range; a zero point per group; nothing, but a minimum per group from what
// the scale makes of them; or, of codes that are looked up in a table of bytes, 128. Each table has an offset.
enum class Offset : int64_t { middle = 0, zeros = 1, minima = 2, iq4 = 3, e2m1 = 4 };

struct Layout {
  int64_t rows, columns;  // of the weight
  int64_t group;          // columns that share a scale, a multiple of 32, or all; 16 or 32 where scales are nested
  int64_t bits;           // 2 to 6, or 8
  Offset offset;
  int64_t exact;          // whether activations get 16 bits or 8
  FloatType scales;       // the type of the scales, or of outer ones
  int64_t nested;         // whether scales are bytes times those that kNested columns share

  int64_t padded() const { return (columns + kColumns - 1) / kColumns * kColumns; }
  int64_t blocks() const { return padded() / kColumns; }
  int64_t bands() const { return (rows + kRows - 1) / kRows; }
  int64_t groups() const { return group >= columns ? 1 : columns / group; }
  bool zeros() const { return offset == Offset::zeros; }
  bool minima() const { return offset == Offset::minima; }
  // The number of the table; 0 without one.
  int64_t table() const { return offset < Offset::iq4 ? 0 : static_cast<int64_t>(offset) - 2; }
  // Whether `block_tile` multiplies it.
  bool in_blocks() const { return nested || offset >= Offset::minima || (bits != 4 && bits != 8); }
  // Whether scales change within a block.
  bool halved() const { return group < kColumns; }
  int64_t blocks_per_group() const { return groups() == 1 ? blocks() : group / kColumns; }
  int64_t scale_width() const { return bytes_of(scales); }
  int64_t block_bytes() const { return kRows * kColumns * bits / 8; }
  int64_t group_bytes() const { return blocks_per_group() * block_bytes(); }
  // Groups whose scales share a cache line.
  int64_t groups_per_line() const { return kLine / (kRows * scale_width()); }
  // The bytes of all scales of kNested columns, or of all minima.
  int64_t inner_bytes() const { return kNested / group * kRows; }
  // Whether a scale and a minimum of 4 bits each share a byte, as those of Q2_K, where a byte for each would be a fifth
  // of the weight.
  bool paired() const { return nested && minima() && bits == 2; }
  // How far behind inner scales their minima are, by how many bits both are to be shifted then, and which bits count.
  int64_t minima_at() const { return paired() ? 0 : inner_bytes(); }
  int minima_shift() const { return paired() ? 4 : 0; }
  int inner_mask() const { return paired() ? 15 : -1; }
  int64_t head_bytes() const {
    if (nested) return kLine + inner_bytes() * (minima() && !paired() ? 2 : 1);
    return kLine * (zeros() || minima() ? 2 : 1);
  }
  int64_t band_bytes() const {
    if (nested) return columns / kNested * (head_bytes() + kNested / kColumns * block_bytes());
    return (groups() + groups_per_line() - 1) / groups_per_line() * head_bytes() + groups() * group_bytes();
  }
  int64_t bytes() const { return bands() * band_bytes(); }
  int fixed_zero() const { return table() ? 128 : minima() ? 0 : 1 << (bits - 1); }
  bool operator==(const Layout&) const = default;
  // Whether activations become the same integers for both.
  bool like(const Layout& other) const {
    if (columns != other.columns || exact != other.exact || in_blocks() != other.in_blocks()) return false;
    return in_blocks() || (bits == other.bits && offset == other.offset);
  }
};

// A weight to pack: its rows from `first` on, a multiple of 16. Nested scales and minima are bytes, and the outer ones
// floats.
struct Source {
  int64_t first, rows;
  const uint8_t *codes, *scales, *zeros, *minima, *outer, *outer_minima;
};

// Copy what the rows of a band have for each group: `width` bytes from `from` [rows, groups] to `to`.
inline void copy_group(const uint8_t* from, int64_t row, int64_t rows, int64_t groups, int64_t group, int64_t width,
                       uint8_t* to) {
  for (int64_t r = 0; r < rows; ++r) std::memcpy(to + r * width, from + ((row + r) * groups + group) * width, width);
}

// Put some columns of the codes of a band's rows into blocks.
inline void pack_codes(const Layout& at, const uint8_t* from, int64_t rows, int64_t columns, uint8_t* to) {
  for (int64_t c = 0; c < columns; c += kColumns, to += at.block_bytes())
    pack_block(at.bits, from + c, at.columns, rows, std::min(kColumns, columns - c), to);
}

// Pack one band of 16 rows. Rows beyond the last have scale 0, columns beyond the last code 0;
// the activations are 0 there.
inline void pack_band(const Layout& at, int64_t band, const Source& source, uint8_t* packed) {
  const int64_t width = at.scale_width(), row = band * kRows - source.first;
  const int64_t rows = std::min(kRows, source.rows - row);
  const uint8_t* codes = source.codes + row * at.columns;
  uint8_t* to = packed + band * at.band_bytes();
  std::memset(to, 0, at.band_bytes());
  if (at.nested) {
    const int64_t outers = at.columns / kNested, inners = kNested / at.group;
    for (int64_t n = 0; n < outers; ++n) {
      copy_group(source.outer, row, rows, outers, n, width, to);
      if (at.minima()) copy_group(source.outer_minima, row, rows, outers, n, width, to + kRows * width);
      for (int64_t g = 0; g < inners; ++g) {
        uint8_t* inner = to + kLine + g * kRows;
        copy_group(source.scales, row, rows, at.groups(), n * inners + g, 1, inner);
        if (at.minima() && !at.paired())
          copy_group(source.minima, row, rows, at.groups(), n * inners + g, 1, inner + at.minima_at());
        if (at.paired())
          for (int64_t r = 0; r < rows; ++r)
            inner[r] = (inner[r] & 15) | source.minima[(row + r) * at.groups() + n * inners + g] << 4;
      }
      to += at.head_bytes();
      pack_codes(at, codes + n * kNested, rows, kNested, to);
      to += kNested / kColumns * at.block_bytes();
    }
    return;
  }
  uint8_t* head = to;
  for (int64_t g = 0; g < at.groups(); ++g, to += at.group_bytes()) {
    const int64_t offset = g % at.groups_per_line() * kRows;
    if (offset == 0) {
      head = to;
      to += at.head_bytes();
    }
    copy_group(source.scales, row, rows, at.groups(), g, width, head + offset * width);
    if (at.minima()) copy_group(source.minima, row, rows, at.groups(), g, width, head + kLine + offset * width);
    if (at.zeros()) copy_group(source.zeros, row, rows, at.groups(), g, 1, head + kLine + offset);
    const int64_t first = g * at.blocks_per_group() * kColumns;
    pack_codes(at, codes + first, rows, std::min(at.columns - first, at.blocks_per_group() * kColumns), to);
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

// Goes through the heads of a band, block by block.
struct Heads {
  const uint8_t* head;
  int64_t offset = 0;  // in the line of a head that is not nested, where the scales of the block's group begin
  int64_t block = 0;   // of those that share a nested head

  explicit Heads(const Layout& at)
      : nested_(at.nested), per_group_(at.nested ? kNested / kColumns : at.blocks_per_group()),
        per_line_(at.groups_per_line()), bytes_(at.head_bytes()), halved_(at.halved()) {}

  // Go to the next block; `codes` is where the last one ended, and goes past a head. Returns whether it has another
  // head, or scales elsewhere in a line.
  bool next(const uint8_t*& codes) {
    if (left_ > 0) {
      --left_;
      ++block;
      return false;
    }
    left_ = per_group_ - 1;
    block = 0;
    if (nested_) {
      head = codes;
      codes += bytes_;
    } else {
      offset = enter_group(group_++, per_line_, bytes_, codes, head);
    }
    return true;
  }

  // The inner scales of a half of the block; the minima are `minima_at` further.
  const uint8_t* inner(int64_t part) const { return head + kLine + ((block << halved_) + part) * kRows; }

 private:
  int64_t nested_, per_group_, per_line_, bytes_, halved_, left_ = 0, group_ = 0;
};

}  // namespace quantkit
