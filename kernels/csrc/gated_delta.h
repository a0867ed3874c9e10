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
  bool joined;  // whether the outputs of `in` have to be arranged, see `arrange_joined`

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

// The columns from `first` on, up to kStateColumns of them.
inline void delta_piece(const DeltaTokens& of, int64_t first, float* state) {
  const int64_t stop = std::min(first + kStateColumns, of.value_size);
  if (stop - first == kStateColumns) return delta_columns<4>(of, first, state);
  for (; first + kLanes <= stop; first += kLanes) delta_columns<1>(of, first, state);
  for (; first < stop; ++first) delta_column(of, first, state);
}

// Scale a vector to a length.
inline void scale_to(float length, float* x, int64_t size) {
  constexpr float kEps = 1e-6f;  // as in transformers
  const float factor = length / std::sqrt(dot(x, x, size) + kEps);
  for (int64_t i = 0; i < size; ++i) x[i] *= factor;
}

// Arrange a row of the outputs of Qwen3-Next's linears as `half.in` says: they have queries, keys, values and gates of
// each head of keys in turn, and then shares and rates of each.
inline void arrange_joined(const DeltaHalf& half, float* row, float* scratch) {
  const int64_t shared = half.heads / half.key_heads, key = half.key_size, value = shared * half.value_size;
  const int64_t width = half.in.rows(), values = half.values_width();
  std::memcpy(scratch, row, width * sizeof(float));
  float *queries = row, *keys = row + half.keys_width(), *of_values = keys + half.keys_width();
  float *gates = of_values + values, *shares = gates + values, *rates = shares + half.heads;
  const float *from = scratch, *rest = scratch + half.convolution.channels + values;
  const auto take = [](const float*& source, int64_t count, float*& to) {
    std::memcpy(to, source, count * sizeof(float));
    source += count;
    to += count;
  };
  for (int64_t h = 0; h < half.key_heads; ++h) {
    take(from, key, queries);
    take(from, key, keys);
    take(from, value, of_values);
    take(from, value, gates);
    take(rest, shared, shares);
    take(rest, shared, rates);
  }
}

// The half, x [rows, D] in place. Of each slot, `tails` [slots, K - 1, C] are the convolution's inputs of the latest
// tokens and `matrices` [slots, H, Dk, Dv] the state; null without a cache, where all sequences begin.
inline void run_gated_delta(const DeltaHalf& half, float* x, const Rows& at, float* tails, float* matrices,
                            bool prefill, int threads) {
  const int64_t rows = at.batch * at.tokens, hidden = half.in.columns(), width = half.in.rows(), heads = half.heads;
  const int64_t channels = half.convolution.channels, size = half.value_size, values = half.values_width();
  const std::vector<Sequence> sequences = sequences_of(at, matrices != nullptr, prefill);
  const Scratch projected(rows * width), read(rows * values);
  {
    const Scratch scratch(half.branch.input_norm ? rows * hidden : 0);
    const float* normed = branch_input(half.branch, x, rows, hidden, threads, scratch.get());
    project(half.in, normed, FloatType::f32, rows, threads, projected.get());
  }
  if (half.joined)
    each_row(rows, threads, [&](int64_t row) {
      const Scratch scratch(width);
      arrange_joined(half, projected.get() + row * width, scratch.get());
    });
  {
    const Scratch convolved(rows * channels), shares(rows * heads), decays(rows * heads);
    convolve_rows(half.convolution, sequences, projected.get(), width, rows, tails, threads, convolved.get());
    const float query_length = 1 / std::sqrt(static_cast<float>(half.key_size));
    each_row(rows, threads, [&](int64_t row) {
      float* queries = convolved.get() + row * channels;
      for (int64_t h = 0; h < half.key_heads; ++h) {
        scale_to(query_length, queries + h * half.key_size, half.key_size);
        scale_to(1, queries + half.keys_width() + h * half.key_size, half.key_size);
      }
      const float *share = projected.get() + row * width + channels + values, *rate = share + heads;
      for (int64_t h = 0; h < heads; ++h) {
        shares[row * heads + h] = 1 / (1 + std::exp(-share[h]));
        decays[row * heads + h] = std::exp(half.decay[h] * softplus(rate[h] + half.rate_bias[h]));
      }
    });
    const auto run_columns = [&](const Sequence& sequence, int64_t head, int64_t first, float* state) {
      const int64_t row = sequence.rows.first, key_head = head / (heads / half.key_heads);
      const float* tokens = convolved.get() + row * channels;
      const float* queries = tokens + key_head * half.key_size;
      delta_piece({queries, queries + half.keys_width(), tokens + 2 * half.keys_width() + head * size,
                   shares.get() + row * heads + head, decays.get() + row * heads + head, sequence.rows.count, channels,
                   heads, half.key_size, size, read.get() + row * values + head * size, values},
                  first, state);
    };
    each_state(sequences, heads, half.key_size, size, matrices, threads, run_columns);
  }
  keep_tails(half.convolution, sequences, projected.get(), width, tails);
  each_row(rows, threads, [&](int64_t row) {
    const float* gate = projected.get() + row * width + channels;
    float* out = read.get() + row * values;
    for (int64_t h = 0; h < heads; ++h) rms_norm(out + h * size, half.norm, size, half.branch.eps, out + h * size);
    for (int64_t i = 0; i < values; ++i) out[i] *= gate[i] / (1 + exponential(-gate[i]));
  });
  add_product(half.branch, half.out, read.get(), rows, threads, x);
}

}  // namespace quantkit
