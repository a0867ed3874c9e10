// Activations as integers: one scale per token and 32 columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "layout.h"

namespace quantkit {

// How 32 integers lie: as bytes; as 16 bits, in turn or with the middle two of each four swapped; or as 32 high
// bytes and 32 low ones, for 256 * high + low.
enum class Form { bytes, whole, swapped, halves };

constexpr int width_of(Form form) { return form == Form::bytes ? 1 : 2; }

#if defined(__x86_64__)
// Keeps a sum in its register. Left to itself, GCC takes all the products first and adds them up in a tree, for which
// there are not registers enough; clang finishes one sum after the other, each product waiting for the one before it.
template <typename Vector>
[[gnu::always_inline]] inline void settle(Vector& sum) {
#if defined(__clang__)
  asm volatile("" : "+v"(sum));  // in the order of the program
#else
  asm("" : "+v"(sum));
#endif
}
#endif

// What a tile of some tokens takes of 32 columns.
template <Form Of, int Tokens>
struct Record {
  int32_t sums[Tokens];    // of the integers, times `sum_factor`
  int32_t halves[Tokens];  // the same of the first 16
  float scales[Tokens];
  int8_t values[Tokens][kColumns * width_of(Of)];

  // The sum of all columns, or of one of two halves.
  template <int Halves>
  int32_t sum(int token, int half) const {
    if (Halves == 1) return sums[token];
    return half ? sums[token] - halves[token] : halves[token];
  }
  const int16_t* whole(int token) const { return reinterpret_cast<const int16_t*>(values[token]); }
  const int8_t* low(int token) const { return values[token] + kColumns; }
};

// Where the parts of one token's record go.
struct Destination {
  Form form;
  int32_t *sum, *half;
  float* scale;
  int8_t* values;
};

constexpr float kExactMax = 127 * 256;
constexpr float kFastMax = 127;
constexpr float kMinAbs = 1e-30f;  // blocks whose values are all below it count as zeros

// One block of 32 floats. A NaN or Inf makes the scale NaN, so that it reaches every output. Loops that clang would
// unroll it would not vectorize.
template <bool Exact>
inline void quantize_block(const float* x, int32_t sum_factor, const Destination& to) {
  constexpr float kMax = Exact ? kExactMax : kFastMax;
  uint32_t largest = 0;
#pragma GCC unroll 1
  for (int i = 0; i < kColumns; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float max_abs;
  std::memcpy(&max_abs, &largest, 4);
  const bool finite = largest < 0x7f800000u, empty = !finite || max_abs < kMinAbs;
  int32_t integers[kColumns] = {}, half = 0, total = 0;
  if (!empty) {
    const float factor = kMax / max_abs;
#pragma GCC unroll 1
    for (int i = 0; i < kColumns; ++i) {
      integers[i] = static_cast<int32_t>(__builtin_rintf(x[i] * factor));  // ties to even
      total += integers[i];
    }
    for (int i = 0; i < kColumns / 2; ++i) half += integers[i];
  }
  int16_t* whole = reinterpret_cast<int16_t*>(to.values);
  switch (to.form) {
    case Form::bytes:
#pragma GCC unroll 1
      for (int i = 0; i < kColumns; ++i) to.values[i] = static_cast<int8_t>(integers[i]);
      break;
    case Form::whole:
#pragma GCC unroll 1
      for (int i = 0; i < kColumns; ++i) whole[i] = static_cast<int16_t>(integers[i]);
      break;
    case Form::swapped:
#pragma GCC unroll 1
      for (int i = 0; i < kColumns; i += 4) {
        const int order[] = {0, 2, 1, 3};
        for (int j = 0; j < 4; ++j) whole[i + j] = static_cast<int16_t>(integers[i + order[j]]);
      }
      break;
    case Form::halves:
#pragma GCC unroll 1
      for (int i = 0; i < kColumns; ++i) {
        const int32_t high = (integers[i] + 128) >> 8;
        to.values[i] = static_cast<int8_t>(high);
        to.values[kColumns + i] = static_cast<int8_t>(integers[i] - high * 256);
      }
  }
  *to.scale = finite ? (empty ? 0.f : max_abs / kMax) : std::numeric_limits<float>::quiet_NaN();
  *to.sum = total * sum_factor;
  *to.half = half * sum_factor;
}

}  // namespace quantkit
