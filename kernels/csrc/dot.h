// Sums over float32 vectors and their largest values, in the compiler's own vector types.
#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

namespace quantkit {

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#elif defined(__AVX__)
constexpr int64_t kLanes = 8;
#else
constexpr int64_t kLanes = 4;
#endif
typedef float Vector __attribute__((vector_size(4 * kLanes)));

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

// The largest; NaN if there is one.
inline float largest(const float* values, int64_t count) {
  float most[kLanes];
  for (float& lane : most) lane = -std::numeric_limits<float>::infinity();
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes)
    for (int64_t j = 0; j < kLanes; ++j) most[j] = values[i + j] <= most[j] ? most[j] : values[i + j];
  for (int64_t j = 0; i < count; ++i, ++j) most[j] = values[i] <= most[j] ? most[j] : values[i];
  for (int64_t j = 1; j < kLanes; ++j) most[0] = most[j] <= most[0] ? most[0] : most[j];
  return most[0];
}

}  // namespace quantkit
