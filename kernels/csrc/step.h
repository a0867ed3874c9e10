// What a step computes beside its blocks, of one row each: rotations of a position, the final norm, the likeliest token.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "floats.h"

namespace quantkit {

// The cosine and sine [size] of a position for heads in rotate-half layout, times `scale`: pair i turns by position *
// frequencies[i], and the pairs from `pairs` on, with partial rotary embedding, not at all.
inline void rotation_of(float position, const float* frequencies, int64_t pairs, float scale, int64_t size,
                        float* cosine, float* sine) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float angle = i < pairs ? position * frequencies[i] : 0;
    cosine[i] = cosine[half + i] = i < pairs ? std::cos(angle) * scale : 1;
    sine[i] = sine[half + i] = i < pairs ? std::sin(angle) * scale : 0;
  }
}

// The bits of a float as an integer with the same order, in which NaN lies beyond the infinity of its sign.
inline int32_t ordered_bits(float value) {
  // -0.0 becomes 0.0, which is equal to it.
  const int32_t bits = static_cast<int32_t>(to_bits(value + 0.0f));
  return bits ^ (bits >> 31 & 0x7fffffff);
}

struct Likeliest {
  int64_t token;  // of the largest logit, of equal ones the first; that of a NaN if there is one
  bool finite;    // whether all logits are
};

inline Likeliest likeliest(const float* logits, int64_t count) {
  constexpr int64_t kSpan = 512;
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  int32_t low = std::numeric_limits<int32_t>::max(), high = std::numeric_limits<int32_t>::min();
  int64_t first = 0;
  for (int64_t start = 0; start < count; start += kSpan) {
    const int64_t stop = std::min(start + kSpan, count);
    // Compilers make vector code of integers' extremes, and not of floats', because of NaN.
    int32_t span_high = std::numeric_limits<int32_t>::min();
    for (int64_t i = start; i < stop; ++i) {
      const int32_t bits = ordered_bits(logits[i]);
      low = std::min(low, bits);
      span_high = std::max(span_high, bits);
    }
    if (span_high > high) {
      high = span_high;
      first = start;
    }
  }
  const int32_t least = ordered_bits(-kInfinity), most = ordered_bits(kInfinity);
  int64_t token = first;
  if (low < least) {
    // NaN with a sign bit.
    for (token = 0; !std::isnan(logits[token]);) ++token;
  } else {
    while (ordered_bits(logits[token]) != high) ++token;
  }
  return {token, low > least && high < most};
}

}  // namespace quantkit
