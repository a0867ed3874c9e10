// Sums, largest values and exponentials of float32 vectors, in forms that compilers turn into vector code.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>
#include <utility>
#include <vector>

namespace quantkit {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));

// Memory for floats that begins with a cache line: vectors that lie across two take twice as long to load.
class AlignedFloats {
 public:
  // Resize; the values are unspecified.
  float* resize(int64_t count) {
    lines_.resize((count + kFloats - 1) / kFloats);
    return lines_.data()->values;
  }

 private:
  static constexpr int64_t kFloats = 16;
  struct alignas(64) Line {
    float values[kFloats];
  };
  std::vector<Line> lines_;
};

inline Vector load(const float* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

inline void store(Vector value, float* to) { std::memcpy(to, &value, sizeof(value)); }

inline float total(Vector value) {
  float lanes[kLanes];
  std::memcpy(lanes, &value, sizeof(value));
  for (int64_t width = kLanes / 2; width; width /= 2)
    for (int64_t i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

// The lane of two vectors, one after the other, that `folded` takes to lane i.
constexpr int folded_lane(int length, bool upper, int i) {
  const int block = length > 4 ? kLanes : 4, half = length / 2;  // 128 bits stay together, shuffles across are slow
  const int from = i % block / (block / 2), j = i % (block / 2);
  return from * kLanes + i / block * block + j / half * length + j % half + (upper ? half : 0);
}

// Two vectors of segments of such a length become one of segments half as long, the sums of their halves.
template <int Length, int... Lane>
inline Vector folded(Vector a, Vector b, std::integer_sequence<int, Lane...>) {
  return __builtin_shufflevector(a, b, folded_lane(Length, false, Lane)...) +
         __builtin_shufflevector(a, b, folded_lane(Length, true, Lane)...);
}

// Lane i is the `total` of sums[i], bit for bit.
inline Vector totals(const Vector* sums) {
  constexpr auto all = std::make_integer_sequence<int, kLanes>();
  Vector part[4];
  for (int i = 0; i < 4; ++i) {
    if constexpr (kLanes == 16)
      part[i] = folded<8>(folded<16>(sums[i], sums[i + 4], all), folded<16>(sums[i + 8], sums[i + 12], all), all);
    else if constexpr (kLanes == 8)
      part[i] = folded<8>(sums[i], sums[i + 4], all);
    else
      part[i] = sums[i];
  }
  return folded<2>(folded<4>(part[0], part[1], all), folded<4>(part[2], part[3], all), all);
}

// sums[h * kKeys + s] += the products of vector h, of Count that are a_step apart, with rows[s], lane by lane: the dots
// are the `totals` once all has been added, bit for bit whatever Count is. `size` is a multiple of kLanes.
template <int Count>
inline void add_products(const float* a, int64_t a_step, const float* const* rows, int64_t size, Vector* sums) {
  constexpr int kRows = kLanes / Count;
  Vector kept[kLanes];  // in registers
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) kept[i] = sums[i];
  for (int64_t i = 0; i < size; i += kLanes)
#pragma GCC unroll 16
    for (int s = 0; s < kRows; ++s) {
      const Vector row = load(rows[s] + i);
#pragma GCC unroll 16
      for (int h = 0; h < Count; ++h) kept[h * kRows + s] += load(a + h * a_step + i) * row;
    }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) sums[i] = kept[i];
}

inline float dot(const float* a, const float* b, int64_t count) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load(a + i) * load(b + i);
  float rest = 0;
  for (; i < count; ++i) rest += a[i] * b[i];
  return total(sum) + rest;
}

inline float total(const float* values, int64_t count) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) sum += load(values + i);
  float rest = 0;
  for (; i < count; ++i) rest += values[i];
  return total(sum) + rest;
}

// The sum of the squares of values less `middle`.
inline float squared_distance(const float* values, float middle, int64_t count) {
  Vector sum = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector difference = load(values + i) - middle;
    sum += difference * difference;
  }
  float rest = 0;
  for (; i < count; ++i) rest += (values[i] - middle) * (values[i] - middle);
  return total(sum) + rest;
}

// The largest; NaN if there is one.
inline float largest(const float* values, int64_t count) {
  float max[kLanes];
  for (float& lane : max) lane = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) max[j] = values[i + j] <= max[j] ? max[j] : values[i + j];
  for (int64_t j = 0; i < count; ++i, ++j) max[j] = values[i] <= max[j] ? max[j] : values[i];
  for (int64_t j = 1; j < kLanes; ++j) max[0] = max[j] <= max[0] ? max[0] : max[j];
  return max[0];
}

inline float power_of_two(int32_t exponent) {
  const uint32_t bits = static_cast<uint32_t>(exponent + 127) << 23;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// The nearest value to x in a range; NaN stays NaN.
inline float limited(float x, float low, float high) {
  const float below = x > high ? high : x;
  return below < low ? low : below;
}

// e^x = 2^power (1 + rest series).
struct Exponential {
  int32_t power;
  float rest, series;
};

inline Exponential reduced_exponential(float x) {
  const float shifted = x * 1.44269504f + 12582912.f;  // rounds to the nearest integer
  const float whole = shifted - 12582912.f;
  const float rest = x - whole * 0.693145752f - whole * 1.42860677e-6f;
  float series = 1.3981999e-3f;
  series = series * rest + 8.3334519e-3f;
  series = series * rest + 4.1665665e-2f;
  series = series * rest + 1.6666667e-1f;
  series = series * rest + 0.5f;
  series = series * rest + 1.f;
  int32_t bits;
  std::memcpy(&bits, &shifted, 4);
  return {bits - 0x4b400000, rest, series};
}

// e^x, within 3e-7 of its value; below -87 that of -87, which is 2e-38. NaN stays NaN, large x give Inf.
inline float exponential(float x) {
  const auto [power, rest, series] = reduced_exponential(limited(x, -87.f, 89.f));
  const int32_t half = power >> 1;
  return (series * rest + 1.f) * power_of_two(half) * power_of_two(power - half);  // 2^128 is no float
}

// tanh(x), within 5e-7 of its value, however small that is; NaN stays NaN.
inline float hyperbolic_tangent(float x) {
  const auto [power, rest, series] = reduced_exponential(limited(2 * x, -30.f, 30.f));
  const float scale = power_of_two(power), less_one = scale * (series * rest) + (scale - 1);  // e^2x - 1
  return less_one / (less_one + 2);
}

}  // namespace quantkit
