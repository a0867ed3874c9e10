// The states of a layer that mixes tokens by a recurrence, in the slots of its sequences.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#include "attention.h"
#include "block_attention.h"
#include "convolution.h"
#include "scratch.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

// Sequences of a step, with the place of each one's states and whether it begins there: what the place holds counts as
// zeros then.
struct Sequence {
  Run rows;
  int64_t place;
  bool fresh;
};

// The sequences of a step's rows. Without a cache each has a place of its own.
inline std::vector<Sequence> sequences_of(const Rows& at, bool cached, bool prefill) {
  std::vector<Sequence> sequences;
  for (const Run& run : runs_of(at.slots, at.positions, at.batch, at.tokens)) {
    const int64_t place = cached ? run.slot : static_cast<int64_t>(sequences.size());
    sequences.push_back({run, place, prefill || at.positions[run.first] == 0});
  }
  return sequences;
}

constexpr int64_t kStateColumns = 4 * kLanes;  // of a matrix that one piece of work has

// ln(1 + e^x).
inline float softplus(float x) { return x > 20 ? x : std::log1p(std::exp(x)); }

// Call work(sequence, token, row) for each row of all sequences, on several threads where they are many.
template <class Work>
void each_token(const std::vector<Sequence>& sequences, int64_t rows, int threads, const Work& work) {
  std::vector<const Sequence*> of(rows);
  for (const Sequence& sequence : sequences)
    for (int64_t t = 0; t < sequence.rows.count; ++t) of[sequence.rows.first + t] = &sequence;
  each_row(rows, threads, [&](int64_t row) { work(*of[row], row - of[row]->rows.first, row); });
}

// Convolve the inputs of all rows, `step` apart, to y [rows, C] with SiLU; `tails` [slots, K - 1, C] are the inputs of the
// latest tokens, null without a cache.
inline void convolve_rows(const Convolution& by, const std::vector<Sequence>& sequences, const float* inputs,
                          int64_t step, int64_t rows, const float* tails, int threads, float* y) {
  const int64_t channels = by.channels;
  each_token(sequences, rows, threads, [&](const Sequence& sequence, int64_t token, int64_t row) {
    const float* tail = sequence.fresh ? nullptr : tails + sequence.place * by.earlier() * channels;
    float* out = y + row * channels;
    convolve_token(by, inputs + sequence.rows.first * step, step, token, tail, out);
    for (int64_t c = 0; c < channels; ++c) out[c] = out[c] / (1 + exponential(-out[c]));
  });
}

// Replace the tails by the inputs of the latest tokens; does nothing without a cache.
inline void keep_tails(const Convolution& by, const std::vector<Sequence>& sequences, const float* inputs, int64_t step,
                       float* tails) {
  if (!tails) return;
  for (const Sequence& sequence : sequences)
    keep_latest(by, inputs + sequence.rows.first * step, step, sequence.rows.count, sequence.fresh,
                tails + sequence.place * by.earlier() * by.channels);
}

// Call work(sequence, head, first column, state) for pieces of kStateColumns columns of all heads' states
// [state_size, head_size], on some threads; states of a sequence that begins are zeros. `matrices`
// [slots, heads, state_size, head_size] are null without a cache.
template <class Work>
void each_state(const std::vector<Sequence>& sequences, int64_t heads, int64_t state_size, int64_t head_size,
                float* matrices, int threads, const Work& work) {
  const int64_t count = static_cast<int64_t>(sequences.size()), matrix = state_size * head_size;
  const Scratch own(matrices ? 0 : count * heads * matrix);
  float* states = matrices ? matrices : own.get();
  const int64_t pieces = (head_size + kStateColumns - 1) / kStateColumns;
  Pool::instance().parallel_for(count * heads * pieces, 1, threads, [&](int64_t piece) {
    const Sequence& sequence = sequences[piece / (heads * pieces)];
    const int64_t head = piece / pieces % heads, first = piece % pieces * kStateColumns;
    float* state = states + (sequence.place * heads + head) * matrix;
    const int64_t columns = std::min(kStateColumns, head_size - first);
    if (sequence.fresh)
      for (int64_t i = 0; i < state_size; ++i) std::memset(state + i * head_size + first, 0, columns * sizeof(float));
    work(sequence, head, first, state);
  });
}

}  // namespace quantkit
