// Rows of a key/value cache: floats, or bytes with a scale of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"

namespace quantkit {

enum class CacheType { f32, f16, bf16, i8 };

constexpr float kMostByte = 127;

// Values that a row of `size` takes in its tensor: a row of bytes ends with its scale, a float32.
inline int64_t cache_width(CacheType type, int64_t size) {
  return type == CacheType::i8 ? size + static_cast<int64_t>(sizeof(float)) : size;
}

// `count` rows from row `at` on, as float32; `room` holds them where they have to be converted.
inline const float* load_rows(const void* from, CacheType type, int64_t at, int64_t count, int64_t size, float* room) {
  if (type != CacheType::i8) return load_floats(from, static_cast<FloatType>(type), at * size, count * size, room);
  const int64_t width = cache_width(type, size);
  const int8_t* codes = static_cast<const int8_t*>(from) + at * width;
  for (int64_t r = 0; r < count; ++r, codes += width) {
    float scale;
    std::memcpy(&scale, codes + size, sizeof(scale));
    for (int64_t i = 0; i < size; ++i) room[r * size + i] = static_cast<float>(codes[i]) * scale;
  }
  return room;
}

inline void store_row(const float* values, int64_t size, void* to, CacheType type, int64_t at) {
  if (type != CacheType::i8) return store_floats(values, size, to, static_cast<FloatType>(type), at * size);
  int8_t* codes = static_cast<int8_t*>(to) + at * cache_width(type, size);
  float most = 0, none = 0;  // none is NaN where a value is not finite
  for (int64_t i = 0; i < size; ++i) most = std::max(most, std::fabs(values[i]));
  for (int64_t i = 0; i < size; ++i) none += values[i] * 0;
  const float steps = most > 0 ? kMostByte / most : 0, scale = most / kMostByte + none;
  if (none == 0)
    for (int64_t i = 0; i < size; ++i) codes[i] = static_cast<int8_t>(std::nearbyint(values[i] * steps));
  std::memcpy(codes + size, &scale, sizeof(scale));
}

}  // namespace quantkit
