// Rows of a packed weight as floats.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "floats.h"
#include "layout.h"

namespace quantkit {

// Dequantize a row to y [columns]. All products of codes with scales in 16 bits, or with nested ones, are exact in
// float32, so that it does not matter whether compilers fuse a product with the difference that follows.
inline void dequantize_row(const Layout& at, int64_t row, const uint8_t* bands, float* y) {
  const int64_t r = row % kRows, parts = at.halved() ? 2 : 1, width = kColumns / parts;
  const uint8_t* codes = bands + row / kRows * at.band_bytes();
  Heads heads(at);
  for (int64_t first = 0; first < at.columns; first += kColumns) {
    heads.next(codes);
    Codes block;
    unpack_block(at.bits, at.table(), codes, block);
    codes += at.block_bytes();
    for (int64_t part = 0; part < parts; ++part) {
      float step, low = 0, zero = static_cast<float>(at.fixed_zero());
      if (at.nested) {
        const uint8_t* inner = heads.inner(part) + r;
        step = load_scale(heads.head, at.scales, r) * (static_cast<int8_t>(*inner) & at.inner_mask());
        if (at.minima()) {
          const int minimum = static_cast<int8_t>(inner[at.minima_at()]) >> at.minima_shift() & at.inner_mask();
          low = load_scale(heads.head, at.scales, kRows + r) * minimum;
        }
      } else {
        step = load_scale(heads.head, at.scales, heads.offset + r);
        if (at.minima()) low = load_scale(heads.head + kLine, at.scales, heads.offset + r);
        if (at.zeros()) zero = heads.head[kLine + heads.offset + r];
      }
      const int64_t from = part * width, end = std::min(from + width, at.columns - first);
      for (int64_t c = from; c < end; ++c) {
        const uint8_t code = block(r, c);
        y[first + c] = at.minima() ? code * step - low : (code - zero) * step;
      }
    }
  }
}

}  // namespace quantkit
