// AVX2: one vector is four columns of 8 rows.
#pragma once

#include <immintrin.h>

#include "activations.h"
#include "layout.h"

namespace quantkit {

constexpr const char* kInstructions = "avx2";
constexpr int kTokens = 4;  // that a tile takes at once
constexpr bool kWide8 = true;  // 8-bit codes take activations as 16-bit integers
constexpr int kHalf = 8;
constexpr int64_t kAhead = 2048;  // bytes

inline __m256 load_scales(const uint8_t* head, FloatType type, int64_t place) {
  if (type == FloatType::f32) return _mm256_load_ps(reinterpret_cast<const float*>(head) + place);
  const __m128i half = _mm_load_si128(reinterpret_cast<const __m128i*>(head + place * 2));
  if (type == FloatType::f16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

inline __m256i load_vector(const void* from) { return _mm256_load_si256(static_cast<const __m256i*>(from)); }

inline __m256i four_columns(const int8_t* x) {
  int32_t word;
  std::memcpy(&word, x, 4);
  return _mm256_set1_epi32(word);
}

// Keeps a sum in its register at this point: left to itself the compiler takes all the products
// first and adds them up in a tree, for which there are not registers enough.
inline void settle(__m256i& sum) { asm("" : "+x"(sum)); }

// Four 16-bit activations, the same in every 64 bits.
inline __m256i four_columns(const int16_t* x) {
  int64_t word;
  std::memcpy(&word, x, 8);
  return _mm256_set1_epi64x(word);
}

// Sums over a block for 8 rows of 4-bit codes. Codes below 16 times 127 add up to at most 30720 over
// the eight steps, so 16 bits hold them.
inline __m256i dot4(const __m256i* w, const int8_t* x) {
  __m256i sum = _mm256_maddubs_epi16(w[0], four_columns(x));
#pragma GCC unroll 8
  for (int i = 1; i < 8; ++i) {
    sum = _mm256_add_epi16(sum, _mm256_maddubs_epi16(w[i], four_columns(x + i * 4)));
    settle(sum);
  }
  return sum;
}

template <bool Exact>
inline __m256i dot4(const __m256i* w, const int8_t* high, const int8_t* low) {
  const __m256i ones = _mm256_set1_epi16(1);
  if (!Exact) return _mm256_madd_epi16(dot4(w, high), ones);
  const __m256i upper = _mm256_madd_epi16(dot4(w, high), _mm256_set1_epi16(256));
  return _mm256_add_epi32(upper, _mm256_madd_epi16(dot4(w, low), ones));
}

// Sums over a block for 8 rows of 8-bit codes, for each token: products of 16 bits, since eight
// bits times eight would not fit the 16 that AVX2 adds them up in.
template <int Tokens>
inline void dot8(const uint8_t* codes, const int16_t* x, int64_t stride, __m256i* sums) {
  const __m256i nothing = _mm256_setzero_si256();
  __m256i left[Tokens], right[Tokens];
  for (int t = 0; t < Tokens; ++t) left[t] = right[t] = nothing;
  asm volatile("" ::: "memory");  // or the activations of all steps are spread out beforehand
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m256i bytes = load_vector(codes + i * 64);
    const __m256i low = _mm256_unpacklo_epi8(bytes, nothing);    // rows 0 1 and 4 5
    const __m256i high = _mm256_unpackhi_epi8(bytes, nothing);  // rows 2 3 and 6 7
#pragma GCC unroll 4
    for (int t = 0; t < Tokens; ++t) {
      const __m256i four = four_columns(x + t * stride + i * 4);
      left[t] = _mm256_add_epi32(left[t], _mm256_madd_epi16(low, four));
      right[t] = _mm256_add_epi32(right[t], _mm256_madd_epi16(high, four));
      settle(left[t]);
      settle(right[t]);
    }
  }
  for (int t = 0; t < Tokens; ++t) sums[t] = _mm256_hadd_epi32(left[t], right[t]);
}

// out[t * 16 + r] = row r of the band times token t.
template <int Bits, bool Exact, int Tokens>
void tile(const Layout& at, const uint8_t* band, const Activations& x, int64_t token, float* out) {
  const __m256i nibble = _mm256_set1_epi8(15);
  __m256i zero[2] = {_mm256_set1_epi32(-at.fixed_zero()), _mm256_set1_epi32(-at.fixed_zero())};
  __m256 scale[2], total[Tokens][2];
  for (int t = 0; t < Tokens; ++t) total[t][0] = total[t][1] = _mm256_setzero_ps();
  const int64_t groups = at.groups(), per_group = at.blocks_per_group();
  const FloatType type = at.scales;
  const bool zeros = at.zeros;
  const int64_t together = at.together(), head_bytes = at.head_bytes();
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0, b = 0; g < groups; ++g) {
    const int64_t place = enter_group(g, together, head_bytes, codes, head);
    for (int h = 0; h < 2; ++h) {
      scale[h] = load_scales(head, type, place + h * kHalf);
      if (!zeros) continue;
      const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(head + kLine + place + h * kHalf));
      zero[h] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_cvtepu8_epi32(bytes));
    }
    for (const int64_t stop = b + per_group; b < stop; ++b, codes += kRows * kColumns * Bits / 8) {
      const int64_t block = token * x.blocks + b;
      if (Tokens > 1)  // the work on a block is long, and the processor looks ahead too little
        for (int i = 0; i < Bits; ++i)
          _mm_prefetch(reinterpret_cast<const char*>(codes + kAhead + i * 64), _MM_HINT_T0);
      for (int h = 0; h < 2; ++h) {
        __m256i sums[Tokens];
        if (Bits == 4) {
          __m256i w[8];
          for (int i = 0; i < 4; ++i) {
            const __m256i both = load_vector(codes + i * 64 + h * 32);
            w[2 * i] = _mm256_and_si256(both, nibble);
            w[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(both, 4), nibble);
          }
          for (int t = 0; t < Tokens; ++t) {
            const int64_t from = (block + t * x.blocks) * kColumns;
            sums[t] = dot4<Exact>(w, x.high + from, x.low + from);
          }
        } else {
          dot8<Tokens>(codes + h * 32, x.wide + block * kColumns, x.blocks * kColumns, sums);
        }
        for (int t = 0; t < Tokens; ++t) {
          const int64_t from = block + t * x.blocks;
          const __m256i offset = _mm256_mullo_epi32(zero[h], _mm256_set1_epi32(x.sums[from]));
          const __m256 step = _mm256_mul_ps(scale[h], _mm256_set1_ps(x.scales[from]));
          total[t][h] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_add_epi32(sums[t], offset)), step, total[t][h]);
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int h = 0; h < 2; ++h) _mm256_storeu_ps(out + t * kRows + h * kHalf, total[t][h]);
}

}  // namespace quantkit
