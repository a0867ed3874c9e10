// ARM NEON, with its dot products where the processor has them: one vector is four columns of 4 rows.
#pragma once

#include <arm_neon.h>

#include "activations.h"
#include "layout.h"

namespace quantkit {

#if defined(__ARM_FEATURE_DOTPROD)
constexpr const char* kInstructions = "neon-dotprod";
constexpr bool kWhole8 = false;
#else
constexpr const char* kInstructions = "neon";
constexpr bool kWhole8 = true;  // 8-bit codes take activations as 16-bit integers
#endif
constexpr int kTokens = 4;  // that a tile takes at once
constexpr int kBands = 1;   // the same
constexpr bool kSigned8 = true;  // codes of 8 bits are made signed
constexpr int kQuarter = 4;
constexpr int64_t kAhead = 2048;  // bytes

constexpr Form form_for(int64_t bits, bool exact, int64_t) {
  if (bits == 8 && kWhole8) return Form::whole;
  return exact ? Form::halves : Form::bytes;
}

inline float32x4_t load_scales(const uint8_t* head, FloatType type, int64_t offset) {
  if (type == FloatType::f32) return vld1q_f32(reinterpret_cast<const float*>(head) + offset);
  const uint16x4_t half = vld1_u16(reinterpret_cast<const uint16_t*>(head) + offset);
  if (type == FloatType::f16) return vcvt_f32_f16(vreinterpret_f16_u16(half));
  return vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(half), 16));
}

inline int32x4_t load_zeros(const uint8_t* from) {
  uint32_t four;
  std::memcpy(&four, from, 4);
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}

// Sums over the lines of a block, 4 or 8, for 4 rows.
#if defined(__ARM_FEATURE_DOTPROD)
template <int Lines>
inline int32x4_t dot(const int8x16_t* w, const int8_t* x) {
  int32x4_t sum = vdupq_n_s32(0);
  for (int half = 0; half < Lines / 4; ++half, w += 4) {
    const int8x16_t columns = vld1q_s8(x + half * 16);
    sum = vdotq_laneq_s32(sum, w[0], columns, 0);
    sum = vdotq_laneq_s32(sum, w[1], columns, 1);
    sum = vdotq_laneq_s32(sum, w[2], columns, 2);
    sum = vdotq_laneq_s32(sum, w[3], columns, 3);
  }
  return sum;
}
#else
// Of 4-bit codes: below 16 times at most 128 they add up to at most 15360 over the eight steps, so 16
// bits hold them.
template <int Lines>
inline int32x4_t dot(const int8x16_t* w, const int8_t* x) {
  int16x8_t left = vdupq_n_s16(0), right = left;  // rows 0 1 and 2 3
  for (int i = 0; i < Lines; ++i) {
    int32_t word;
    std::memcpy(&word, x + i * 4, 4);
    const int8x16_t four = vreinterpretq_s8_s32(vdupq_n_s32(word));
    left = vmlal_s8(left, vget_low_s8(w[i]), vget_low_s8(four));
    right = vmlal_high_s8(right, w[i], four);
  }
  return vpaddq_s32(vpaddlq_s16(left), vpaddlq_s16(right));
}
#endif

// The same with activations of 16 bits.
template <int Lines>
inline int32x4_t dot(const int8x16_t* w, const int16_t* x) {
  int32x4_t rows[4] = {};
  for (int i = 0; i < Lines; ++i) {
    const int16x4_t four = vld1_s16(x + i * 4);
    const int16x8_t left = vmovl_s8(vget_low_s8(w[i])), right = vmovl_high_s8(w[i]);
    rows[0] = vmlal_s16(rows[0], vget_low_s16(left), four);
    rows[1] = vmlal_s16(rows[1], vget_high_s16(left), four);
    rows[2] = vmlal_s16(rows[2], vget_low_s16(right), four);
    rows[3] = vmlal_s16(rows[3], vget_high_s16(right), four);
  }
  return vpaddq_s32(vpaddq_s32(rows[0], rows[1]), vpaddq_s32(rows[2], rows[3]));
}

template <int Lines = 8, Form Of, int Tokens>
inline int32x4_t dot(const int8x16_t* w, const Record<Of, Tokens>& x, int token, int column = 0) {
  if constexpr (Of == Form::whole) return dot<Lines>(w, x.whole(token) + column);
  const int32x4_t sum = dot<Lines>(w, x.values[token] + column);
  return Of == Form::halves ? vaddq_s32(dot<Lines>(w, x.low(token) + column), vshlq_n_s32(sum, 8)) : sum;
}

// out[t * 16 + r] = row r of the band times token t.
template <int Bits, bool Exact, int Tokens, int Bands>
void tile(const Layout& at, const uint8_t* band, const Record<form_for(Bits, Exact, Tokens), Tokens>* x, float* out,
          int64_t) {
  constexpr int kParts = kRows / kQuarter;
  const uint8x16_t nibble = vdupq_n_u8(15), sign = vdupq_n_u8(128);
  const int32x4_t less = vdupq_n_s32(Bits == 8 ? 128 : 0);
  int32x4_t zero[kParts] = {};
  float32x4_t scale[kParts], total[Tokens][kParts];
  for (int t = 0; t < Tokens; ++t)
    for (int q = 0; q < kParts; ++q) total[t][q] = vdupq_n_f32(0);
  const int64_t groups = at.groups(), per_group = at.blocks_per_group();
  const FloatType type = at.scales;
  const bool zeros = at.zeros();
  const int64_t per_line = at.groups_per_line(), head_bytes = at.head_bytes();
  const uint8_t *codes = band, *head = band;
  for (int64_t g = 0; g < groups; ++g) {
    const int64_t offset = enter_group(g, per_line, head_bytes, codes, head);
    for (int q = 0; q < kParts; ++q) {
      scale[q] = load_scales(head, type, offset + q * kQuarter);
      if (zeros) zero[q] = vsubq_s32(less, load_zeros(head + kLine + offset + q * kQuarter));
    }
    for (int64_t b = 0; b < per_group; ++b, ++x, codes += kRows * kColumns * Bits / 8) {
      if (Tokens > 1)  // the work on a block is long, and the processor looks ahead too little
        for (int i = 0; i < Bits; ++i) __builtin_prefetch(codes + kAhead + i * 64);
      for (int q = 0; q < kParts; ++q) {
        int8x16_t w[8];
        for (int i = 0; i < Bits; ++i) {
          const uint8x16_t line = vld1q_u8(codes + i * 64 + q * 16);
          if (Bits == 4) {
            w[2 * i] = vreinterpretq_s8_u8(vandq_u8(line, nibble));
            w[2 * i + 1] = vreinterpretq_s8_u8(vshrq_n_u8(line, 4));
          } else {
            w[i] = vreinterpretq_s8_u8(veorq_u8(line, sign));
          }
        }
        for (int t = 0; t < Tokens; ++t) {
          const int32x4_t sum = dot(w, *x, t), of_x = vdupq_n_s32(x->sums[t]);
          const float32x4_t whole = vcvtq_f32_s32(zeros ? vmlaq_s32(sum, zero[q], of_x) : vaddq_s32(sum, of_x));
          total[t][q] = vfmaq_f32(total[t][q], whole, vmulq_n_f32(scale[q], x->scales[t]));
        }
      }
    }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int q = 0; q < kParts; ++q) vst1q_f32(out + t * kRows + q * kQuarter, total[t][q]);
}

// Bytes of 4 rows as floats, or some bits of them.
inline float32x4_t load_inner(const uint8_t* from, int shift, int mask) {
  uint32_t four;
  std::memcpy(&four, from, 4);
  const int32x4_t bytes = vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8(four))));
  return vcvtq_f32_s32(vandq_s32(vshlq_s32(bytes, vdupq_n_s32(-shift)), vdupq_n_s32(mask)));
}

// `tile` of weights in blocks. Codes of 8 bits, and those of a table, are made signed.
template <bool Exact, bool Halved, int Tokens, int Bands>
void block_tile(const Layout& at, const uint8_t* band, const Record<form_for(8, Exact, Tokens), Tokens>* x, float* out,
                int64_t) {
  constexpr int kHalves = Halved ? 2 : 1, kLines = 8 / kHalves, kQuarters = kRows / kQuarter;
  const int64_t table = at.table();
  const bool minima = at.minima(), is_signed = table || at.bits == 8;
  const uint8x16_t sign = vdupq_n_u8(is_signed ? 128 : 0);
  const int32_t zero = at.fixed_zero() - (is_signed ? 128 : 0);
  float32x4_t total[Tokens][kQuarters];
  for (int t = 0; t < Tokens; ++t)
    for (int q = 0; q < kQuarters; ++q) total[t][q] = vdupq_n_f32(0);
  Heads heads(at);
  const uint8_t* codes = band;
  for (int64_t b = at.blocks(); b > 0; --b, ++x, codes += at.block_bytes()) {
    heads.next(codes);
    if (Tokens > 1)  // the work on a block is long, and the processor looks ahead too little
      for (int64_t i = 0; i < at.bits; ++i) __builtin_prefetch(codes + kAhead + i * 64);
    Codes block;
    unpack_block(at.bits, table, codes, block);
    for (int q = 0; q < kQuarters; ++q)
      for (int p = 0; p < kHalves; ++p) {
        float32x4_t scale, minimum = vdupq_n_f32(0);
        if (at.nested) {
          const uint8_t* inner = heads.inner(p) + q * kQuarter;
          scale = vmulq_f32(load_scales(heads.head, at.scales, q * kQuarter), load_inner(inner, 0, at.inner_mask()));
          if (minima)
            minimum = vmulq_f32(load_scales(heads.head, at.scales, kRows + q * kQuarter),
                                load_inner(inner + at.minima_at(), at.minima_shift(), at.inner_mask()));
        } else {
          scale = load_scales(heads.head, at.scales, heads.offset + q * kQuarter);
          if (minima) minimum = load_scales(heads.head + kLine, at.scales, heads.offset + q * kQuarter);
        }
        int8x16_t w[kLines];
        for (int i = 0; i < kLines; ++i) {
          const uint8x16_t line = vld1q_u8(block.bytes() + (p * kLines + i) * kLine + q * 16);
          w[i] = vreinterpretq_s8_u8(veorq_u8(line, sign));
        }
        for (int t = 0; t < Tokens; ++t) {
          const int32_t of_x = x->template sum<kHalves>(t, p);
          const int32x4_t sum = vsubq_s32(dot<kLines>(w, *x, t, p * kLines * 4), vdupq_n_s32(zero * of_x));
          total[t][q] = vfmaq_f32(total[t][q], vcvtq_f32_s32(sum), vmulq_n_f32(scale, x->scales[t]));
          if (minima) total[t][q] = vfmsq_f32(total[t][q], minimum, vdupq_n_f32(of_x * x->scales[t]));
        }
      }
  }
  for (int t = 0; t < Tokens; ++t)
    for (int q = 0; q < kQuarters; ++q) vst1q_f32(out + t * kRows + q * kQuarter, total[t][q]);
}

}  // namespace quantkit
