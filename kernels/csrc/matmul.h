// Whole products. With a packed weight activations become integers and threads share the bands; weights of floats are
// multiplied row by row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "float_matmul.h"
#include "floats.h"
#include "layout.h"
#include "threads.h"
#include "vector_math.h"
#include "workspace.h"

namespace quantkit {

constexpr int64_t kConverted = 256;  // columns converted to float32 at a time, a multiple of 32

// The inner loop for codes of 4 or 8 bits.
template <int Bits, bool Exact>
struct PlainTile {
  template <int Tokens>
  using Records = Record<form_for(Bits, Exact, Tokens), Tokens>;
  template <int Tokens, int Bands>
  static void run(const Layout& at, const uint8_t* band, const Records<Tokens>* x, float* out, int64_t step) {
    tile<Bits, Exact, Tokens, Bands>(at, band, x, out, step);
  }
};

// The inner loop for weights in blocks; with `Halved`, scales change within a block.
template <bool Exact, bool Halved>
struct BlockTile {
  template <int Tokens>
  using Records = Record<form_for(8, Exact, Tokens), Tokens>;
  template <int Tokens, int Bands>
  static void run(const Layout& at, const uint8_t* band, const Records<Tokens>* x, float* out, int64_t step) {
    block_tile<Exact, Halved, Tokens, Bands>(at, band, x, out, step);
  }
};

template <class Tile, int Tokens = kTokens>
void tiles(const Layout& at, const uint8_t* band, int64_t bands, const Workspace& x, int64_t token, int64_t count,
           float* out, int64_t step) {
  for (; count >= Tokens; token += Tokens, count -= Tokens, out += Tokens * kRows) {
    const auto* records = reinterpret_cast<const typename Tile::template Records<Tokens>*>(x.records(token));
    if (Tokens > 1 && bands == kBands)
      Tile::template run<Tokens, kBands>(at, band, records, out, step);
    else
      for (int64_t n = 0; n < bands; ++n)
        Tile::template run<Tokens, 1>(at, band + n * at.band_bytes(), records, out + n * step, step);
  }
  if constexpr (Tokens > 1) tiles<Tile, Tokens / 2>(at, band, bands, x, token, count, out, step);
}

// Some bands, at most kBands, times tokens: out[t * 16 + r], `step` further for each band.
inline void band_products(const Layout& at, const uint8_t* band, int64_t bands, const Workspace& x, int64_t token,
                          int64_t count, float* out, int64_t step) {
  const auto multiply = [&](auto tile) { tiles<decltype(tile)>(at, band, bands, x, token, count, out, step); };
  if (at.in_blocks()) {
    if (at.halved())
      at.exact ? multiply(BlockTile<true, true>()) : multiply(BlockTile<false, true>());
    else
      at.exact ? multiply(BlockTile<true, false>()) : multiply(BlockTile<false, false>());
  } else if (at.bits == 4) {
    at.exact ? multiply(PlainTile<4, true>()) : multiply(PlainTile<4, false>());
  } else {
    at.exact ? multiply(PlainTile<8, true>()) : multiply(PlainTile<8, false>());
  }
}

// A weight and what is added to its products: packed, or floats as they are stored.
struct Linear {
  Layout at;             // with 0 bits for floats, whose type is that of its scales
  const uint8_t* bands;  // of a packed weight; the floats [O, I] otherwise
  const void* bias;      // [O] in the type of x, or null

  bool of_floats() const { return at.bits == 0; }
  FloatRows float_rows() const { return {bands, at.scales, at.rows, bias, at.exact != 0}; }
};

// Linears of the same input, whose outputs lie side by side.
struct Projection {
  std::vector<Linear> parts;

  int64_t columns() const { return parts[0].at.columns; }
  int64_t rows() const {
    int64_t count = 0;
    for (const Linear& part : parts) count += part.at.rows;
    return count;
  }
};

// Activations [tokens, columns] as integers, for each of some linears; those that take the same integers share them.
class Inputs {
 public:
  Inputs(const Linear* parts, int64_t count, int64_t tokens) {
    for (int64_t p = 0; p < count; ++p) {
      int64_t same = 0;
      while (same < p && !parts[same].at.like(parts[p].at)) ++same;
      if (same == p) {
        of_part_.push_back(workspaces_.size());
        workspaces_.emplace_back(parts[p].at, tokens);
      } else {
        of_part_.push_back(of_part_[same]);
      }
    }
  }

  void quantize(const float* x, int64_t count, int64_t token, int64_t block) const {
    for (const Workspace& workspace : workspaces_) workspace.quantize(x, count, token, block);
  }

  const Workspace& operator[](int64_t part) const { return workspaces_[of_part_[part]]; }

 private:
  std::vector<Workspace> workspaces_;
  std::vector<int64_t> of_part_;
};

// y[m, n] = sum over k of x[m, k] w[n, k] + bias[n], all of one type, on a number of threads, for some packed weights
// whose outputs lie side by side. Rows of y are `step` apart. With `add` the result is added to y, which is float32
// then.
inline void packed_products(const Linear* parts, int64_t part_count, const void* x, FloatType type, int64_t tokens,
                            int threads, void* y, int64_t step, bool add = false) {
  const int64_t columns = parts->at.columns;
  int64_t all_rows = 0;
  for (int64_t p = 0; p < part_count; ++p) all_rows += parts[p].at.rows;
  const Inputs inputs(parts, part_count, tokens);
  if (all_rows * columns * tokens < kMinParallelWork) threads = 1;
  Pool& pool = Pool::instance();
  pool.parallel_for(tokens, 1, threads, [&](int64_t token) {
    float row[kConverted];
    for (int64_t from = 0; from < columns; from += kConverted) {
      const int64_t count = std::min(kConverted, columns - from);
      const float* values = load_floats(x, type, token * columns + from, count, row);
      inputs.quantize(values, count, token, from / kColumns);
    }
  });
  const auto pieces_of = [](const Linear& part) { return (part.at.bands() + kBands - 1) / kBands; };
  const int64_t panels = (tokens + kPanel - 1) / kPanel;
  int64_t pieces = 0;
  for (int64_t p = 0; p < part_count; ++p) pieces += pieces_of(parts[p]);
  pool.parallel_for(panels * pieces, 1, threads, [&](int64_t index) {
    const int64_t token = index / pieces * kPanel, count = std::min(kPanel, tokens - token);
    int64_t p = 0, piece = index % pieces, before = 0;  // rows of the parts before
    for (; piece >= pieces_of(parts[p]); ++p) {
      piece -= pieces_of(parts[p]);
      before += parts[p].at.rows;
    }
    const Linear& linear = parts[p];
    const Layout& at = linear.at;
    const int64_t band = piece * kBands, bands = std::min<int64_t>(kBands, at.bands() - band);
    alignas(64) float out[kBands][kPanel * kRows];
    band_products(at, linear.bands + band * at.band_bytes(), bands, inputs[p], token, count, out[0], kPanel * kRows);
    for (int64_t n = 0; n < bands; ++n) {
      const int64_t row = (band + n) * kRows, rows = std::min(kRows, at.rows - row);
      float scratch[kRows], bias[kRows] = {};
      if (linear.bias) std::copy_n(load_floats(linear.bias, type, row, rows, scratch), rows, bias);
      const auto add_bias_and_store = [&](auto rows) __attribute__((always_inline)) {  // a constant if it can be one
        for (int64_t t = 0; t < count; ++t) {
          float* of = out[n] + t * kRows;
          for (int64_t r = 0; r < kRows; ++r) of[r] += bias[r];
          const int64_t offset = (token + t) * step + before + row;
          if (add) {
            float* sums = static_cast<float*>(y) + offset;
            for (int64_t r = 0; r < rows; ++r) sums[r] += of[r];
          } else {
            store_floats(of, rows, y, type, offset);
          }
        }
      };
      if (rows == kRows)
        add_bias_and_store(std::integral_constant<int64_t, kRows>());
      else
        add_bias_and_store(rows);
    }
  });
}

// The same for one linear of either kind.
inline void matmul(const Linear& linear, const void* x, FloatType type, int64_t tokens, int threads, void* y,
                   bool add = false) {
  const int64_t rows = linear.at.rows;
  if (!linear.of_floats()) return packed_products(&linear, 1, x, type, tokens, threads, y, rows, add);
  const FloatRows floats = linear.float_rows();
  float_products(&floats, 1, linear.at.columns, x, type, tokens, threads, y, rows, add);
}

// The outputs of several linears for the same x, side by side in rows of y. Linears of one kind that follow each other
// are one loop of the threads.
inline void project(const Projection& projection, const void* x, FloatType type, int64_t tokens, int threads, void* y) {
  const int64_t step = projection.rows(), columns = projection.columns();
  const std::vector<Linear>& parts = projection.parts;
  char* to = static_cast<char*>(y);
  for (size_t first = 0, last = 0; first < parts.size(); first = last) {
    int64_t rows = 0;
    for (; last < parts.size() && parts[last].of_floats() == parts[first].of_floats(); ++last)
      rows += parts[last].at.rows;
    if (parts[first].of_floats()) {
      std::vector<FloatRows> floats;
      for (size_t p = first; p < last; ++p) floats.push_back(parts[p].float_rows());
      float_products(floats.data(), floats.size(), columns, x, type, tokens, threads, to, step);
    } else {
      packed_products(&parts[first], last - first, x, type, tokens, threads, to, step);
    }
    to += rows * bytes_of(type);
  }
}

}  // namespace quantkit
