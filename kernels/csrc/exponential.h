// exp in a form that compilers turn into vector code.
#pragma once

#include <cstdint>
#include <cstring>

namespace quantkit {

inline float power_of_two(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// e^x, within 3e-7 of its value; below -87 that of -87, which is 2e-38. NaN stays NaN, large x give Inf.
inline float exponential(float x) {
  const float below = x > 89.f ? 89.f : x;
  const float near = below < -87.f ? -87.f : below;
  const float shifted = near * 1.44269504f + 12582912.f;  // rounds to the nearest integer
  const float whole = shifted - 12582912.f;
  const float rest = near - whole * 0.693145752f - whole * 1.42860677e-6f;
  float series = 1.3981999e-3f;
  series = series * rest + 8.3334519e-3f;
  series = series * rest + 4.1665665e-2f;
  series = series * rest + 1.6666667e-1f;
  series = series * rest + 0.5f;
  series = series * rest + 1.f;
  series = series * rest + 1.f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  const int32_t power = bits - 0x4b400000, half = power >> 1;
  return series * power_of_two(half) * power_of_two(power - half);  // 2^128 is no float
}

}  // namespace quantkit
