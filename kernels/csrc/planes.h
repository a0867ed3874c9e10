// The codes of a block of 16 rows and 32 columns in planes of bits.
//
// Codes of 8 bits are 8 lines of 64 bytes: line i has columns 4 i to 4 i + 3 of each row, row after row. Others are sums
// of planes, the lowest bits in the first: of 4 bits (in codes of 4, 5 and 6 bits) in four lines, of 2 bits (in those of
// 2, 3 and 6) in two, and of 1 bit (in those of 3 and 5) in one. Each is such lines side by side in the bits of fewer:
// a line of 4 bits has two of them, one of 2 bits four, and one of 1 bit all eight, the first in the lowest bits.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace quantkit {

constexpr int64_t kRows = 16;
constexpr int64_t kColumns = 32;
constexpr int64_t kLine = 64;  // bytes of a cache line

// A line, in as many registers as the processor needs for it; compilers make vector code of its operators.
typedef uint8_t Line __attribute__((vector_size(kLine)));
typedef uint16_t Pairs __attribute__((vector_size(kLine)));

inline Line load_line(const uint8_t* from) {
  Line line;
  std::memcpy(&line, __builtin_assume_aligned(from, kLine), sizeof(line));
  return line;
}

// Bytes shifted to the left, or to the right if `by` is negative; bits from a neighbouring byte come in.
template <int By>
[[gnu::always_inline]] inline Line shifted(Line line) {
  if constexpr (By >= 0)
    return reinterpret_cast<Line>(reinterpret_cast<Pairs>(line) << By);
  else
    return reinterpret_cast<Line>(reinterpret_cast<Pairs>(line) >> -By);
}

// Add a plane of some bits to lines of codes, from a code's lowest bit `Low` on.
template <int Plane, int Low, int Index = 0>
[[gnu::always_inline]] inline void add_plane(const uint8_t* from, Line (&codes)[8]) {
  if constexpr (Index < 8) {
    constexpr int kPerLine = 8 / Plane, kFirst = Index % kPerLine * Plane;
    constexpr uint8_t kMask = ((1 << Plane) - 1) << Low;
    const Line bits = shifted<Low - kFirst>(load_line(from + Index / kPerLine * kLine)) & (Line{} + kMask);
    codes[Index] = Low == 0 ? bits : codes[Index] | bits;
    add_plane<Plane, Low, Index + 1>(from, codes);
  }
}

template <int Bits>
[[gnu::always_inline]] inline void unpack_lines(const uint8_t* from, Line (&codes)[8]) {
  if constexpr (Bits == 8) {
    for (int i = 0; i < 8; ++i) codes[i] = load_line(from + i * kLine);
  } else {
    constexpr int kFirst = Bits >= 4 ? 4 : 2, kRest = Bits - kFirst;
    add_plane<kFirst, 0>(from, codes);
    if constexpr (kRest > 0) add_plane<kRest, kFirst>(from + kFirst * kLine, codes);
  }
}

// Make a plane of lines of codes: the inverse of `add_plane`.
template <int Plane, int Low>
inline void put_plane(const Line (&codes)[8], uint8_t* to) {
  constexpr int kPerLine = 8 / Plane;
  for (int line = 0; line < Plane; ++line) {
    Line sum{};
    for (int i = 0; i < kPerLine; ++i)
      sum |= (codes[line * kPerLine + i] >> Low & static_cast<uint8_t>((1 << Plane) - 1)) << i * Plane;
    std::memcpy(to + line * kLine, &sum, sizeof(sum));
  }
}

template <int Bits>
inline void pack_lines(const Line (&codes)[8], uint8_t* to) {
  if constexpr (Bits == 8) {
    std::memcpy(to, codes, sizeof(codes));
  } else {
    constexpr int kFirst = Bits >= 4 ? 4 : 2, kRest = Bits - kFirst;
    put_plane<kFirst, 0>(codes, to);
    if constexpr (kRest > 0) put_plane<kRest, kFirst>(codes, to + kFirst * kLine);
  }
}

// Pack the codes of up to 16 rows, `step` bytes apart, and up to 32 columns into a block; the others are 0.
inline void pack_block(int64_t bits, const uint8_t* from, int64_t step, int64_t rows, int64_t columns, uint8_t* to) {
  alignas(kLine) Line codes[8] = {};
  uint8_t* bytes = reinterpret_cast<uint8_t*>(codes);
  for (int64_t r = 0; r < rows; ++r, from += step)
    for (int64_t c = 0; c < columns; c += 4)
      std::memcpy(bytes + c / 4 * kLine + r * 4, from + c, std::min<int64_t>(4, columns - c));
  switch (bits) {
    case 2: return pack_lines<2>(codes, to);
    case 3: return pack_lines<3>(codes, to);
    case 4: return pack_lines<4>(codes, to);
    case 5: return pack_lines<5>(codes, to);
    case 6: return pack_lines<6>(codes, to);
    default: return pack_lines<8>(codes, to);
  }
}

// What the codes of 4 bits of IQ4_NL and IQ4_XS stand for, plus 128 (ggml's kvalues_iq4nl).
alignas(16) constexpr uint8_t kTable[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};

[[gnu::always_inline]] inline void look_up(Line (&codes)[8]) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable)));
  for (Line& line : codes)
    line = reinterpret_cast<Line>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(line)));
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(kTable)));
  for (Line& line : codes) {
    __m256i halves[2];
    std::memcpy(halves, &line, sizeof(line));
    for (__m256i& half : halves) half = _mm256_shuffle_epi8(table, half);
    std::memcpy(&line, halves, sizeof(line));
  }
#elif defined(__aarch64__)
  const uint8x16_t table = vld1q_u8(kTable);
  for (Line& line : codes) {
    uint8x16_t quarters[4];
    std::memcpy(quarters, &line, sizeof(line));
    for (uint8x16_t& quarter : quarters) quarter = vqtbl1q_u8(table, quarter);
    std::memcpy(&line, quarters, sizeof(line));
  }
#else
  for (Line& line : codes)
    for (int i = 0; i < kLine; ++i) line[i] = kTable[line[i]];
#endif
}

// The codes of a block as lines of bytes.
[[gnu::always_inline]] inline void unpack_block(int64_t bits, bool table, const uint8_t* from, Line (&codes)[8]) {
  switch (bits) {
    case 2: return unpack_lines<2>(from, codes);
    case 3: return unpack_lines<3>(from, codes);
    case 4:
      unpack_lines<4>(from, codes);
      if (table) look_up(codes);
      return;
    case 5: return unpack_lines<5>(from, codes);
    case 6: return unpack_lines<6>(from, codes);
    default: return unpack_lines<8>(from, codes);
  }
}

}  // namespace quantkit
