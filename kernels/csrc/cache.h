// Rows of a key/value cache: floats, or bytes with a scale of their own.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "floats.h"

namespace quantkit {

enum class CacheType { f32, f16, bf16, i8 };

constexpr float kMaxByte = 127;

// Elements that a row of `size` values has in its tensor: a row of bytes ends with its scale, a float32.
inline int64_t cache_width(CacheType type, int64_t size) {
  return type == CacheType::i8 ? size + static_cast<int64_t>(sizeof(float)) : size;
}

// `count` rows from row `at` on, as float32; in `scratch` where they have to be converted.
inline const float* load_rows(const void* from, CacheType type, int64_t at, int64_t count, int64_t size,
                              float* scratch) {
  if (type != CacheType::i8) return load_floats(from, static_cast<FloatType>(type), at * size, count * size, scratch);
  const int64_t width = cache_width(type, size);
  const int8_t* codes = static_cast<const int8_t*>(from) + at * width;
  for (int64_t r = 0; r < count; ++r, codes += width) {
    float scale;
    std::memcpy(&scale, codes + size, sizeof(scale));
    for (int64_t i = 0; i < size; ++i) scratch[r * size + i] = static_cast<float>(codes[i]) * scale;
  }
  return scratch;
}

// Have `count` rows from row `at` on brought near, which are needed soon.
inline void prefetch_rows(const void* from, CacheType type, int64_t at, int64_t count, int64_t size) {
  const int64_t bytes = cache_width(type, size) * (type == CacheType::i8 ? 1 : type == CacheType::f32 ? 4 : 2);
  const char* rows = static_cast<const char*>(from) + at * bytes;
  for (int64_t i = 0; i < count * bytes; i += kLine) __builtin_prefetch(rows + i);
}

inline void store_row(const float* values, int64_t size, void* to, CacheType type, int64_t at) {
  if (type != CacheType::i8) return store_floats(values, size, to, static_cast<FloatType>(type), at * size);
  int8_t* codes = static_cast<int8_t*>(to) + at * cache_width(type, size);
  float max_abs = 0, not_finite = 0;  // NaN where a value is not finite, else 0
  for (int64_t i = 0; i < size; ++i) max_abs = std::max(max_abs, std::fabs(values[i]));
  for (int64_t i = 0; i < size; ++i) not_finite += values[i] * 0;
  const float steps = max_abs > 0 ? kMaxByte / max_abs : 0, scale = max_abs / kMaxByte + not_finite;
  if (not_finite == 0)
    for (int64_t i = 0; i < size; ++i) codes[i] = static_cast<int8_t>(std::nearbyint(values[i] * steps));
  std::memcpy(codes + size, &scale, sizeof(scale));
}

}  // namespace quantkit
