// Whole products. With a packed weight activations become integers and threads share the bands; weights of floats are
// multiplied row by row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "floats.h"
#include "layout.h"
#include "threads.h"
#include "vector_math.h"
#include "workspace.h"

namespace quantkit {

constexpr int64_t kPanel = 64;  // tokens whose activations stay in cache while the bands pass by
constexpr int64_t kStretch = 256;  // columns converted to float32 at a time, a multiple of 32

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

// A packed weight and what is added to its products.
struct Linear {
  Layout at;
  const uint8_t* bands;
  const void* bias;  // [O] in the type of x, or null
};

// Linears of the same input, which may be packed in different ways; their outputs are one after the other.
struct Stack {
  std::vector<Linear> parts;
  int64_t rows, columns;  // of all
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

// y[m, n] = sum over k of x[m, k] w[n, k] + bias[n], all of one type, on a number of threads, for some linears whose
// rows are `all_rows` together. With `add` the result is added to y, which is float32 then.
inline void matmul(const Linear* parts, int64_t part_count, int64_t all_rows, const void* x, FloatType type,
                   int64_t tokens, int threads, void* y, bool add = false) {
  const int64_t columns = parts->at.columns;
  const Inputs inputs(parts, part_count, tokens);
  if (all_rows * columns * tokens < kMinParallelWork) threads = 1;
  Pool& pool = Pool::instance();
  pool.parallel_for(tokens, 1, threads, [&](int64_t token) {
    float row[kStretch];
    for (int64_t from = 0; from < columns; from += kStretch) {
      const int64_t count = std::min(kStretch, columns - from);
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
          const int64_t offset = (token + t) * all_rows + before + row;
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

inline void matmul(const Linear& linear, const void* x, FloatType type, int64_t tokens, int threads, void* y,
                   bool add = false) {
  matmul(&linear, 1, linear.at.rows, x, type, tokens, threads, y, add);
}

inline void matmul(const Stack& stack, const void* x, FloatType type, int64_t tokens, int threads, void* y) {
  matmul(stack.parts.data(), stack.parts.size(), stack.rows, x, type, tokens, threads, y);
}

// The sums of one tile of `add_products`.
struct TileSums {
  Vector lanes[kLanes];
};

// The lanes from `from` on of floats of a type, as float32.
template <FloatType Type>
inline Vector load_lanes(const void* from, int64_t at) {
  if constexpr (Type == FloatType::f32) {
    return load(static_cast<const float*>(from) + at);
  } else {
    const uint16_t* halves = static_cast<const uint16_t*>(from) + at;
    Vector values;
#if defined(__AVX512F__)
    const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(halves));
    if constexpr (Type == FloatType::bf16)
      values = reinterpret_cast<Vector>(_mm512_slli_epi32(_mm512_cvtepu16_epi32(loaded), 16));
    else
      values = reinterpret_cast<Vector>(_mm512_cvtph_ps(loaded));
#elif defined(__AVX2__) && defined(__F16C__)
    const __m128i loaded = _mm_loadu_si128(reinterpret_cast<const __m128i*>(halves));
    if constexpr (Type == FloatType::bf16)
      values = reinterpret_cast<Vector>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(loaded), 16));
    else
      values = reinterpret_cast<Vector>(_mm256_cvtph_ps(loaded));
#else
    for (int i = 0; i < kLanes; ++i)
      values[i] = Type == FloatType::bf16 ? from_bf16(halves[i]) : from_f16(halves[i]);
#endif
    return values;
  }
}

// `add_products` of one vector, with rows as they are stored.
template <FloatType Type>
inline void add_products_as_stored(const float* a, const void* const* rows, int64_t size, Vector* sums) {
  Vector kept[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) kept[i] = sums[i];
#pragma GCC unroll 1
  for (int64_t i = 0; i < size; i += kLanes) {
    const Vector values = load(a + i);
#pragma GCC unroll 16
    for (int s = 0; s < kLanes; ++s) kept[s] += values * load_lanes<Type>(rows[s], i);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sums[i] = kept[i];
}

inline void add_products_as_stored(const float* a, const void* const* rows, FloatType type, int64_t size,
                                   Vector* sums) {
  if (type == FloatType::f32) add_products_as_stored<FloatType::f32>(a, rows, size, sums);
  if (type == FloatType::f16) add_products_as_stored<FloatType::f16>(a, rows, size, sums);
  if (type == FloatType::bf16) add_products_as_stored<FloatType::bf16>(a, rows, size, sums);
}

// `float_product` of so few tokens that nobody else needs a row's float32; `columns` is a multiple of kLanes.
inline void float_product_as_stored(int64_t rows, int64_t columns, const void* weight, FloatType weight_type,
                                    const void* x, FloatType type, int64_t tokens, int threads, void* y,
                                    int64_t chunk) {
  AlignedFloats memory;
  float* wide = memory.resize(tokens * columns);
  copy_floats(x, type, 0, tokens * columns, wide, tokens * columns);
  Pool::instance().parallel_for((rows + kRows - 1) / kRows, chunk, threads, [&](int64_t piece) {
    const int64_t row = piece * kRows, some = std::min(kRows, rows - row);
    const void* stored[kRows];
    for (int64_t r = 0; r < kRows; ++r)
      stored[r] = static_cast<const uint8_t*>(weight) + (row + std::min(r, some - 1)) * columns * bytes_of(weight_type);
    for (int64_t m = 0; m < tokens; ++m) {
      float out[kRows];
      for (int64_t r = 0; r < kRows; r += kLanes) {
        Vector sums[kLanes] = {};
        add_products_as_stored(wide + m * columns, stored + r, weight_type, columns, sums);
        store(totals(sums), out + r);
      }
      store_floats(out, some, y, type, m * rows + row);
    }
  });
}

// A product with a weight of floats: what the head of a quantized model often is. x and y are of one type, the weight of
// another or the same. Threads take `chunk` times 16 rows at least.
inline void float_product(int64_t rows, int64_t columns, const void* weight, FloatType weight_type, const void* x,
                          FloatType type, int64_t tokens, int threads, void* y, int64_t chunk = 4) {
  constexpr int kGroup = kLanes / 4;  // tokens of a tile of four rows; a token that is left over goes with more rows
  constexpr int64_t kGroupTiles = kRows / 4, kSingleTiles = kRows / kLanes;
  const int64_t padded = (columns + kLanes - 1) / kLanes * kLanes;
  if (tokens < kGroup && padded == columns)
    return float_product_as_stored(rows, columns, weight, weight_type, x, type, tokens, threads, y, chunk);
  AlignedFloats memory;
  float* wide = memory.resize(tokens * padded);  // one stretch of all tokens after the other
  for (int64_t start = 0; start < padded; start += kStretch)
    for (int64_t m = 0; m < tokens; ++m) {
      const int64_t width = std::min(kStretch, columns - start), whole = std::min(kStretch, padded - start);
      copy_floats(x, type, m * columns + start, width, wide + start * tokens + m * whole, whole);
    }
  const int64_t panels = (tokens + kPanel - 1) / kPanel, pieces = (rows + kRows - 1) / kRows;
  Pool::instance().parallel_for(panels * pieces, chunk, threads, [&](int64_t index) {
    const int64_t first = index / pieces * kPanel, count = std::min(kPanel, tokens - first);
    const int64_t row = index % pieces * kRows, some = std::min(kRows, rows - row);
    const int64_t grouped = count / kGroup * kGroup;
    thread_local AlignedFloats stretch;
    thread_local std::vector<TileSums> sums;
    float* converted = stretch.resize(kRows * kStretch);
    sums.assign(grouped / kGroup * kGroupTiles + (count - grouped) * kSingleTiles, TileSums{});
    for (int64_t start = 0; start < padded; start += kStretch) {
      const int64_t width = std::min(kStretch, columns - start), whole = std::min(kStretch, padded - start);
      const float* from[kRows];
      for (int64_t r = 0; r < kRows; ++r) {
        from[r] = converted + r * kStretch;
        prefetch_floats(weight, weight_type, (row + kRows + r) * columns + start, width);  // for the next piece
        copy_floats(weight, weight_type, (row + std::min(r, some - 1)) * columns + start, width,
                    converted + r * kStretch, whole);
      }
      const float* of = wide + start * tokens + first * whole;
      TileSums* tile = sums.data();
      for (int64_t m = 0; m < grouped; m += kGroup)
        for (int64_t r = 0; r < kRows; r += 4)
          add_products<kGroup>(of + m * whole, whole, from + r, whole, tile++->lanes);
      for (int64_t m = grouped; m < count; ++m)
        for (int64_t r = 0; r < kRows; r += kLanes)
          add_products<1>(of + m * whole, whole, from + r, whole, tile++->lanes);
    }
    float out[kPanel][kRows], all[kLanes];
    const TileSums* tile = sums.data();
    for (int64_t m = 0; m < grouped; m += kGroup)
      for (int64_t r = 0; r < kRows; r += 4) {
        store(totals(tile++->lanes), all);
        for (int t = 0; t < kGroup; ++t) std::copy_n(all + t * 4, 4, out[m + t] + r);
      }
    for (int64_t m = grouped; m < count; ++m)
      for (int64_t r = 0; r < kRows; r += kLanes) store(totals(tile++->lanes), out[m] + r);
    for (int64_t m = 0; m < count; ++m) store_floats(out[m], some, y, type, (first + m) * rows + row);
  });
}

}  // namespace quantkit
