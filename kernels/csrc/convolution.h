// A causal convolution of each channel over the latest tokens of a sequence.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "vector_math.h"

namespace quantkit {

struct Convolution {
  const float* weight;  // [K, C], that of the latest token last
  const float* bias;    // [C]; null for none
  int64_t size, channels;  // K tokens, the own included; C

  int64_t earlier() const { return size - 1; }
};

// The output [C] of token `at` of a sequence. Its inputs are `step` apart; `state` has those of the tokens before them,
// [K - 1, C], null at the beginning of a sequence. Summed from the earliest token on, so that the result does not depend
// on how many tokens a call has.
inline void convolve_token(const Convolution& by, const float* inputs, int64_t step, int64_t at, const float* state,
                           float* y) {
  const int64_t channels = by.channels;
  std::fill(y, y + channels, 0.f);
  for (int64_t k = 0; k < by.size; ++k) {
    const int64_t token = at + k - by.earlier();
    if (token < 0 && !state) continue;
    const float* x = token < 0 ? state + (by.earlier() + token) * channels : inputs + token * step;
    const float* weight = by.weight + k * channels;
    for (int64_t c = 0; c < channels; ++c) y[c] += x[c] * weight[c];
  }
  if (by.bias)
    for (int64_t c = 0; c < channels; ++c) y[c] += by.bias[c];
}

// Replace a state by the inputs of the latest tokens, after `count` more; at the beginning of a sequence, `fresh`, those
// before them are zeros.
inline void keep_latest(const Convolution& by, const float* inputs, int64_t step, int64_t count, bool fresh,
                        float* state) {
  const int64_t bytes = by.channels * static_cast<int64_t>(sizeof(float));
  for (int64_t i = 0; i < by.earlier(); ++i) {
    const int64_t token = count - by.earlier() + i;
    float* to = state + i * by.channels;
    if (token >= 0)
      std::memcpy(to, inputs + token * step, bytes);
    else if (fresh)
      std::memset(to, 0, bytes);
    else  // an earlier one, which lies further on and is not yet replaced
      std::memcpy(to, state + (i + count) * by.channels, bytes);
  }
}

}  // namespace quantkit
