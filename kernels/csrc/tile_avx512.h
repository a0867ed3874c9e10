// AVX-512 with VNNI: one vector is four columns of 16 rows.
#pragma once

#include <immintrin.h>

#include "activations.h"
#include "layout.h"

namespace quantkit {

constexpr const char* kInstructions = "avx512-vnni";
constexpr int kTokens = 16;  // that a tile takes at once
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

// `sum` plus the sums over a block for 16 rows, in two chains since each step waits for the one before.
inline __m512i dot(__m512i sum, const __m512i* w, const int8_t* x) {
  __m512i odd = _mm512_setzero_si512();
  for (int i = 0; i < 8; i += 2) {
    sum = _mm512_dpbusd_epi32(sum, w[i], four_columns(x + i * 4));
    odd = _mm512_dpbusd_epi32(odd, w[i + 1], four_columns(x + i * 4 + 4));
  }
  return _mm512_add_epi32(sum, odd);
}

// out[t * 16 + r] = row r of the band times token t.
template <int Bits, bool Exact, int Tokens>
void tile(const Layout& at, const uint8_t* band, const Record<form_for(Bits, Exact, Tokens), Tokens>* x, float* out) {
  const __m512i nibble = _mm512_set1_epi8(15);
  __m512i zero = _mm512_setzero_si512();
  __m512 total[Tokens];
  for (int t = 0; t < Tokens; ++t) total[t] = _mm512_setzero_ps();
  const int64_t groups = at.groups(), per_group = at.blocks_per_group();
  const int64_t per_line = at.groups_per_line(), head_bytes = at.head_bytes();
  const FloatType type = at.scales;
  const bool zeros = at.zeros;
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t offset = enter_group(g, per_line, head_bytes, codes, head);
    const __m512 scale = load_scales(head, type, offset);
    if (zeros) {
      const __m128i bytes = _mm_load_si128(reinterpret_cast<const __m128i*>(head + kLine + offset));
      zero = _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_cvtepu8_epi32(bytes));
    }
    for (int64_t b = 0; b < per_group; ++b, ++x, codes += kRows * kColumns * Bits / 8) {
      if (Tokens > 1)  // the work on a block is long, and the processor looks ahead too little
        for (int i = 0; i < Bits; ++i)
          _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead + i * 64), _MM_HINT_T0);
      __m512i w[8];
      if (Bits == 4) {
        for (int i = 0; i < 4; ++i) {
          const __m512i both = _mm512_load_si512(codes + i * 64);
          w[2 * i] = _mm512_and_si512(both, nibble);
          w[2 * i + 1] = _mm512_and_si512(_mm512_srli_epi16(both, 4), nibble);
        }
      } else {
        for (int i = 0; i < 8; ++i) w[i] = _mm512_load_si512(codes + i * 64);
      }
      for (int t = 0; t < Tokens; ++t) {
        const __m512i sums = _mm512_set1_epi32(x->sums[t]);
        __m512i sum = zeros ? _mm512_mullo_epi32(zero, sums) : sums;
        if (Exact) sum = _mm512_add_epi32(sum, _mm512_slli_epi32(dot(_mm512_setzero_si512(), w, x->values[t]), 8));
        sum = dot(sum, w, Exact ? x->low(t) : x->values[t]);
        const __m512 step = _mm512_mul_ps(scale, _mm512_set1_ps(x->scales[t]));
        total[t] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(sum), step, total[t]);
      }
    }
  }
  for (int t = 0; t < Tokens; ++t) _mm512_storeu_ps(out + t * kRows, total[t]);
}

}  // namespace quantkit
