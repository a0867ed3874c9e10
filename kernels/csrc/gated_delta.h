// The gated delta rule (2412.06464) as the first half of a decoder block, as in Qwen3.5.
//
// A sequence's state is a matrix S [Dk, Dv] for each head of values. Token by token it decays, takes up what its key does
// not yet read, and is read by the query:
//     S <- decay S,  d = share (v - k S),  S <- S + k d,  read = q S
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

struct DeltaHalf {
  Branch branch;
  Projection in;  // [C + H Dv + H + H]: inputs of the convolution, gates, and of each head its share and its rate
  Convolution convolution;          // of queries, keys and values
  const float *rate_bias, *decay;   // [H]; a rate's logarithm of decay is `decay` times its softplus
  const float* norm;                // [Dv], of what is read of each head
  Linear out;
  int64_t key_heads, heads, key_size, value_size;  // H of values, Dk, Dv

  int64_t keys_width() const { return key_heads * key_size; }
  int64_t values_width() const { return heads * value_size; }
};

// What the rule takes of the tokens of one sequence and one head: rows of queries, keys and values are `step` apart,
// shares and decays `heads`.
struct DeltaTokens {
  const float *queries, *keys, *values, *shares, *decays;
  int64_t count, step, heads, key_size, value_size;
  float* read;  // rows are `read_step` apart
  int64_t read_step;
};

// One column, of the state from `state` on: the same as for vectors of columns.
inline void delta_column(const DeltaTokens& of, int64_t column, float* state) {
  const int64_t size = of.key_size;
  float update = 0;
  const float* written = of.keys;
  for (int64_t t = 0; t < of.count; ++t) {
    const float *query = of.queries + t * of.step, *key = of.keys + t * of.step;
    const float decay = of.decays[t * of.heads];
    float by_key = 0, by_query = 0;
    for (int64_t i = 0; i < size; ++i) {
      float& cell = state[i * of.value_size + column];
      cell = (cell + written[i] * update) * decay;
      by_key += key[i] * cell;
      by_query += query[i] * cell;
    }
    update = of.shares[t * of.heads] * (of.values[t * of.step + column] - by_key);
    of.read[t * of.read_step + column] = by_query + dot(query, key, size) * update;
    written = key;
  }
  for (int64_t i = 0; i < size; ++i) state[i * of.value_size + column] += written[i] * update;
}

// Some vectors of columns. The update of a token is written when the next one decays the state, so that each token reads
// and writes the state once.
template <int Vectors>
inline void delta_columns(const DeltaTokens& of, int64_t column, float* state) {
  const int64_t size = of.key_size;
  Vector update[Vectors] = {};
  const float* written = of.keys;
  for (int64_t t = 0; t < of.count; ++t) {
    const float *query = of.queries + t * of.step, *key = of.keys + t * of.step;
    const float decay = of.decays[t * of.heads];
    Vector by_key[Vectors] = {}, by_query[Vectors] = {};
    for (int64_t i = 0; i < size; ++i) {
      float* cells = state + i * of.value_size + column;
      for (int v = 0; v < Vectors; ++v) {
        const Vector cell = (load(cells + v * kLanes) + written[i] * update[v]) * decay;
        store(cell, cells + v * kLanes);
        by_key[v] += key[i] * cell;
        by_query[v] += query[i] * cell;
      }
    }
    const float overlap = dot(query, key, size), share = of.shares[t * of.heads];
    for (int v = 0; v < Vectors; ++v) {
      update[v] = share * (load(of.values + t * of.step + column + v * kLanes) - by_key[v]);
      store(by_query[v] + overlap * update[v], of.read + t * of.read_step + column + v * kLanes);
    }
    written = key;
  }
  for (int64_t i = 0; i < size; ++i) {
    float* cells = state + i * of.value_size + column;
    for (int v = 0; v < Vectors; ++v) store(load(cells + v * kLanes) + written[i] * update[v], cells + v * kLanes);
  }
}

constexpr int64_t kDeltaColumns = 4 * kLanes;  // that one piece of work has

// The columns from `first` on, up to kDeltaColumns of them.
inline void delta_piece(const DeltaTokens& of, int64_t first, float* state) {
  const int64_t stop = std::min(first + kDeltaColumns, of.value_size);
  if (stop - first == kDeltaColumns) return delta_columns<4>(of, first, state);
  for (; first + kLanes <= stop; first += kLanes) delta_columns<1>(of, first, state);
  for (; first < stop; ++first) delta_column(of, first, state);
}

// ln(1 + e^x).
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Scale a vector to a length.
inline void scale_to(float length, float* x, int64_t size) {
  constexpr float kEps = 1e-6f;  // as in transformers
  const float factor = length / std::sqrt(dot(x, x, size) + kEps);
  for (int64_t i = 0; i < size; ++i) x[i] *= factor;
}

// Queries, keys and values [rows, C] of the outputs of `half.in`, and shares and decays [rows, H].
inline void prepare_delta(const DeltaHalf& half, const std::vector<Sequence>& sequences, const float* projected,
                          int64_t rows, const float* states, int threads, float* convolved, float* shares,
                          float* decays) {
  const int64_t width = half.in.rows(), channels = half.convolution.channels, heads = half.heads;
  const int64_t state_size = half.convolution.earlier() * channels, size = half.key_size;
  const float query_length = 1 / std::sqrt(static_cast<float>(size));
  each_token(sequences, rows, threads, [&](const Sequence& sequence, int64_t token, int64_t row) {
    const float* state = sequence.fresh ? nullptr : states + sequence.place * state_size;
    float* out = convolved + row * channels;
    convolve_token(half.convolution, projected + sequence.rows.first * width, width, token, state, out);
    for (int64_t c = 0; c < channels; ++c) out[c] = out[c] / (1 + exponential(-out[c]));
    for (int64_t h = 0; h < half.key_heads; ++h) {
      scale_to(query_length, out + h * size, size);
      scale_to(1, out + half.keys_width() + h * size, size);
    }
    const float *share = projected + row * width + channels + half.values_width(), *rate = share + heads;
    for (int64_t h = 0; h < heads; ++h) {
      shares[row * heads + h] = 1 / (1 + std::exp(-share[h]));
      decays[row * heads + h] = std::exp(half.decay[h] * softplus(rate[h] + half.rate_bias[h]));
    }
  });
}

// The half, x [rows, D] in place. Of each slot, `tails` [slots, K - 1, C] are the convolution's inputs of the latest
// tokens and `matrices` [slots, H, Dk, Dv] the state; null without a cache, where all sequences begin.
inline void run_gated_delta(const DeltaHalf& half, float* x, const Rows& at, float* tails, float* matrices,
                            bool prefill, int threads) {
  const int64_t rows = at.batch * at.tokens, hidden = half.in.columns(), width = half.in.rows(), heads = half.heads;
  const int64_t channels = half.convolution.channels, size = half.value_size, values = half.values_width();
  const int64_t matrix = half.key_size * size;
  const std::vector<Sequence> sequences = sequences_of(at, matrices != nullptr, prefill);
  const int64_t count = static_cast<int64_t>(sequences.size());
  const Scratch projected(rows * width), read(rows * values);
  {
    const Scratch scratch(half.branch.input_norm ? rows * hidden : 0);
    const float* normed = branch_input(half.branch, x, rows, hidden, threads, scratch.get());
    project(half.in, normed, FloatType::f32, rows, threads, projected.get());
  }
  {
    const Scratch convolved(rows * channels), shares(rows * heads), decays(rows * heads);
    prepare_delta(half, sequences, projected.get(), rows, tails, threads, convolved.get(), shares.get(), decays.get());
    const Scratch own(matrices ? 0 : count * heads * matrix);
    float* states = matrices ? matrices : own.get();
    const int64_t pieces = (size + kDeltaColumns - 1) / kDeltaColumns;
    Pool::instance().parallel_for(count * heads * pieces, 1, threads, [&](int64_t piece) {
      const Sequence& sequence = sequences[piece / (heads * pieces)];
      const int64_t head = piece / pieces % heads, first = piece % pieces * kDeltaColumns;
      float* state = states + (sequence.place * heads + head) * matrix;
      const int64_t columns = std::min(kDeltaColumns, size - first);
      if (sequence.fresh)
        for (int64_t i = 0; i < half.key_size; ++i)
          std::memset(state + i * size + first, 0, columns * sizeof(float));
      const int64_t row = sequence.rows.first, key_head = head / (heads / half.key_heads);
      const float* queries = convolved.get() + row * channels + key_head * half.key_size;
      const DeltaTokens tokens{queries,
                               queries + half.keys_width(),
                               convolved.get() + row * channels + 2 * half.keys_width() + head * size,
                               shares.get() + row * heads + head,
                               decays.get() + row * heads + head,
                               sequence.rows.count,
                               channels,
                               heads,
                               half.key_size,
                               size,
                               read.get() + row * values + head * size,
                               values};
      delta_piece(tokens, first, state);
    });
  }
  if (tails)
    for (const Sequence& sequence : sequences)
      keep_latest(half.convolution, projected.get() + sequence.rows.first * width, width, sequence.rows.count,
                  sequence.fresh, tails + sequence.place * half.convolution.earlier() * channels);
  each_row(rows, threads, [&](int64_t row) {
    const float* gate = projected.get() + row * width + channels;
    float* out = read.get() + row * values;
    for (int64_t h = 0; h < heads; ++h) rms_norm(out + h * size, half.norm, size, half.branch.eps, out + h * size);
    for (int64_t i = 0; i < values; ++i) out[i] *= gate[i] / (1 + exponential(-gate[i]));
  });
  add_product(half.branch, half.out, read.get(), rows, threads, x);
}

}  // namespace quantkit
