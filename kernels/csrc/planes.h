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

// A register of a line's bytes; compilers make vector code of its operators, good code only of the processor's own width.
#if defined(__AVX512BW__)
constexpr int kPart = 64;
#elif defined(__AVX2__)
constexpr int kPart = 32;
#else
constexpr int kPart = 16;
#endif
typedef uint8_t Part __attribute__((vector_size(kPart)));
typedef uint16_t PartPairs __attribute__((vector_size(kPart)));
constexpr int kLineParts = kLine / kPart;

struct alignas(kLine) Line {
  Part parts[kLineParts];
};

// The codes of a block, a byte each.
struct Codes {
  Line lines[8];

  const uint8_t* bytes() const { return reinterpret_cast<const uint8_t*>(lines); }
  uint8_t operator()(int64_t row, int64_t column) const { return bytes()[column / 4 * kLine + row * 4 + column % 4]; }
};

inline Part load_part(const uint8_t* from) {
  Part part;
  std::memcpy(&part, __builtin_assume_aligned(from, kPart), sizeof(part));
  return part;
}

// What a plane, whose lowest bit is bit `Low` of a code, adds to a line's codes.
template <int Plane, int Low, int Index>
[[gnu::always_inline]] inline Part plane_part(const uint8_t* from, int part) {
  constexpr int kPerLine = 8 / Plane, kShift = Low - Index % kPerLine * Plane;
  constexpr uint8_t kMask = ((1 << Plane) - 1) << Low;
  // Shifts of bytes take two steps on most processors; in shifts of pairs, bits of the neighbour are masked off.
  PartPairs bits = reinterpret_cast<PartPairs>(load_part(from + Index / kPerLine * kLine + part * kPart));
  if constexpr (kShift > 0) bits = bits << kShift;
  if constexpr (kShift < 0) bits = bits >> -kShift;
  return reinterpret_cast<Part>(bits) & (Part{} + kMask);
}

template <int Bits, int Index>
[[gnu::always_inline]] inline Part codes_part(const uint8_t* from, int part) {
  if constexpr (Bits == 8) {
    return load_part(from + Index * kLine + part * kPart);
  } else {
    constexpr int kFirst = Bits >= 4 ? 4 : 2, kRest = Bits - kFirst;
    Part codes = plane_part<kFirst, 0, Index>(from, part);
    if constexpr (kRest > 0) codes |= plane_part<kRest, kFirst, Index>(from + kFirst * kLine, part);
    return codes;
  }
}

// What codes of 4 bits stand for, plus 128, by the number of the table.
alignas(16) constexpr uint8_t kTables[2][16] = {
    // IQ4_NL and IQ4_XS (ggml's kvalues_iq4nl).
    {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241},
    // Twice the numbers of e2m1, from 0 to 6 and, with the sign's bit, down to -6.
    {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116},
};

[[gnu::always_inline]] inline Part look_up(Part codes, const uint8_t* numbers) {
#if defined(__AVX512BW__)
  const __m512i table = _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers)));
  return reinterpret_cast<Part>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
  const __m256i table = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(numbers)));
  return reinterpret_cast<Part>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
#elif defined(__aarch64__)
  return reinterpret_cast<Part>(vqtbl1q_u8(vld1q_u8(numbers), reinterpret_cast<uint8x16_t>(codes)));
#else
  for (int i = 0; i < kPart; ++i) codes[i] = numbers[codes[i]];
  return codes;
#endif
}

template <int Bits, bool Table = false, int Index = 0>
[[gnu::always_inline]] inline void unpack_lines(const uint8_t* from, Codes& codes, const uint8_t* numbers = nullptr) {
  if constexpr (Index < 8) {
    for (int part = 0; part < kLineParts; ++part) {
      const Part own = codes_part<Bits, Index>(from, part);
      codes.lines[Index].parts[part] = Table ? look_up(own, numbers) : own;
    }
    unpack_lines<Bits, Table, Index + 1>(from, codes, numbers);
  }
}

// Unpack the codes of a block, or look them up in the table of this number.
[[gnu::always_inline]] inline void unpack_block(int64_t bits, int64_t table, const uint8_t* from, Codes& codes) {
  switch (bits) {
    case 2: return unpack_lines<2>(from, codes);
    case 3: return unpack_lines<3>(from, codes);
    case 4: return table ? unpack_lines<4, true>(from, codes, kTables[table - 1]) : unpack_lines<4>(from, codes);
    case 5: return unpack_lines<5>(from, codes);
    case 6: return unpack_lines<6>(from, codes);
    default: return unpack_lines<8>(from, codes);
  }
}

// Put a plane of codes into its lines.
template <int Plane, int Low>
inline void put_plane(const Codes& codes, uint8_t* to) {
  constexpr int kPerLine = 8 / Plane;
  for (int line = 0; line < Plane; ++line)
    for (int byte = 0; byte < kLine; ++byte) {
      int sum = 0;
      for (int i = 0; i < kPerLine; ++i)
        sum |= (codes.bytes()[(line * kPerLine + i) * kLine + byte] >> Low & ((1 << Plane) - 1)) << i * Plane;
      to[line * kLine + byte] = static_cast<uint8_t>(sum);
    }
}

template <int Bits>
inline void pack_lines(const Codes& codes, uint8_t* to) {
  if constexpr (Bits == 8) {
    std::memcpy(to, codes.bytes(), sizeof(codes));
  } else {
    constexpr int kFirst = Bits >= 4 ? 4 : 2, kRest = Bits - kFirst;
    put_plane<kFirst, 0>(codes, to);
    if constexpr (kRest > 0) put_plane<kRest, kFirst>(codes, to + kFirst * kLine);
  }
}

// Pack the codes of up to 16 rows, `step` bytes apart, and up to 32 columns into a block; the others are 0.
inline void pack_block(int64_t bits, const uint8_t* from, int64_t step, int64_t rows, int64_t columns, uint8_t* to) {
  Codes codes = {};
  uint8_t* bytes = reinterpret_cast<uint8_t*>(codes.lines);
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

}  // namespace quantkit
