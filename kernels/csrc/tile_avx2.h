// AVX2: one vector is four columns of 8 rows, and a band has two of them side by side.
#pragma once

#include <immintrin.h>

#include "activations.h"
#include "layout.h"

namespace quantkit {

constexpr const char* kInstructions = "avx2";
constexpr int kTokens = 4;  // that a tile takes at once
constexpr int kBands = 1;   // the same
constexpr bool kSigned8 = false;
constexpr int kHalf = 8;
constexpr int64_t kAhead = 2048;  // bytes

constexpr Form form_for(int64_t bits, bool exact, int64_t tokens) {
  if (bits == 4 && !exact) return Form::bytes;
  return bits == 4 && tokens == 1 ? Form::halves : Form::swapped;
}

inline __m256 load_scales(const uint8_t* head, FloatType type, int64_t offset) {
  if (type == FloatType::f32) return _mm256_load_ps(reinterpret_cast<const float*>(head) + offset);
  const __m128i half = _mm_load_si128(reinterpret_cast<const __m128i*>(head + offset * 2));
  if (type == FloatType::f16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline __m256i load_vector(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }

// Four bytes, the same in every lane.
inline __m256i spread(const void* from) {
  int32_t word;
  std::memcpy(&word, from, 4);
  return _mm256_set1_epi32(word);
}

// sum += codes x activations, 8 bits each, in 16 bits.
inline void add_bytes(__m256i& sum, __m256i codes, __m256i x) {
  sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(codes, x));
  settle(sum);
}

// sum += codes x activations, 16 bits each, in 32 bits.
inline void add_words(__m256i& sum, __m256i codes, __m256i x) {
  sum = _mm256_add_epi32(sum, _mm256_madd_epi16(codes, x));
  settle(sum);
}

// Sums over a block, of both halves, for each token.
template <int Tokens>
using Sums = __m256i[Tokens][2];

template <int Tokens>
inline void clear(Sums<Tokens>& sums) {
  for (int t = 0; t < Tokens; ++t) sums[t][0] = sums[t][1] = _mm256_setzero_si256();
}

// Of 4-bit codes with activations of 8 bits. Codes below 16 times 127 add up to at most 30720 over the eight
// steps, so 16 bits hold them.
template <int Tokens, class Records>
[[gnu::always_inline]] inline void dot_bytes(const uint8_t* codes, const Records& x, Sums<Tokens>& sums) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
  clear<Tokens>(sums);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m256i left = load_vector(codes + i * 64), right = load_vector(codes + i * 64 + 32);
    const __m256i w[4] = {_mm256_and_si256(left, nibble), _mm256_and_si256(right, nibble),
                          _mm256_and_si256(_mm256_srli_epi16(left, 4), nibble),
                          _mm256_and_si256(_mm256_srli_epi16(right, 4), nibble)};
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t)
      for (int n = 0; n < 2; ++n) {
        const __m256i four = spread(x.values[t] + i * 8 + n * 4);
        add_bytes(sums[t][0], w[2 * n], four);
        add_bytes(sums[t][1], w[2 * n + 1], four);
      }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int h = 0; h < 2; ++h) sums[t][h] = _mm256_madd_epi16(sums[t][h], ones);
}

// Of 4-bit codes with high and low bytes of one token's activations.
template <class Records>
[[gnu::always_inline]] inline void dot_halves(const uint8_t* codes, const Records& x, Sums<1>& sums) {
  const __m256i nibble = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1), shift = _mm256_set1_epi16(256);
  Sums<1> low;
  clear<1>(sums);
  clear<1>(low);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    for (int h = 0; h < 2; ++h) {
      const __m256i both = load_vector(codes + i * 64 + h * 32);
      const __m256i first = _mm256_and_si256(both, nibble);
      const __m256i second = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
      add_bytes(sums[0][h], first, spread(x.values[0] + i * 8));
      add_bytes(low[0][h], first, spread(x.low(0) + i * 8));
      add_bytes(sums[0][h], second, spread(x.values[0] + i * 8 + 4));
      add_bytes(low[0][h], second, spread(x.low(0) + i * 8 + 4));
    }
  for (int h = 0; h < 2; ++h)
    sums[0][h] = _mm256_add_epi32(_mm256_madd_epi16(sums[0][h], shift), _mm256_madd_epi16(low[0][h], ones));
}

// Of codes of 4 or 8 bits, in some lines, with activations of 16, from a column on: of each four columns those in the
// even places, then the others.
template <int Bits, int Tokens, int Lines = Bits, class Records>
[[gnu::always_inline]] inline void dot_words(const uint8_t* codes, const Records& x, Sums<Tokens>& sums,
                                             int column = 0) {
  const __m256i mask = _mm256_set1_epi16(Bits == 8 ? 255 : 15);
  clear<Tokens>(sums);
  asm volatile("" ::: "memory");  // or the activations of all steps are spread out beforehand
#pragma GCC unroll 8
  for (int i = 0; i < Lines; ++i) {
    const __m256i left = load_vector(codes + i * 64), right = load_vector(codes + i * 64 + 32);
    constexpr int kParts = 16 / Bits;
    const int shifts[] = {0, 8, 4, 12};
#pragma GCC unroll 4
    for (int n = 0; n < kParts; ++n) {
      const int shift = shifts[n];
      __m256i w[2] = {left, right};
      for (int h = 0; h < 2; ++h) {
        if (shift) w[h] = _mm256_srli_epi16(w[h], shift);
        if (shift + Bits < 16) w[h] = _mm256_and_si256(w[h], mask);
      }
#pragma GCC unroll 4
      for (int t = 0; t < Tokens; ++t) {
        const __m256i two = spread(x.whole(t) + column + i * 2 * kParts + n * 2);
        add_words(sums[t][0], w[0], two);
        add_words(sums[t][1], w[1], two);
      }
    }
  }
}

// out[t * 16 + r] = row r of the band times token t.
template <int Bits, bool Exact, int Tokens, int Bands>
void tile(const Layout& at, const uint8_t* band, const Record<form_for(Bits, Exact, Tokens), Tokens>* x, float* out,
          int64_t) {
  __m256i zero[2] = {};
  __m256 scale[2], total[Tokens][2];
  for (int t = 0; t < Tokens; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
  const int64_t groups = at.groups(), per_group = at.blocks_per_group();
  const FloatType type = at.scales;
  const bool zeros = at.zeros();
  const int64_t per_line = at.groups_per_line(), head_bytes = at.head_bytes();
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t offset = enter_group(g, per_line, head_bytes, codes, head);
    for (int h = 0; h < 2; ++h) {
      scale[h] = load_scales(head, type, offset + h * kHalf);
      if (!zeros) continue;
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(head + kLine + offset + h * kHalf));
      zero[h] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(bytes));
    }
    for (int64_t b = 0; b < per_group; ++b, ++x, codes += kRows * kColumns * Bits / 8) {
      for (int i = 0; i < Bits; ++i)  // the processor looks ahead too little
        _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead + i * 64), _MM_HINT_T0);
      constexpr Form kForm = form_for(Bits, Exact, Tokens);
      Sums<Tokens> sums;
      if constexpr (kForm == Form::bytes) dot_bytes<Tokens>(codes, *x, sums);
      if constexpr (kForm == Form::halves) dot_halves(codes, *x, sums);
      if constexpr (kForm == Form::swapped) dot_words<Bits, Tokens>(codes, *x, sums);
      for (int t = 0; t < Tokens; ++t) {
        const __m256i of_x = _mm256_set1_epi32(x->sums[t]);
        const __m256 step = _mm256_set1_ps(x->scales[t]);
        for (int h = 0; h < 2; ++h) {
          const __m256i sum = _mm256_add_epi32(sums[t][h], zeros ? _mm256_mullo_epi32(zero[h], of_x) : of_x);
          total[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale[h], step), total[t][h]);
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + t * kRows + h * kHalf, total[t][h]);
}

// Bytes of 8 rows as floats, or some bits of them.
inline __m256 load_inner(const uint8_t* from, int shift, int mask) {
  const __m256i bytes = _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  return _mm256_cvtepi32_ps(_mm256_and_si256(_mm256_srai_epi32(bytes, shift), _mm256_set1_epi32(mask)));
}

// `tile` of weights in blocks. The codes of a block become bytes in memory, as registers are too few for them.
template <bool Exact, bool Halved, int Tokens, int Bands>
void block_tile(const Layout& weight, const uint8_t* band, const Record<form_for(8, Exact, Tokens), Tokens>* x,
                float* out, int64_t) {
  constexpr int kHalves = Halved ? 2 : 1, kLines = 8 / kHalves;
  const Layout at = weight;  // in a copy no store can change it
  const int64_t block_bytes = at.block_bytes(), bits = at.bits, minima_at = at.nested ? at.minima_at() : 0;
  const int minima_shift = at.minima_shift(), inner_mask = at.inner_mask();
  const bool minima = at.minima();
  const int64_t table = at.table();
  const int32_t zero = at.fixed_zero();
  __m256 outer[2], outer_minimum[2], scale[2], minimum[2], total[Tokens][2];
  for (int t = 0; t < Tokens; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
  Heads heads(at);
  const uint8_t* codes = band;
  for (int64_t b = at.blocks(); b > 0; --b, ++x, codes += block_bytes) {
    const uint8_t* before = codes;  // a head is loaded ahead with its block
    const bool changed = heads.next(codes);
    if (changed)
      for (int h = 0; h < 2; ++h) {
        const __m256 loaded = load_scales(heads.head, at.scales, heads.offset + h * kHalf);
        (at.nested ? outer : scale)[h] = loaded;
        if (!minima) continue;
        if (at.nested)
          outer_minimum[h] = load_scales(heads.head, at.scales, kRows + h * kHalf);
        else
          minimum[h] = load_scales(heads.head + kLine, at.scales, heads.offset + h * kHalf);
      }
    for (int64_t i = before - codes; i < block_bytes; i += kLine)  // the processor looks ahead too little
      _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead + i), _MM_HINT_T0);
    Codes block;
    unpack_block(bits, table, codes, block);
    for (int p = 0; p < kHalves; ++p) {
      if (at.nested)
        for (int h = 0; h < 2; ++h) {
          const uint8_t* inner = heads.inner(p) + h * kHalf;
          scale[h] = _mm256_mul_ps(outer[h], load_inner(inner, 0, inner_mask));
          if (!minima) continue;
          const __m256 inner_minimum = load_inner(inner + minima_at, minima_shift, inner_mask);
          minimum[h] = _mm256_mul_ps(outer_minimum[h], inner_minimum);
        }
      Sums<Tokens> sums;
      dot_words<8, Tokens, kLines>(block.bytes() + p * kLines * kLine, *x, sums, p * kLines * 4);
      for (int t = 0; t < Tokens; ++t) {
        const int32_t of_x = x->template sum<kHalves>(t, p);
        const __m256i off = _mm256_set1_epi32(zero * of_x);
        const __m256 by = _mm256_set1_ps(x->scales[t]);
        const __m256 all = _mm256_set1_ps(static_cast<float>(of_x) * x->scales[t]);
        for (int h = 0; h < 2; ++h) {
          const __m256i sum = _mm256_sub_epi32(sums[t][h], off);
          total[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale[h], by), total[t][h]);
          if (minima) total[t][h] = _mm256_fnmadd_ps(minimum[h], all, total[t][h]);
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + t * kRows + h * kHalf, total[t][h]);
}

}  // namespace quantkit
