// A short convolution between two gates as the first half of a decoder block (LFM2, 2511.23404).
#pragma once

#include <cstdint>
#include <vector>

#include "branch.h"
#include "convolution.h"
#include "matmul.h"
#include "states.h"

namespace quantkit {

struct ShortConvHalf {
  Branch branch;
  Projection in;  // [3 D]: the gates before and after the convolution, and its values
  Convolution convolution;
  Linear out;
};

// The half, x [rows, D] in place. `states` [slots, K - 1, D] are the convolution's inputs of the latest tokens; null
// without a cache, where all sequences begin.
inline void run_short_conv(const ShortConvHalf& half, float* x, const Rows& at, float* states, bool prefill,
                           int threads) {
  const int64_t rows = at.batch * at.tokens, hidden = half.convolution.channels, width = half.in.rows();
  const std::vector<Sequence> sequences = sequences_of(at, states != nullptr, prefill);
  const Scratch projected(rows * width), inputs(rows * hidden), mixed(rows * hidden);
  {
    const Scratch scratch(half.branch.input_norm ? rows * hidden : 0);
    const float* normed = branch_input(half.branch, x, rows, hidden, threads, scratch.get());
    project(half.in, normed, FloatType::f32, rows, threads, projected.get());
  }
  each_row(rows, threads, [&](int64_t row) {
    const float *gate = projected.get() + row * width, *values = gate + 2 * hidden;
    float* input = inputs.get() + row * hidden;
    for (int64_t c = 0; c < hidden; ++c) input[c] = gate[c] * values[c];
  });
  const int64_t state_size = half.convolution.earlier() * hidden;
  each_token(sequences, rows, threads, [&](const Sequence& sequence, int64_t token, int64_t row) {
    const float* state = sequence.fresh ? nullptr : states + sequence.place * state_size;
    float* out = mixed.get() + row * hidden;
    convolve_token(half.convolution, inputs.get() + sequence.rows.first * hidden, hidden, token, state, out);
    const float* gate = projected.get() + row * width + hidden;
    for (int64_t c = 0; c < hidden; ++c) out[c] *= gate[c];
  });
  keep_tails(half.convolution, sequences, inputs.get(), hidden, states);
  add_product(half.branch, half.out, mixed.get(), rows, threads, x);
}

}  // namespace quantkit
