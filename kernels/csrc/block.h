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

// Queries, keys and values [B, T, (H + 2 K) Dh] of hidden states x [B, T, D], rotated; cosine and sine [T, Dh].
inline void run_input(const Block& block, const float* x, const float* cosine, const float* sine, int64_t batch,
                      int64_t tokens, int threads, float* qkv) {
  const int64_t rows = batch * tokens, size = block.size, hidden = block.qkv.at.columns;
  const int64_t qkv_width = block.qkv.at.rows;
  const auto normed = uninitialized(rows * hidden);
  each_row(rows, threads, [&](int64_t r) {
    rms_norm(x + r * hidden, block.input_norm, hidden, block.eps, normed.get() + r * hidden);
  });
  matmul(block.qkv, normed.get(), FloatType::f32, rows, threads, qkv);
  each_row(rows, threads, [&](int64_t r) {
    const int64_t token = r % tokens;
    for (int64_t h = 0; h < block.heads + block.kv_heads; ++h) {
      float* head = qkv + r * qkv_width + h * size;
      const float* norm = h < block.heads ? block.query_norm : block.key_norm;
      if (norm) rms_norm(head, norm, size, block.eps, head);
      rotate(head, cosine + token * size, sine + token * size, size);
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
  int64_t tokens, step, size;
  const float* operator()(int64_t batch, int64_t head, int64_t first, int64_t count, float* scratch) const {
    for (int64_t s = 0; s < count; ++s)
      std::memcpy(scratch + s * size, from + (batch * tokens + first + s) * step + head * size, size * sizeof(float));
    return scratch;
  }
};

// Which of the new tokens, at rising positions, each of them sees.
inline std::vector<KeyRange> seen_among_new(const int64_t* positions, int64_t tokens, int64_t window) {
  std::vector<KeyRange> seen(tokens);
  for (int64_t t = 0; t < tokens; ++t) {
    const int64_t first_seen = window ? positions[t] + 1 - window : 0;
    seen[t] = {std::lower_bound(positions, positions + t, first_seen) - positions, t + 1};
  }
  return seen;
}

// A whole block, x in place, for tokens at rising positions [T]. Keys and values go into the cache if there is one;
// in a prefill the tokens see each other, otherwise what the cache holds up to their positions.
inline void run_block(const Block& block, float* x, const float* cosine, const float* sine, const int64_t* positions,
                      int64_t batch, int64_t tokens, const Cache* cache, bool prefill, int threads) {
  const int64_t rows = batch * tokens, size = block.size, qkv_width = block.qkv.at.rows;
  const int64_t queries = block.heads * size, keys = block.kv_heads * size;
  const auto qkv = uninitialized(rows * qkv_width), mixed = uninitialized(rows * queries);
  run_input(block, x, cosine, sine, batch, tokens, threads, qkv.get());
  const float *new_keys = qkv.get() + queries, *new_values = new_keys + keys;
  if (cache)
    each_row(rows, threads, [&](int64_t r) {
      for (int64_t k = 0; k < block.kv_heads; ++k) {
        const int64_t row = (r / tokens * block.kv_heads + k) * cache->length + positions[r % tokens];
        store_row(new_keys + r * qkv_width + k * size, size, cache->keys, cache->type, row);
        store_row(new_values + r * qkv_width + k * size, size, cache->values, cache->type, row);
      }
    });
  const float scale = 1 / std::sqrt(static_cast<float>(size));
  const AttentionShape shape{batch, block.heads, block.kv_heads, tokens, cache ? cache->length : tokens, size,
                             block.window, scale, FloatType::f32, cache ? cache->type : CacheType::f32,
                             tokens * qkv_width, size, qkv_width};
  if (prefill) {
    const auto seen = seen_among_new(positions, tokens, block.window);
    attention_of_many(shape, qkv.get(), NewRows{new_keys, tokens, qkv_width, size},
                      NewRows{new_values, tokens, qkv_width, size}, seen.data(), threads, mixed.get());
  } else {
    attention_over_cache(shape, qkv.get(), cache->keys, cache->values, positions, threads, mixed.get());
  }
  run_output(block, x, mixed.get(), rows, threads);
}

}  // namespace quantkit
