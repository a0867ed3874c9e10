// Activations as integers: one scale per token and 32 columns.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "layout.h"

namespace quantkit {

// Tokens [M, K] as integers of 16 bits in the exact mode and 8 in the fast one, times a scale.
// Kernels take them in the form that suits them: as `wide`, or as 256 * high + low, the fast mode
// as `high` alone. What is not wanted is null.
struct Activations {
  int64_t tokens, blocks;
  int8_t *high, *low;  // [M, blocks * 32]
  int16_t* wide;       // [M, blocks * 32]
  float* scales;   // [M, blocks]
  int32_t* sums;   // [M, blocks], of the integers
};

constexpr float kExactMost = 127 * 256;
constexpr float kFastMost = 127;
constexpr float kLeast = 1e-30f;  // blocks below it count as zeros

// One block of 32 floats. A NaN or Inf makes the scale NaN, so that it reaches every output.
template <bool Exact>
inline void quantize_block(const float* x, const Activations& to, int64_t block) {
  constexpr float kMost = Exact ? kExactMost : kFastMost;
  uint32_t largest = 0;
  for (int i = 0; i < kColumns; ++i) {
    uint32_t bits;
    std::memcpy(&bits, x + i, 4);
    largest = std::max(largest, bits & 0x7fffffffu);
  }
  float most;
  std::memcpy(&most, &largest, 4);
  const bool finite = largest < 0x7f800000u, empty = !finite || most < kLeast;
  int32_t values[kColumns] = {}, total = 0;
  if (!empty) {
    const float factor = kMost / most;
    for (int i = 0; i < kColumns; ++i) {
      values[i] = static_cast<int32_t>(__builtin_rintf(x[i] * factor));  // ties to even
      total += values[i];
    }
  }
  const int64_t start = block * kColumns;
  if (to.wide) {
    for (int i = 0; i < kColumns; ++i) to.wide[start + i] = static_cast<int16_t>(values[i]);
  } else if (Exact) {
    for (int i = 0; i < kColumns; ++i) {
      const int32_t upper = (values[i] + 128) >> 8;
      to.high[start + i] = static_cast<int8_t>(upper);
      to.low[start + i] = static_cast<int8_t>(values[i] - upper * 256);
    }
  } else {
    for (int i = 0; i < kColumns; ++i) to.high[start + i] = static_cast<int8_t>(values[i]);
  }
  to.scales[block] = finite ? (empty ? 0.f : most / kMost) : std::numeric_limits<float>::quiet_NaN();
  to.sums[block] = total;
}

// Consecutive blocks of one token. Columns beyond the last count as zeros.
template <bool Exact>
inline void quantize_stretch(const float* x, int64_t count, const Activations& to, int64_t block) {
  for (; count >= kColumns; count -= kColumns, x += kColumns) quantize_block<Exact>(x, to, block++);
  if (count == 0) return;
  float rest[kColumns] = {};
  std::memcpy(rest, x, count * sizeof(float));
  quantize_block<Exact>(rest, to, block);
}

}  // namespace quantkit
