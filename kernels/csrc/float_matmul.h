// Products with weights of floats, which are read as they are stored.
//
// The product of a weight's row and a token is one vector of sums: columns are added to it kLanes at a time, in their
// order, and its lanes are added up at the end. So it has the same bits however many rows and tokens a loop takes at
// once, and whatever the other tokens are. Activations are float32, weights become float32: neither is rounded. Products
// that need not be exact round activations to bfloat16 where the weight has it and the processor multiplies it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "activations.h"
#include "floats.h"
#include "layout.h"
#include "scratch.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

#if defined(__AVX512F__) && defined(__AVX512BF16__)
constexpr bool kHasBf16 = true;
#else
constexpr bool kHasBf16 = false;
#endif
constexpr int64_t kPanel = 64;    // tokens whose activations stay in cache while a weight's rows pass by
constexpr int64_t kStretch = 2048;  // columns at a time where tokens are many, so that these and 16 rows stay in cache
constexpr int64_t kWholeTokens = 16;  // up to so many, rows are read from their first column to the last
constexpr int64_t kManyTokens = 512;  // whose activations are copied at a time
constexpr int64_t kAheadBytes = 16384;  // that are brought near before they are needed, or as many as a tile's rows have
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kTileTokens = 4, kTileRows = 4;  // whose sums stay in registers, of which there are 32
#else
constexpr int kTileTokens = 6, kTileRows = 2;  // of 16 registers
#endif
constexpr int kPairRows = 4;  // of a tile of two tokens

// Some rows [rows, columns] of a product's weight.
struct FloatRows {
  const void* values;
  FloatType type;
  int64_t rows;
  const void* bias;  // [rows] in the type of the activations, or null
  bool exact = true;

  // Whether activations become bfloat16.
  bool rounds() const { return kHasBf16 && !exact && type == FloatType::bf16; }
};

// Keep a loaded vector in its register. GCC would load it again for every product, and loads are fewer than products.
template <typename Loaded>
inline void keep(Loaded& value) {
#if defined(__x86_64__)
  settle(value);
#endif
}

// The lanes from index `at` on of floats of a type, as float32.
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
    if constexpr (Type == FloatType::bf16) {
      typedef uint16_t Halves __attribute__((vector_size(2 * kLanes)));
      typedef uint32_t Words __attribute__((vector_size(4 * kLanes)));
      Halves loaded;
      std::memcpy(&loaded, halves, sizeof(loaded));
      values = reinterpret_cast<Vector>(__builtin_convertvector(loaded, Words) << 16);
    } else {
      for (int i = 0; i < kLanes; ++i) values[i] = from_f16(halves[i]);
    }
#endif
    return values;
  }
}

// Exact products with weights of a type.
template <FloatType Type>
struct ExactProducts {
  using Activation = float;
  using Loaded = Vector;
  static constexpr int64_t kStep = kLanes;  // columns
  static constexpr int64_t kBytes = bytes_of(Type);
  // Of a tile of one token: a few, as additions to a sum wait for each other; but one is enough of long vectors, and
  // memory is read front to back then.
  static constexpr int kSingleRows = kLanes == 16 ? 1 : kLanes == 8 ? 4 : 8;

  static Loaded load_row(const char* from) { return load_lanes<Type>(from, 0); }
  static Loaded load_values(const float* from) { return load(from); }
  static void add(Vector& sum, Loaded values, Loaded row) { sum += values * row; }
};

#if defined(__AVX512F__) && defined(__AVX512BF16__)
// Products of bfloat16, two columns to a lane.
struct RoundedProducts {
  using Activation = uint16_t;
  using Loaded = __m512i;
  static constexpr int64_t kStep = 2 * kLanes;
  static constexpr int64_t kBytes = 2;
  static constexpr int kSingleRows = 8;

  static Loaded load_row(const char* from) { return _mm512_loadu_si512(from); }
  static Loaded load_values(const uint16_t* from) { return _mm512_loadu_si512(from); }
  static void add(Vector& sum, Loaded values, Loaded row) {
    sum = reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(values),
                                                    reinterpret_cast<__m512bh>(row)));
  }
};
#endif

// Sums, at sums[t * kRows + r], of the products of token t, of Tokens that are x_step apart, and row r, of Rows that are
// row_step apart, lane by lane. They begin with 0, or with what is there if it is of `earlier` columns. `size` is a
// multiple of kColumns. With `ahead`, what lies so many bytes after the rows is brought near, front to back: the
// processor recognizes one long stretch, but not that several short rows make one.
template <typename Products, int Tokens, int Rows>
inline void add_tile(const typename Products::Activation* x, int64_t x_step, const char* rows, int64_t row_step,
                     int64_t size, int64_t ahead, bool earlier, Vector* sums) {
  constexpr int64_t kBytes = Products::kBytes;
  Vector kept[Tokens][Rows];
#pragma GCC unroll 6
  for (int t = 0; t < Tokens; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) kept[t][r] = earlier ? sums[t * kRows + r] : Vector{};
#pragma GCC unroll 1
  for (int64_t i = 0; i < size; i += Products::kStep) {
    typename Products::Loaded row[Rows];
    if (ahead) {
      const char* next = rows + ahead + i * Rows * kBytes;
#pragma GCC unroll 16
      for (int64_t byte = 0; byte < Products::kStep * Rows * kBytes; byte += kLine) __builtin_prefetch(next + byte, 0, 2);
    }
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) {
      row[r] = Products::load_row(rows + (r * row_step + i) * kBytes);
      if constexpr (Tokens > 1) keep(row[r]);
    }
#pragma GCC unroll 6
    for (int t = 0; t < Tokens; ++t) {
      typename Products::Loaded values = Products::load_values(x + t * x_step + i);
      keep(values);
#pragma GCC unroll 8
      for (int r = 0; r < Rows; ++r) Products::add(kept[t][r], values, row[r]);
    }
  }
#pragma GCC unroll 6
  for (int t = 0; t < Tokens; ++t)
#pragma GCC unroll 8
    for (int r = 0; r < Rows; ++r) sums[t * kRows + r] = kept[t][r];
}

// The same for 16 rows and any number of tokens; `ahead` is whether other rows follow in memory.
template <typename Products>
void add_rows(const typename Products::Activation* x, int64_t x_step, int64_t tokens, const void* rows,
              int64_t row_step, int64_t size, bool ahead, bool earlier, Vector* sums) {
  const auto row_at = [&](int64_t r) { return static_cast<const char*>(rows) + r * row_step * Products::kBytes; };
  const auto tiles = [&]<int Tokens, int Rows>() {
    const int64_t distance = ahead ? std::max(kAheadBytes, Rows * row_step * Products::kBytes) : 0;
    for (int64_t r = 0; r < kRows; r += Rows)
      add_tile<Products, Tokens, Rows>(x, x_step, row_at(r), row_step, size, distance, earlier, sums + r);
    x += Tokens * x_step;
    sums += Tokens * kRows;
    tokens -= Tokens;
    ahead = false;  // it is near
  };
  while (tokens >= kTileTokens) tiles.template operator()<kTileTokens, kTileRows>();
  if constexpr (kTileTokens > 4)
    if (tokens >= 4) tiles.template operator()<4, kTileRows>();
  if constexpr (kTileTokens == 4)
    if (tokens == 3) tiles.template operator()<3, kTileRows>();
  if (tokens >= 2) tiles.template operator()<2, kPairRows>();
  if (tokens == 1) tiles.template operator()<1, Products::kSingleRows>();
}

inline void add_rows(const float* x, int64_t x_step, int64_t tokens, const void* rows, FloatType type,
                     int64_t row_step, int64_t size, bool ahead, bool earlier, Vector* sums) {
  if (type == FloatType::f32) add_rows<ExactProducts<FloatType::f32>>(x, x_step, tokens, rows, row_step, size, ahead, earlier, sums);
  if (type == FloatType::f16) add_rows<ExactProducts<FloatType::f16>>(x, x_step, tokens, rows, row_step, size, ahead, earlier, sums);
  if (type == FloatType::bf16) add_rows<ExactProducts<FloatType::bf16>>(x, x_step, tokens, rows, row_step, size, ahead, earlier, sums);
}

// One product of up to kManyTokens tokens, whose activations it has to be given first.
class FloatProduct {
 public:
  FloatProduct(const FloatRows* parts, int64_t count, int64_t columns, FloatType type, int64_t tokens)
      : parts_(parts, parts + count), columns_(columns), padded_((columns + kColumns - 1) / kColumns * kColumns),
        type_(type), tokens_(tokens), stretch_(tokens <= kWholeTokens ? padded_ : even_stretch(padded_)),
        wide_(tokens * padded_), rounded_(tokens * padded_ / 2) {
    for (const FloatRows& part : parts_) {
      pieces_ += pieces(part);
      round_ |= part.rounds();
    }
  }

  // Take row `at` of x as the activations of a token: in float32 and, if need be, in bfloat16, one stretch of all
  // tokens after the other.
  void take(const void* x, int64_t at, int64_t token) const {
    for (int64_t start = 0; start < padded_; start += stretch_) {
      const int64_t size = whole(start), to = start * tokens_ + token * size;
      copy_floats(x, type_, at * columns_ + start, width(start), wide_.get() + to, size);
      if (round_) store_floats(wide_.get() + to, size, rounded_.get(), FloatType::bf16, to);
    }
  }

  // Of the outputs, which threads compute one by one.
  int64_t count() const { return (tokens_ + kPanel - 1) / kPanel * pieces_; }

  // Write a piece of the outputs of all parts, side by side in rows of y that are `step` apart, or add it to y.
  void run_piece(int64_t index, void* y, int64_t step, bool add) const {
    const int64_t token = index / pieces_ * kPanel, count = std::min(kPanel, tokens_ - token);
    const FloatRows* part = parts_.data();
    int64_t piece = index % pieces_, before = 0;
    for (; piece >= pieces(*part); ++part) {
      piece -= pieces(*part);
      before += part->rows;
    }
    const FloatRows& of = *part;
    const int64_t row = piece * kRows, rows = std::min(kRows, of.rows - row);
    Vector sums[kPanel * kRows];
    add_products(of, row, rows, token, count, sums);
    float bias[kRows] = {}, scratch[kRows], out[kRows];
    if (of.bias) std::copy_n(load_floats(of.bias, type_, row, rows, scratch), rows, bias);
    for (int64_t m = 0; m < count; ++m) {
      for (int64_t r = 0; r < kRows; r += kLanes) store(totals(sums + m * kRows + r), out + r);
      const int64_t offset = (token + m) * step + before + row;
      if (of.bias)
        for (int64_t r = 0; r < kRows; ++r) out[r] += bias[r];
      if (add) {
        float* to = static_cast<float*>(y) + offset;
        for (int64_t r = 0; r < rows; ++r) to[r] += out[r];
      } else {
        store_floats(out, rows, y, type_, offset);
      }
    }
  }

 private:
  // Stretches of about the same number of columns.
  static int64_t even_stretch(int64_t padded) {
    const int64_t count = (padded + kStretch - 1) / kStretch;
    return (padded / kColumns + count - 1) / count * kColumns;
  }

  static int64_t pieces(const FloatRows& part) { return (part.rows + kRows - 1) / kRows; }
  int64_t width(int64_t start) const { return std::min(stretch_, columns_ - start); }
  int64_t whole(int64_t start) const { return std::min(stretch_, padded_ - start); }  // with columns of zeros

  // The sums of the products of some tokens and up to 16 rows.
  void add_products(const FloatRows& of, int64_t row, int64_t rows, int64_t token, int64_t count, Vector* sums) const {
    const bool fits = rows == kRows && padded_ == columns_;
    for (int64_t start = 0; start < padded_; start += stretch_) {
      const int64_t size = whole(start), at = start * tokens_ + token * size;
      if (fits) {
        const char* from = static_cast<const char*>(of.values) + (row * columns_ + start) * bytes_of(of.type);
        add_stretch(of, at, size, count, from, of.type, columns_, stretch_ == columns_, start > 0, sums);
        continue;
      }
      thread_local AlignedFloats memory;
      float* copied = memory.resize(kRows * size);
      const FloatType type = of.rounds() ? FloatType::bf16 : FloatType::f32;
      for (int64_t r = 0; r < kRows; ++r) {
        const int64_t first = (row + std::min(r, rows - 1)) * columns_ + start;
        if (of.rounds()) {
          uint16_t* to = reinterpret_cast<uint16_t*>(copied) + r * size;
          std::copy_n(static_cast<const uint16_t*>(of.values) + first, width(start), to);
          std::fill(to + width(start), to + size, 0);
        } else {
          copy_floats(of.values, of.type, first, width(start), copied + r * size, size);
        }
      }
      add_stretch(of, at, size, count, copied, type, size, false, start > 0, sums);
    }
  }

  // The same for a stretch of columns, with activations from index `at` on and 16 rows of a type.
  void add_stretch(const FloatRows& of, int64_t at, int64_t size, int64_t count, const void* rows, FloatType type,
                   int64_t row_step, bool ahead, bool earlier, Vector* sums) const {
#if defined(__AVX512F__) && defined(__AVX512BF16__)
    if (of.rounds()) {
      const uint16_t* x = reinterpret_cast<const uint16_t*>(rounded_.get()) + at;
      return add_rows<RoundedProducts>(x, size, count, rows, row_step, size, ahead, earlier, sums);
    }
#endif
    add_rows(wide_.get() + at, size, count, rows, type, row_step, size, ahead, earlier, sums);
  }

  std::vector<FloatRows> parts_;
  int64_t columns_, padded_;  // padded: to a multiple of kColumns
  FloatType type_;            // of activations, outputs and biases
  int64_t tokens_, stretch_, pieces_ = 0;
  bool round_ = false;  // whether a part rounds activations
  Scratch wide_, rounded_;
};

// y[m, n] = sum over k of x[m, k] w[n, k] + bias[n], where the rows w are those of all parts; x, y and biases are of one
// type. Rows of y are `step` apart. With `add` the result is added to y, which is float32 then.
inline void float_products(const FloatRows* parts, int64_t count, int64_t columns, const void* x, FloatType type,
                           int64_t tokens, int threads, void* y, int64_t step, bool add = false) {
  int64_t rows = 0;
  for (int64_t part = 0; part < count; ++part) rows += parts[part].rows;
  if (rows * columns * tokens < kMinParallelWork) threads = 1;
  const int64_t width = bytes_of(type);
  for (int64_t first = 0; first < tokens; first += kManyTokens) {
    const void* from = static_cast<const char*>(x) + first * columns * width;
    char* to = static_cast<char*>(y) + first * step * width;
    const int64_t taken = std::min(kManyTokens, tokens - first);
    const FloatProduct product(parts, count, columns, type, taken);
    Pool& pool = Pool::instance();
    pool.parallel_for(taken, 16, threads, [&](int64_t token) { product.take(from, token, token); });
    pool.parallel_for(product.count(), 1, threads, [&](int64_t piece) { product.run_piece(piece, to, step, add); });
  }
}

}  // namespace quantkit
