// Mamba-2 (2405.21060) as the first half of a decoder block, as in Granite 4.
//
// A sequence's state is a matrix S [N, P] for each head. Token by token it decays, takes up a value at the places that a
// key says, and is read by a query; the heads of a group share keys and queries:
//     S <- decay S + k (step v),  read = q S + skip v
// The columns of S do not depend on each other, so threads share them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "branch.h"
#include "convolution.h"
#include "matmul.h"
#include "states.h"
#include "vector_math.h"

namespace quantkit {

struct Mamba2Half {
  Branch branch;
  Projection in;  // [H P + C + H]: gates, inputs of the convolution, and of each head its step
  Convolution convolution;                // of values, keys and queries
  const float *step_bias, *decay, *skip;  // [H]; `decay` is the logarithm of decay for a step of 1
  float step_low, step_high;              // which steps are clamped to
  const float* norm;                      // [H P], of each group's heads together
  Linear out;
  int64_t heads, groups, head_size, state_size;  // H, G, P, N

  int64_t inner() const { return heads * head_size; }
};

// What the recurrence takes of the tokens of one sequence and one head: rows of queries, keys and values are `step`
// apart, steps and decays `heads`.
struct Mamba2Tokens {
  const float *queries, *keys, *values, *steps, *decays;
  int64_t count, step, heads, head_size, state_size;
  float skip;
  float* read;  // rows are `read_step` apart
  int64_t read_step;
};

// One column, of the state from `state` on: the same as for vectors of columns.
inline void mamba2_column(const Mamba2Tokens& of, int64_t column, float* state) {
  for (int64_t t = 0; t < of.count; ++t) {
    const float *query = of.queries + t * of.step, *key = of.keys + t * of.step;
    const float decay = of.decays[t * of.heads], value = of.values[t * of.step + column];
    const float added = of.steps[t * of.heads] * value;
    float sum = 0;
    for (int64_t i = 0; i < of.state_size; ++i) {
      float& cell = state[i * of.head_size + column];
      cell = decay * cell + key[i] * added;
      sum += query[i] * cell;
    }
    of.read[t * of.read_step + column] = sum + of.skip * value;
  }
}

// Some vectors of columns.
template <int Vectors>
inline void mamba2_columns(const Mamba2Tokens& of, int64_t column, float* state) {
  for (int64_t t = 0; t < of.count; ++t) {
    const float *query = of.queries + t * of.step, *key = of.keys + t * of.step;
    const float decay = of.decays[t * of.heads], step = of.steps[t * of.heads];
    Vector value[Vectors], added[Vectors], sum[Vectors] = {};
    for (int v = 0; v < Vectors; ++v) {
      value[v] = load(of.values + t * of.step + column + v * kLanes);
      added[v] = step * value[v];
    }
    for (int64_t i = 0; i < of.state_size; ++i) {
      float* cells = state + i * of.head_size + column;
      for (int v = 0; v < Vectors; ++v) {
        const Vector cell = decay * load(cells + v * kLanes) + key[i] * added[v];
        store(cell, cells + v * kLanes);
        sum[v] += query[i] * cell;
      }
    }
    for (int v = 0; v < Vectors; ++v)
      store(sum[v] + of.skip * value[v], of.read + t * of.read_step + column + v * kLanes);
  }
}

// The columns from `first` on, up to kStateColumns of them.
inline void mamba2_piece(const Mamba2Tokens& of, int64_t first, float* state) {
  const int64_t stop = std::min(first + kStateColumns, of.head_size);
  if (stop - first == kStateColumns) return mamba2_columns<4>(of, first, state);
  for (; first + kLanes <= stop; first += kLanes) mamba2_columns<1>(of, first, state);
  for (; first < stop; ++first) mamba2_column(of, first, state);
}

// The half, x [rows, D] in place; states as those of `run_gated_delta`, with matrices [slots, H, N, P].
inline void run_mamba2(const Mamba2Half& half, float* x, const Rows& at, float* tails, float* matrices, bool prefill,
                       int threads) {
  const int64_t rows = at.batch * at.tokens, hidden = half.in.columns(), width = half.in.rows(), heads = half.heads;
  const int64_t channels = half.convolution.channels, size = half.head_size, inner = half.inner();
  const int64_t group_width = half.groups * half.state_size;
  const std::vector<Sequence> sequences = sequences_of(at, matrices != nullptr, prefill);
  const Scratch projected(rows * width), read(rows * inner);
  {
    const Scratch scratch(half.branch.input_norm ? rows * hidden : 0);
    const float* normed = branch_input(half.branch, x, rows, hidden, threads, scratch.get());
    project(half.in, normed, FloatType::f32, rows, threads, projected.get());
  }
  {
    const Scratch convolved(rows * channels), steps(rows * heads), decays(rows * heads);
    convolve_rows(half.convolution, sequences, projected.get() + inner, width, rows, tails, threads, convolved.get());
    each_row(rows, threads, [&](int64_t row) {
      const float* raw = projected.get() + row * width + inner + channels;
      for (int64_t h = 0; h < heads; ++h) {
        const float step = limited(softplus(raw[h] + half.step_bias[h]), half.step_low, half.step_high);
        steps[row * heads + h] = step;
        decays[row * heads + h] = std::exp(half.decay[h] * step);
      }
    });
    const auto run_columns = [&](const Sequence& sequence, int64_t head, int64_t first, float* state) {
      const int64_t row = sequence.rows.first, group = head / (heads / half.groups);
      const float* tokens = convolved.get() + row * channels;
      const float* keys = tokens + inner + group * half.state_size;
      mamba2_piece({keys + group_width, keys, tokens + head * size, steps.get() + row * heads + head,
                    decays.get() + row * heads + head, sequence.rows.count, channels, heads, size, half.state_size,
                    half.skip[head], read.get() + row * inner + head * size, inner},
                   first, state);
    };
    each_state(sequences, heads, half.state_size, size, matrices, threads, run_columns);
  }
  keep_tails(half.convolution, sequences, projected.get() + inner, width, tails);
  const int64_t group_size = inner / half.groups;
  each_row(rows, threads, [&](int64_t row) {
    const float* gate = projected.get() + row * width;
    float* out = read.get() + row * inner;
    for (int64_t i = 0; i < inner; ++i) out[i] *= gate[i] / (1 + exponential(-gate[i]));
    for (int64_t from = 0; from < inner; from += group_size)
      rms_norm(out + from, half.norm + from, group_size, half.branch.eps, out + from);
  });
  add_product(half.branch, half.out, read.get(), rows, threads, x);
}

}  // namespace quantkit
