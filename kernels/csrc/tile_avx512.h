// AVX-512 with VNNI: one vector is four columns of 16 rows.
#pragma once

#include <immintrin.h>

#include <type_traits>

#include "activations.h"
#include "layout.h"

namespace quantkit {

constexpr const char* kInstructions = "avx512-vnni";
constexpr int kTokens = 16;  // that a tile takes at once
constexpr int kBands = 2;    // the same, where tokens are several: activations are loaded once for both
constexpr bool kSigned8 = false;
constexpr int64_t kAhead = 2048;  // bytes

constexpr Form form_for(int64_t, bool exact, int64_t) { return exact ? Form::halves : Form::bytes; }

inline __m512 load_scales(const uint8_t* head, FloatType type, int64_t offset) {
  if (type == FloatType::f32) return _mm512_load_ps(head);
  const __m256i half = _mm256_load_si256(reinterpret_cast<const __m256i*>(head + offset * 2));
  if (type == FloatType::f16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

inline __m512i four_columns(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm512_set1_epi32(word);
}

// sums[t][n] += the sums over some lines of a block for the 16 rows of band n and token t, whose activations are `apart`
// bytes from those of the token before. Each product waits for the one before it in the same sum, so all sums go in turn.
template <int First = 0, int End = 8, int Tokens, int Bands>
[[gnu::always_inline]] inline void add_dots(const __m512i (&w)[Bands][8], const int8_t* x, int64_t apart, __m512i (&sums)[Tokens][Bands]) {
#pragma GCC unroll 8
  for (int i = First; i < End; ++i)
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
      const __m512i four = four_columns(x + t * apart + i * 4);
#pragma GCC unroll 2
      for (int n = 0; n < Bands; ++n) {
        sums[t][n] = _mm512_dpbusd_epi32(sums[t][n], w[n][i], four);
        if constexpr (Tokens * Bands > 1) settle(sums[t][n]);
      }
    }
}

// out[t * 16 + r] = row r of a band times token t; of the next band at out + step.
template <int Bits, bool Exact, int Tokens, int Bands>
void tile(const Layout& at, const uint8_t* band, const Record<form_for(Bits, Exact, Tokens), Tokens>* x, float* out,
          int64_t step) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i zero[Bands];
  __m512 scale[Bands], total[Tokens][Bands];
  for (int t = 0; t < Tokens; ++t)
    for (int n = 0; n < Bands; ++n) total[t][n] = _mm512_setzero_ps();
  const int64_t groups = at.groups(), per_group = at.blocks_per_group(), apart = at.band_bytes();
  const int64_t per_line = at.groups_per_line(), head_bytes = at.head_bytes();
  const FloatType type = at.scales;
  const bool zeros = at.zeros();
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t offset = enter_group(g, per_line, head_bytes, codes, head);
    for (int n = 0; n < Bands; ++n) {
      scale[n] = load_scales(head + n * apart, type, offset);
      if (!zeros) continue;
      const __m128i* bytes = reinterpret_cast<const __m128i*>(head + n * apart + kLine + offset);
      zero[n] = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(_mm_load_si128(bytes)));
    }
    for (int64_t b = 0; b < per_group; ++b, ++x, codes += kRows * kColumns * Bits / 8) {
      __m512i w[Bands][8];
      for (int n = 0; n < Bands; ++n) {
        const uint8_t* from = codes + n * apart;
        for (int i = 0; i < Bits; ++i)  // the processor looks ahead too little
          _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + i * 64), _MM_HINT_T0);
        if (Bits == 4) {
          for (int i = 0; i < 4; ++i) {
            const __m512i both = _mm512_load_si512(from + i * 64);
            w[n][2 * i] = _mm512_and_si512(both, nibble);
            w[n][2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
          }
        } else {
          for (int i = 0; i < 8; ++i) w[n][i] = _mm512_load_si512(from + i * 64);
        }
      }
      constexpr int kSome = Tokens < 4 ? Tokens : 4;  // whose sums stay in registers
      for (int t = 0; t < Tokens; t += kSome) {
        constexpr int64_t kApart = sizeof(x->values[0]);
        __m512i sums[kSome][Bands];
#pragma GCC unroll 4
        for (int j = 0; j < kSome; ++j)
          for (int n = 0; n < Bands; ++n) sums[j][n] = _mm512_setzero_si512();
        add_dots(w, x->values[t], kApart, sums);
        if (Exact) {  // these were the high bytes
#pragma GCC unroll 4
          for (int j = 0; j < kSome; ++j)
            for (int n = 0; n < Bands; ++n) sums[j][n] = _mm512_slli_epi32(sums[j][n], 8);
          add_dots(w, x->low(t), kApart, sums);
        }
#pragma GCC unroll 4
        for (int j = 0; j < kSome; ++j) {
          const __m512i of_x = _mm512_set1_epi32(x->sums[t + j]);
          const __m512 by = _mm512_set1_ps(x->scales[t + j]);
          for (int n = 0; n < Bands; ++n) {
            const __m512i sum = _mm512_add_epi32(sums[j][n], zeros ? _mm512_mullo_epi32(zero[n], of_x) : of_x);
            total[t + j][n] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scale[n], by), total[t + j][n]);
          }
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int n = 0; n < Bands; ++n) _mm512_storeu_ps(out + n * step + t * kRows, total[t][n]);
}

// Bytes of 16 rows as floats, or some bits of them.
inline __m512 load_inner(const uint8_t* from, int shift, int mask) {
  const __m512i bytes = _mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(from)));
  return _mm512_cvtepi32_ps(_mm512_and_si512(_mm512_srai_epi32(bytes, shift), _mm512_set1_epi32(mask)));
}

// What codes of 16 rows are multiplied by, and what is subtracted then, for the block or each half of it.
template <int Halves>
struct RowScales {
  __m512 outer, outer_minimum, scale[Halves], minimum[Halves];

  // Those of the next block; `changed` is what `Heads::next` returned.
  [[gnu::always_inline]] void load(const Layout& at, const Heads& heads, int64_t band, bool changed) {
    const uint8_t* head = heads.head + band;
    const bool minima = at.minima();
    if (!at.nested) {
      if (!changed) return;
      scale[0] = load_scales(head, at.scales, heads.offset);
      if (minima) minimum[0] = load_scales(head + kLine, at.scales, heads.offset);
      return;
    }
    if (changed) {
      outer = load_scales(head, FloatType::f16, 0);
      if (minima) outer_minimum = load_scales(head, FloatType::f16, kRows);
    }
    for (int h = 0; h < Halves; ++h) {
      const uint8_t* inner = heads.inner(h) + band;
      scale[h] = _mm512_mul_ps(outer, load_inner(inner, 0, at.inner_mask()));
      if (!minima) continue;
      const __m512 inner_minimum = load_inner(inner + at.minima_at(), at.minima_shift(), at.inner_mask());
      minimum[h] = _mm512_mul_ps(outer_minimum, inner_minimum);
    }
  }
};

// `tile` of weights in blocks.
template <bool Exact, bool Halved, int Tokens, int Bands>
void block_tile(const Layout& weight, const uint8_t* band, const Record<form_for(8, Exact, Tokens), Tokens>* x,
                float* out, int64_t step) {
  constexpr int kHalves = Halved ? 2 : 1, kLines = 8 / kHalves;
  const Layout at = weight;  // in a copy no store can change it
  const int64_t apart = at.band_bytes(), block_bytes = at.block_bytes(), bits = at.bits;
  const bool minima = at.minima();
  const int64_t table = at.table();
  const int32_t zero = at.fixed_zero();
  __m512 total[Tokens][Bands];
  for (int t = 0; t < Tokens; ++t)
    for (int n = 0; n < Bands; ++n) total[t][n] = _mm512_setzero_ps();
  RowScales<kHalves> scales[Bands];
  Heads heads(at);
  const uint8_t* codes = band;
  for (int64_t b = at.blocks(); b > 0; --b, ++x, codes += block_bytes) {
    const uint8_t* before = codes;
    const bool changed = heads.next(codes);
    const int64_t ahead = before - codes;  // a head is loaded ahead with its block
    __m512i w[Bands][8];
    for (int n = 0; n < Bands; ++n) {
      scales[n].load(at, heads, n * apart, changed);
      const uint8_t* from = codes + n * apart;
      for (int64_t i = ahead; i < block_bytes; i += kLine)  // the processor looks ahead too little
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + i), _MM_HINT_T0);
      Codes block;
      unpack_block(bits, table, from, block);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) w[n][i] = reinterpret_cast<__m512i>(block.lines[i].parts[0]);
    }
    constexpr int kSome = Tokens < 4 ? Tokens : 4;  // whose sums stay in registers
    for (int t = 0; t < Tokens; t += kSome) {
      constexpr int64_t kApart = sizeof(x->values[0]);
      const auto add_half = [&](auto half) __attribute__((always_inline)) {
        constexpr int kHalf = half, kFirst = kHalf * kLines, kEnd = kFirst + kLines;
        __m512i sums[kSome][Bands];
#pragma GCC unroll 4
        for (int j = 0; j < kSome; ++j)
          for (int n = 0; n < Bands; ++n) sums[j][n] = _mm512_setzero_si512();
        add_dots<kFirst, kEnd>(w, x->values[t], kApart, sums);
        if (Exact) {  // these were the high bytes
#pragma GCC unroll 4
          for (int j = 0; j < kSome; ++j)
            for (int n = 0; n < Bands; ++n) sums[j][n] = _mm512_slli_epi32(sums[j][n], 8);
          add_dots<kFirst, kEnd>(w, x->low(t), kApart, sums);
        }
#pragma GCC unroll 4
        for (int j = 0; j < kSome; ++j) {
          const int32_t of_x = x->template sum<kHalves>(t + j, kHalf);
          const __m512 by = _mm512_set1_ps(x->scales[t + j]);
          const __m512i off = _mm512_set1_epi32(zero * of_x);
          const __m512 all = _mm512_set1_ps(static_cast<float>(of_x) * x->scales[t + j]);
          for (int n = 0; n < Bands; ++n) {
            __m512& to = total[t + j][n];
            const __m512i sum = _mm512_sub_epi32(sums[j][n], off);
            to = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), _mm512_mul_ps(scales[n].scale[kHalf], by), to);
            if (minima) to = _mm512_fnmadd_ps(scales[n].minimum[kHalf], all, to);
          }
        }
      };
      add_half(std::integral_constant<int, 0>());
      if constexpr (Halved) add_half(std::integral_constant<int, 1>());
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int n = 0; n < Bands; ++n) _mm512_storeu_ps(out + n * step + t * kRows, total[t][n]);
}

}  // namespace quantkit
