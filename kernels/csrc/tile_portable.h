// Plain C++: right everywhere.
#pragma once

#include "activations.h"
#include "layout.h"
#include "floats.h"

namespace quantkit {

constexpr const char* kInstructions = "portable";
constexpr int kTokens = 16;  // that a tile takes at once
constexpr int kBands = 1;    // the same
constexpr bool kSigned8 = false;

constexpr Form form_for(int64_t, bool exact, int64_t) { return exact ? Form::halves : Form::bytes; }

// out[t * 16 + r] = row r of the band times token t.
template <int Bits, bool Exact, int Tokens, int Bands>
void tile(const Layout& at, const uint8_t* band, const Record<form_for(Bits, Exact, Tokens), Tokens>* x, float* out,
          int64_t) {
  float total[Tokens][kRows] = {};
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0; g < at.groups(); ++g) {
    const int64_t offset = enter_group(g, at.groups_per_line(), at.head_bytes(), codes, head);
    float scale[kRows];
    for (int r = 0; r < kRows; ++r) scale[r] = load_scale(head, at.scales, offset + r);
    for (int64_t b = 0; b < at.blocks_per_group(); ++b, ++x, codes += at.block_bytes()) {
      int16_t w[kColumns][kRows];
      for (int c = 0; c < kColumns; ++c)
        for (int r = 0; r < kRows; ++r)
          w[c][r] = Bits == 8 ? codes[c / 4 * 64 + r * 4 + c % 4]
                              : codes[c / 8 * 64 + r * 4 + c % 4] >> (c % 8 < 4 ? 0 : 4) & 15;
      for (int t = 0; t < Tokens; ++t) {
        const int8_t *high = x->values[t], *low = x->low(t);
        int32_t sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = at.zeros() ? -head[kLine + offset + r] * x->sums[t] : x->sums[t];
        for (int c = 0; c < kColumns; ++c) {
          const int16_t factor = Exact ? high[c] * 256 + low[c] : high[c];
          for (int r = 0; r < kRows; ++r) sums[r] += w[c][r] * factor;
        }
        for (int r = 0; r < kRows; ++r) total[t][r] += static_cast<float>(sums[r]) * (scale[r] * x->scales[t]);
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int r = 0; r < kRows; ++r) out[t * kRows + r] = total[t][r];
}

// `tile` of weights in blocks.
template <bool Exact, bool Halved, int Tokens, int Bands>
void block_tile(const Layout& at, const uint8_t* band, const Record<form_for(8, Exact, Tokens), Tokens>* x, float* out,
                int64_t) {
  constexpr int kHalves = Halved ? 2 : 1, kWidth = kColumns / kHalves;
  float total[Tokens][kRows] = {};
  const int32_t zero = at.fixed_zero();
  Heads heads(at);
  const uint8_t* codes = band;
  for (int64_t b = at.blocks(); b > 0; --b, ++x, codes += at.block_bytes()) {
    heads.next(codes);
    Codes block;
    unpack_block(at.bits, at.table(), codes, block);
    int16_t w[kColumns][kRows];
    for (int c = 0; c < kColumns; ++c)
      for (int r = 0; r < kRows; ++r) w[c][r] = block(r, c);
    for (int p = 0; p < kHalves; ++p) {
      float scale[kRows], minimum[kRows] = {};
      for (int r = 0; r < kRows; ++r) {
        if (at.nested) {
          const uint8_t* inner = heads.inner(p) + r;
          scale[r] = load_scale(heads.head, at.scales, r) * (static_cast<int8_t>(*inner) & at.inner_mask());
          if (at.minima()) {
            const int of_row = static_cast<int8_t>(inner[at.minima_at()]) >> at.minima_shift() & at.inner_mask();
            minimum[r] = load_scale(heads.head, at.scales, kRows + r) * of_row;
          }
        } else {
          scale[r] = load_scale(heads.head, at.scales, heads.offset + r);
          if (at.minima()) minimum[r] = load_scale(heads.head + kLine, at.scales, heads.offset + r);
        }
      }
      for (int t = 0; t < Tokens; ++t) {
        const int8_t *high = x->values[t], *low = x->low(t);
        const int32_t of_x = x->template sum<kHalves>(t, p);
        int32_t sums[kRows];
        for (int r = 0; r < kRows; ++r) sums[r] = -zero * of_x;
        for (int c = p * kWidth; c < (p + 1) * kWidth; ++c) {
          const int16_t factor = Exact ? high[c] * 256 + low[c] : high[c];
          for (int r = 0; r < kRows; ++r) sums[r] += w[c][r] * factor;
        }
        for (int r = 0; r < kRows; ++r) {
          total[t][r] += static_cast<float>(sums[r]) * (scale[r] * x->scales[t]);
          total[t][r] -= minimum[r] * (static_cast<float>(of_x) * x->scales[t]);
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int r = 0; r < kRows; ++r) out[t * kRows + r] = total[t][r];
}

}  // namespace quantkit
