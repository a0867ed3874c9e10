// Rows of a key/value cache: floats, or bytes with a scale for each row.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "floats.h"

namespace quantkit {

enum class CacheType { f32, f16, bf16, i8 };

constexpr float kMaxByte = 127;

// Keys or values: rows of `size` floats, or of bytes that have a scale each.
struct CachedRows {
  void* rows;
  float* scales;  // null where rows are floats
  CacheType type;
  int64_t size;

  // `count` rows from row `at` on, as float32; in `scratch` where they have to be converted.
  const float* load(int64_t at, int64_t count, float* scratch) const {
    if (type != CacheType::i8) return load_floats(rows, static_cast<FloatType>(type), at * size, count * size, scratch);
    const int8_t* codes = static_cast<const int8_t*>(rows) + at * size;
    for (int64_t r = 0; r < count; ++r) {
      const float scale = scales[at + r];
      for (int64_t i = 0; i < size; ++i) scratch[r * size + i] = static_cast<float>(codes[r * size + i]) * scale;
    }
    return scratch;
  }

  // Have `count` rows from row `at` on brought near, which are needed soon. A call that gives nothing and changes
  // nothing compilers would leave out.
  [[gnu::always_inline]] void prefetch(int64_t at, int64_t count) const {
    const int64_t bytes = size * (type == CacheType::i8 ? 1 : type == CacheType::f32 ? 4 : 2);
    const char* first = static_cast<const char*>(rows) + at * bytes;
    for (int64_t i = 0; i < count * bytes; i += kLine) __builtin_prefetch(first + i);
    if (type != CacheType::i8) return;
    for (int64_t i = 0; i < count; i += kLine / int64_t{sizeof(float)}) __builtin_prefetch(scales + at + i);
  }

  void store(const float* values, int64_t at) const {
    if (type != CacheType::i8) return store_floats(values, size, rows, static_cast<FloatType>(type), at * size);
    int8_t* codes = static_cast<int8_t*>(rows) + at * size;
    const int64_t count = size;  // for all the compiler knows, stores of bytes change the member
    float max_abs = 0, not_finite = 0;  // NaN where a value is not finite, else 0
    for (int64_t i = 0; i < count; ++i) max_abs = std::max(max_abs, std::fabs(values[i]));
    for (int64_t i = 0; i < count; ++i) not_finite += values[i] * 0;
    const float steps = max_abs > 0 ? kMaxByte / max_abs : 0;
    if (not_finite == 0)
      for (int64_t i = 0; i < count; ++i) codes[i] = static_cast<int8_t>(std::nearbyint(values[i] * steps));
    scales[at] = max_abs / kMaxByte + not_finite;
  }
};

struct Cache {
  CachedRows keys, values;  // [slots, K, S]
  int64_t length;           // S
};

}  // namespace quantkit
