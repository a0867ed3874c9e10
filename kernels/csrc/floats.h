// Floats of 16 bits to float32 and back.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "layout.h"

namespace quantkit {

inline float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint32_t to_bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}

inline float from_bf16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float value) {  // to the nearest, ties to even
  const uint32_t bits = to_bits(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__F16C__)
inline float from_f16(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_f16(float value) { return _cvtss_sh(value, 0); }
#elif defined(__ARM_FP16_FORMAT_IEEE)
inline float from_f16(uint16_t half) {
  __fp16 value;
  std::memcpy(&value, &half, 2);
  return value;
}
inline uint16_t to_f16(float value) {
  const __fp16 half = value;
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#else
inline float from_f16(uint16_t half) {
  const uint32_t sign = (half & 0x8000u) << 16, rest = half & 0x7fffu;
  if (rest < 0x400) return from_bits(sign | to_bits(static_cast<float>(rest) * 0x1p-24f));
  return from_bits(sign | ((rest << 13) + (rest < 0x7c00 ? 112u << 23 : 224u << 23)));  // Inf and NaN stay so
}
inline uint16_t to_f16(float value) {  // to the nearest, ties to even
  const uint32_t sign = to_bits(value) >> 16 & 0x8000, rest = to_bits(value) & 0x7fffffff;
  uint32_t half;
  if (rest > 0x7f800000) {
    half = 0x7e00;
  } else if (rest >= to_bits(65520.f)) {
    half = 0x7c00;
  } else if (rest < to_bits(0x1p-14f)) {
    half = to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f);  // floats from 0.5 on are 2^-24 apart, as these are
  } else {
    half = (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}
#endif

inline float load_scale(const uint8_t* scales, FloatType type, int64_t index) {
  if (type == FloatType::f32) {
    float value;
    std::memcpy(&value, scales + index * 4, 4);
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, scales + index * 2, 2);
  return type == FloatType::f16 ? from_f16(bits) : from_bf16(bits);
}

// `count` values from index `at` on, as float32; in `scratch` where they have to be converted.
inline const float* load_floats(const void* from, FloatType type, int64_t at, int64_t count, float* scratch) {
  if (type == FloatType::f32) return static_cast<const float*>(from) + at;
  const uint16_t* halves = static_cast<const uint16_t*>(from) + at;
  if (type == FloatType::f16) {
    int64_t i = 0;
#if defined(__F16C__)
    for (; i + 8 <= count; i += 8)  // compilers take them one at a time
      _mm256_storeu_ps(scratch + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(halves + i))));
#endif
    for (; i < count; ++i) scratch[i] = from_f16(halves[i]);
  } else
    for (int64_t i = 0; i < count; ++i) scratch[i] = from_bf16(halves[i]);
  return scratch;
}

// The same in `to` in any case, with zeros after them up to `whole`.
inline void copy_floats(const void* from, FloatType type, int64_t at, int64_t count, float* to, int64_t whole) {
  const float* loaded = load_floats(from, type, at, count, to);
  if (loaded != to) std::memcpy(to, loaded, count * sizeof(float));
  std::fill(to + count, to + whole, 0.f);
}

inline void store_floats(const float* values, int64_t count, void* to, FloatType type, int64_t at) {
  if (type == FloatType::f32) {
    std::memcpy(static_cast<float*>(to) + at, values, count * sizeof(float));
    return;
  }
  uint16_t* halves = static_cast<uint16_t*>(to) + at;
  if (type == FloatType::f16)
    for (int64_t i = 0; i < count; ++i) halves[i] = to_f16(values[i]);
  else
    for (int64_t i = 0; i < count; ++i) halves[i] = to_bf16(values[i]);
}

}  // namespace quantkit
