// Sums over float32 vectors, in the compiler's own vector types.
#pragma once

#include <cstdint>
#include <cstring>

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

}  // namespace quantkit
