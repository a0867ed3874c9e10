// The whole product: activations to integers, bands shared out among threads.
#pragma once

#include <algorithm>
#include <cstdint>

#include "floats.h"
#include "layout.h"
#include "threads.h"
#include "tile.h"
#include "workspace.h"

namespace quantkit {

constexpr int64_t kPanel = 64;  // tokens whose activations stay in cache while the bands pass by
constexpr int64_t kStretch = 256;  // columns made floats at a time, a multiple of 32

template <int Bits, bool Exact, int Tokens>
void tiles(const Layout& at, const uint8_t* band, const Workspace& x, int64_t token, int64_t count, float* out) {
  for (; count >= Tokens; token += Tokens, count -= Tokens, out += Tokens * kRows) {
    using Records = Record<form_for(Bits, Exact, Tokens), Tokens>;
    tile<Bits, Exact, Tokens>(at, band, reinterpret_cast<const Records*>(x.records(token)), out);
  }
  if constexpr (Tokens > 1) tiles<Bits, Exact, Tokens / 2>(at, band, x, token, count, out);
}

// A band times tokens: out[t * 16 + r].
inline void band_product(const Layout& at, const uint8_t* band, const Workspace& x, int64_t token, int64_t count,
                         float* out) {
  if (at.bits == 4 && at.exact) tiles<4, true, kTokens>(at, band, x, token, count, out);
  if (at.bits == 4 && !at.exact) tiles<4, false, kTokens>(at, band, x, token, count, out);
  if (at.bits == 8 && at.exact) tiles<8, true, kTokens>(at, band, x, token, count, out);
  if (at.bits == 8 && !at.exact) tiles<8, false, kTokens>(at, band, x, token, count, out);
}

// A packed weight and what is added to its products.
struct Linear {
  Layout at;
  const uint8_t* bands;
  const void* bias;  // [O] in the type of x, or null
};

// y[m, n] = sum over k of x[m, k] w[n, k] + bias[n], all of one type, on so many threads.
// What comes is added to what is there if `add`, and then of float32.
inline void matmul(const Linear& linear, const void* x, FloatType type, int64_t tokens, int threads, void* y,
                   bool add = false) {
  const Layout& at = linear.at;
  const Workspace workspace(at, tokens);
  if (at.rows * at.columns * tokens < kAlone) threads = 1;
  Pool& pool = Pool::shared();
  pool.share(tokens, 1, threads, [&](int64_t token) {
    float row[kStretch];
    for (int64_t from = 0; from < at.columns; from += kStretch) {
      const int64_t count = std::min(kStretch, at.columns - from);
      const float* values = load_floats(x, type, token * at.columns + from, count, row);
      workspace.quantize(values, count, token, from / kColumns);
    }
  });
  const int64_t panels = (tokens + kPanel - 1) / kPanel;
  pool.share(panels * at.bands(), 1, threads, [&](int64_t index) {
    const int64_t panel = index / at.bands(), band = index % at.bands();
    const int64_t token = panel * kPanel, count = std::min(kPanel, tokens - token);
    const int64_t row = band * kRows, rows = std::min(kRows, at.rows - row);
    alignas(64) float out[kPanel * kRows];
    band_product(at, linear.bands + band * at.band_bytes(), workspace, token, count, out);
    float room[kRows] = {};
    const float* offset = linear.bias ? load_floats(linear.bias, type, row, rows, room) : room;
    for (int64_t t = 0; t < count; ++t) {
      float* of = out + t * kRows;
      for (int64_t r = 0; r < rows; ++r) of[r] += offset[r];
      const int64_t place = (token + t) * at.rows + row;
      if (add) {
        float* sums = static_cast<float*>(y) + place;
        for (int64_t r = 0; r < rows; ++r) sums[r] += of[r];
      } else {
        store_floats(of, rows, y, type, place);
      }
    }
  });
}

}  // namespace quantkit
