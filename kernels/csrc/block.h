// A decoder block.
//
// The same arithmetic as the decoder's modules, in float32 throughout; one call instead of
// some fifty, each of which costs more than its work where tokens are few.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <vector>

#include "attention.h"
#include "attention_many.h"
#include "floats.h"
#include "matmul.h"
#include "vector_math.h"

namespace quantkit {

struct Block {
  Linear qkv, out, gate_up, down;
  const float *input_norm, *output_norm;  // [D]
  const float *query_norm, *key_norm;     // [Dh], or null
  float eps;
  int64_t heads, kv_heads, size, window;  // H, K, Dh; positions seen, 0 for all
};

struct Cache {
  void *keys, *values;  // [B, K, S] rows of Dh
  CacheType type;
  int64_t length;  // S
};

// Root-mean-square norm of one row (1910.07467).
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
  const float factor = 1 / std::sqrt(dot(x, x, size) / static_cast<float>(size) + eps);
  for (int64_t i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
}

// Rotate one head in place by a position's angles, in rotate-half layout.
inline void rotate(float* head, const float* cosine, const float* sine, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float first = head[i], second = head[i + half];
    head[i] = first * cosine[i] - second * sine[i];
    head[i + half] = second * cosine[i + half] + first * sine[i + half];
  }
}

constexpr int64_t kInnerRows = 512;  // of inner states of the feed-forward in memory at a time

// Scratch memory for so many floats.
inline std::unique_ptr<float[]> uninitialized(int64_t count) { return std::unique_ptr<float[]>(new float[count]); }

// Call work(r) for all rows, on several threads where they are many.
template <class Work>
void each_row(int64_t rows, int threads, const Work& work) {
  Pool::instance().parallel_for(rows, 1, rows > 4 ? threads : 1, work);
}

// The rows of a step: B sequences of T tokens each.
struct Rows {
  int64_t batch, tokens;
  const int64_t* positions;     // [B, T], rising in each sequence
  const float *cosine, *sine;   // of the positions, [angles, Dh]
  int64_t angles;               // B T, or T where all sequences are at the same positions
  const int64_t* slots;         // [B], the sequences' places in the cache; null is 0, 1, 2, ...
};

// Queries, keys and values [rows, (H + 2 K) Dh] of hidden states x [rows, D], rotated.
inline void run_input(const Block& block, const float* x, const Rows& at, int threads, float* qkv) {
  const int64_t rows = at.batch * at.tokens, size = block.size, hidden = block.qkv.at.columns;
  const int64_t qkv_width = block.qkv.at.rows;
  const auto normed = uninitialized(rows * hidden);
  each_row(rows, threads, [&](int64_t r) {
    rms_norm(x + r * hidden, block.input_norm, hidden, block.eps, normed.get() + r * hidden);
  });
  matmul(block.qkv, normed.get(), FloatType::f32, rows, threads, qkv);
  each_row(rows, threads, [&](int64_t r) {
    const int64_t angle = r % at.angles * size;
    for (int64_t h = 0; h < block.heads + block.kv_heads; ++h) {
      float* head = qkv + r * qkv_width + h * size;
      const float* norm = h < block.heads ? block.query_norm : block.key_norm;
      if (norm) rms_norm(head, norm, size, block.eps, head);
      rotate(head, at.cosine + angle, at.sine + angle, size);
    }
  });
}

// What follows attention: mixed [rows, H Dh] into the hidden states x [rows, D], and the feed-forward.
inline void run_output(const Block& block, float* x, const float* mixed, int64_t rows, int threads) {
  const int64_t hidden = block.qkv.at.columns, inner = block.down.at.columns, max_rows = std::min(rows, kInnerRows);
  matmul(block.out, mixed, FloatType::f32, rows, threads, x, true);
  const auto normed = uninitialized(max_rows * hidden), gates = uninitialized(max_rows * 2 * inner);
  const auto gated = uninitialized(max_rows * inner);
  for (int64_t count; rows > 0; rows -= count, x += count * hidden) {
    count = std::min(rows, max_rows);
    each_row(count, threads, [&](int64_t r) {
      rms_norm(x + r * hidden, block.output_norm, hidden, block.eps, normed.get() + r * hidden);
    });
    matmul(block.gate_up, normed.get(), FloatType::f32, count, threads, gates.get());
    each_row(count, threads, [&](int64_t r) {
      const float *gate = gates.get() + r * 2 * inner, *up = gate + inner;
      float* to = gated.get() + r * inner;
      for (int64_t i = 0; i < inner; ++i) to[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
    });
    matmul(block.down, gated.get(), FloatType::f32, count, threads, x, true);
  }
}

// Keys or values of the new tokens, as they lie among their queries.
struct NewRows {
  const float* from;
  int64_t step, size;
  const float* operator()(const Run& run, int64_t head, int64_t first, int64_t count, float* scratch) const {
    for (int64_t s = 0; s < count; ++s)
      std::memcpy(scratch + s * size, from + (run.first + first + s) * step + head * size, size * sizeof(float));
    return scratch;
  }
};

// Which of the new rows of its run, counted from the run's first, each row sees.
inline std::vector<KeyRange> seen_among_new(const std::vector<Run>& runs, const int64_t* positions, int64_t rows,
                                            int64_t window) {
  std::vector<KeyRange> seen(rows);
  for (const Run& run : runs) {
    const int64_t* from = positions + run.first;
    for (int64_t t = 0; t < run.count; ++t) {
      const int64_t first_seen = window ? from[t] + 1 - window : 0;
      seen[run.first + t] = {std::lower_bound(from, from + t, first_seen) - from, t + 1};
    }
  }
  return seen;
}

// A whole block, x in place. Keys and values go into the cache if there is one; in a prefill the tokens of a sequence
// see each other, otherwise what the cache holds of it up to their positions.
inline void run_block(const Block& block, float* x, const Rows& at, const Cache* cache, bool prefill, int threads) {
  const int64_t rows = at.batch * at.tokens, size = block.size, qkv_width = block.qkv.at.rows;
  const int64_t queries = block.heads * size, keys = block.kv_heads * size;
  const auto qkv = uninitialized(rows * qkv_width), mixed = uninitialized(rows * queries);
  run_input(block, x, at, threads, qkv.get());
  const float *new_keys = qkv.get() + queries, *new_values = new_keys + keys;
  if (cache)
    each_row(rows, threads, [&](int64_t r) {
      const int64_t slot = at.slots ? at.slots[r / at.tokens] : r / at.tokens;
      for (int64_t k = 0; k < block.kv_heads; ++k) {
        const int64_t row = (slot * block.kv_heads + k) * cache->length + at.positions[r];
        store_row(new_keys + r * qkv_width + k * size, size, cache->keys, cache->type, row);
        store_row(new_values + r * qkv_width + k * size, size, cache->values, cache->type, row);
      }
    });
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  const AttentionShape shape{at.batch, block.heads, block.kv_heads, at.tokens, cache ? cache->length : at.tokens,
                             size, block.window, scale, FloatType::f32, cache ? cache->type : CacheType::f32,
                             at.tokens * qkv_width, size, qkv_width};
  const std::vector<Run> runs = runs_of(at.slots, at.positions, at.batch, at.tokens);
  if (prefill) {
    const auto seen = seen_among_new(runs, at.positions, rows, block.window);
    attention_of_many(shape, qkv.get(), NewRows{new_keys, qkv_width, size}, NewRows{new_values, qkv_width, size},
                      runs, seen.data(), threads, mixed.get());
  } else {
    attention_over_cache(shape, qkv.get(), cache->keys, cache->values, at.positions, runs, threads, mixed.get());
  }
  run_output(block, x, mixed.get(), rows, threads);
}

}  // namespace quantkit
