// Plain C++: right everywhere.
#pragma once

#include "activations.h"
#include "layout.h"
#include "floats.h"

namespace quantkit {

constexpr const char* kInstructions = "portable";
constexpr int kTokens = 4;  // that a tile takes at once
constexpr bool kWide8 = false;

// out[t * 16 + r] = row r of the band times token t.
template <int Bits, bool Exact, int Tokens>
void tile(const Layout& at, const uint8_t* band, const Activations& x, int64_t token, float* out) {
  float total[Tokens][kRows] = {};
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0, b = 0; g < at.groups(); ++g) {
    const int64_t place = enter_group(g, at.together(), at.head_bytes(), codes, head);
    float scale[kRows];
    for (int r = 0; r < kRows; ++r) scale[r] = load_scale(head, at.scales, place + r);
    for (int64_t stop = b + at.blocks_per_group(); b < stop; ++b, codes += at.block_bytes()) {
      for (int t = 0; t < Tokens; ++t) {
        const int64_t block = (token + t) * x.blocks + b;
        const int8_t* high = x.high + block * kColumns;
        const int8_t* low = x.low + block * kColumns;
        for (int r = 0; r < kRows; ++r) {
          const int32_t zero = at.zeros ? head[kLine + place + r] : at.fixed_zero();
          int32_t sum = -zero * x.sums[block];
          for (int c = 0; c < kColumns; ++c) {
            int32_t code;
            if (Bits == 8) {
              code = codes[c / 4 * 64 + r * 4 + c % 4];
            } else {
              code = codes[c / 8 * 64 + r * 4 + c % 4] >> (c % 8 < 4 ? 0 : 4) & 15;
            }
            sum += code * (Exact ? high[c] * 256 + low[c] : high[c]);
          }
          total[t][r] += static_cast<float>(sum) * (scale[r] * x.scales[block]);
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int r = 0; r < kRows; ++r) out[t * kRows + r] = total[t][r];
}

}  // namespace quantkit
