// Memory for the activations of one product, in the order in which tiles read them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <new>

#include "activations.h"
#include "layout.h"

// The inner loop, one band of 16 rows times some tokens, has a file for each instruction set.
#if defined(QUANTKIT_PORTABLE)
#include "tile_portable.h"
#elif defined(__AVX512VNNI__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "tile_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "tile_avx2.h"
#elif defined(__aarch64__) && defined(__ARM_NEON) && !defined(__ARM_BIG_ENDIAN)
#include "tile_neon.h"
#else
#include "tile_portable.h"
#endif

namespace quantkit {

// The tokens of one tile: the first of them and how many. From the first token on tiles have as many as they can
// take, and the rest goes into tiles of powers of two.
struct TileTokens {
  int64_t first;
  int64_t count;
};

inline TileTokens tile_tokens(int64_t token, int64_t tokens) {
  const int64_t whole = tokens / kTokens * kTokens;
  if (token < whole) return {token / kTokens * kTokens, kTokens};
  int64_t first = whole, count = kTokens;
  for (int64_t rest = tokens - whole;;) {
    while (count > rest) count /= 2;
    if (token < first + count) return {first, count};
    first += count;
    rest -= count;
  }
}

// What the sums of activations are multiplied by: the negative of the zero point that all codes have.
inline int32_t sum_factor(const Layout& at) {
  if (at.zeros() || at.in_blocks()) return 1;
  return at.bits == 8 && kSigned8 ? 0 : -at.fixed_zero();
}

class Workspace {
 public:
  Workspace(const Layout& at, int64_t tokens)
      : bits_(at.in_blocks() ? 8 : at.bits), exact_(at.exact), factor_(sum_factor(at)), tokens_(tokens),
        blocks_(at.blocks()), per_token_(kSums + kColumns * width_of(form_for(bits_, at.exact, 1))),
        memory_(new (std::align_val_t(kLine)) uint8_t[tokens * blocks_ * per_token_]) {}

  // Quantize some of a token's columns, from a block's first on.
  void quantize(const float* x, int64_t count, int64_t token, int64_t block) const {
    const TileTokens group = tile_tokens(token, tokens_);
    for (; count >= kColumns; count -= kColumns, x += kColumns) put(x, token, group, block++);
    if (count == 0) return;
    float rest[kColumns] = {};
    std::memcpy(rest, x, count * sizeof(float));
    put(rest, token, group, block);
  }

  // The records of the tile that begins with this token.
  const uint8_t* records(int64_t token) const { return memory_.get() + token * blocks_ * per_token_; }

 private:
  void put(const float* x, int64_t token, const TileTokens& group, int64_t block) const {
    const auto [first, count] = group;
    uint8_t* record = memory_.get() + (first * blocks_ + block * count) * per_token_;
    const int64_t index = token - first;
    const Form form = form_for(bits_, exact_, count);
    int32_t* sums = reinterpret_cast<int32_t*>(record) + index;
    const Destination to{form, sums, sums + count, reinterpret_cast<float*>(sums + 2 * count),
                         reinterpret_cast<int8_t*>(record) + count * kSums + index * kColumns * width_of(form)};
    exact_ ? quantize_block<true>(x, factor_, to) : quantize_block<false>(x, factor_, to);
  }

  static constexpr int64_t kSums = 12;  // bytes of a token's sums and scale
  struct Free {
    void operator()(uint8_t* memory) const { operator delete[](memory, std::align_val_t(kLine)); }
  };
  int64_t bits_;  // that the dot product multiplies
  bool exact_;
  int32_t factor_;
  int64_t tokens_, blocks_, per_token_;
  std::unique_ptr<uint8_t[], Free> memory_;
};

}  // namespace quantkit
