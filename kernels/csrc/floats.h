// Floats of 16 bits to float32 and back.
#pragma once

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

inline float from_bf16(uint16_t bits) { return from_bits(static_cast<uint32_t>(bits) << 16); }

inline uint16_t to_bf16(float value) {  // to the nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7fffffff) > 0x7f800000) return static_cast<uint16_t>(bits >> 16 | 64);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#if defined(__F16C__)
inline float from_f16(uint16_t half) { return _cvtsh_ss(half); }
inline uint16_t to_f16(float value) { return _cvtss_sh(value, 0); }
#elif defined(__FLT16_MANT_DIG__)
inline float from_f16(uint16_t half) {
  _Float16 value;
  std::memcpy(&value, &half, 2);
  return static_cast<float>(value);
}
inline uint16_t to_f16(float value) {
  const _Float16 half = static_cast<_Float16>(value);
  uint16_t bits;
  std::memcpy(&bits, &half, 2);
  return bits;
}
#else
#error "this compiler knows no 16-bit floats"
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

// `count` values from index `at` on, as float32; `room` holds them where they have to be converted.
inline const float* load_floats(const void* from, FloatType type, int64_t at, int64_t count, float* room) {
  if (type == FloatType::f32) return static_cast<const float*>(from) + at;
  const uint16_t* halves = static_cast<const uint16_t*>(from) + at;
  if (type == FloatType::f16)
    for (int64_t i = 0; i < count; ++i) room[i] = from_f16(halves[i]);
  else
    for (int64_t i = 0; i < count; ++i) room[i] = from_bf16(halves[i]);
  return room;
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
