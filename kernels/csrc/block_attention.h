// The attention half of a decoder block.
//
// The same arithmetic as the decoder's modules, in float32 throughout; one call instead of
// some fifty, each of which costs more than its work where tokens are few.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "attention_many.h"
#include "branch.h"
#include "floats.h"
#include "matmul.h"

namespace quantkit {

struct AttentionHalf {
  Branch branch;
  Projection qkv;
  Linear out;
  const float *query_norm, *key_norm;      // weights; null where there are no norms
  int64_t query_norm_size, key_norm_size;  // Dh of each head, or of all heads together
  Scores scores;
  float clip;  // queries, keys and values are at most so large, after norms of all heads and before those of each
  int64_t heads, kv_heads, size;  // H, K, Dh
  Sight sight;
  bool gated;          // whether a gate [Dh] of its mixed values follows each head's queries
  bool norms_rotated;  // whether norms of each head come after the rotation

  int64_t query_step() const { return gated ? 2 * size : size; }  // from one head's queries to the next
  int64_t query_width() const { return heads * query_step(); }
};

// The rows of a step: B sequences of T tokens each.
struct Rows {
  int64_t batch, tokens;
  const int64_t* positions;    // [B, T], rising in each sequence
  const float *cosine, *sine;  // of the positions, [angles, rotated]
  int64_t rotated;             // dimensions of a head that turn: all, or the first
  const float* query_scale;    // of the positions, [angles]; null for 1
  int64_t angles;              // B T, or T where all sequences are at the same positions
  const int64_t* slots;        // [B], the sequences' places in the cache; null is 0, 1, 2, ...
};

// Norms of the parts of a row, each of `size` values, in place.
inline void norm_parts(float* row, int64_t count, const float* weight, int64_t size, float eps) {
  for (int64_t i = 0; i < count; i += size) rms_norm(row + i, weight, size, eps, row + i);
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

// Queries, with gates or without, keys and values side by side [rows, ...] of hidden states x [rows, D], rotated.
inline void project_rotated(const AttentionHalf& half, const float* x, const Rows& at, int threads, float* qkv) {
  const int64_t rows = at.batch * at.tokens, size = half.size, hidden = half.qkv.columns();
  const int64_t width = half.qkv.rows(), queries = half.query_width(), keys = half.kv_heads * size;
  const Scratch scratch(half.branch.input_norm ? rows * hidden : 0);
  const float* normed = branch_input(half.branch, x, rows, hidden, threads, scratch.get());
  project(half.qkv, normed, FloatType::f32, rows, threads, qkv);
  each_row(rows, threads, [&](int64_t r) {
    float* row = qkv + r * width;
    const auto norm = [&] {
      if (half.query_norm && half.gated)
        for (int64_t h = 0; h < half.heads; ++h) norm_parts(row + h * 2 * size, size, half.query_norm, size, half.branch.eps);
      else if (half.query_norm)
        norm_parts(row, queries, half.query_norm, half.query_norm_size, half.branch.eps);
      if (half.key_norm) norm_parts(row + queries, keys, half.key_norm, half.key_norm_size, half.branch.eps);
    };
    const bool each_head = half.query_norm_size == size;
    if (!each_head) norm();
    if (half.clip < std::numeric_limits<float>::infinity())
      for (int64_t i = 0; i < width; ++i) row[i] = limited(row[i], -half.clip, half.clip);
    if (each_head && !half.norms_rotated) norm();
    const int64_t angle = r % at.angles;
    const float *cosine = at.cosine + angle * at.rotated, *sine = at.sine + angle * at.rotated;
    for (int64_t h = 0; h < half.heads; ++h) rotate(row + h * half.query_step(), cosine, sine, at.rotated);
    for (int64_t h = 0; h < half.kv_heads; ++h) rotate(row + queries + h * size, cosine, sine, at.rotated);
    if (each_head && half.norms_rotated) norm();
    if (!at.query_scale) return;
    for (int64_t h = 0; h < half.heads; ++h) {
      float* head = row + h * half.query_step();
      for (int64_t i = 0; i < size; ++i) head[i] *= at.query_scale[angle];
    }
  });
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
                                            const Sight& sight) {
  std::vector<KeyRange> seen(rows);
  for (const Run& run : runs) {
    const int64_t* from = positions + run.first;
    for (int64_t t = 0; t < run.count; ++t) {
      seen[run.first + t] = {std::lower_bound(from, from + t, sight.first(from[t])) - from, t + 1};
    }
  }
  return seen;
}

// The half, x in place. Keys and values go into the cache if there is one; in a prefill the tokens of a sequence
// see each other, otherwise what the cache holds of it up to their positions.
inline void run_attention(const AttentionHalf& half, float* x, const Rows& at, const Cache* cache, bool prefill,
                          int threads) {
  const int64_t rows = at.batch * at.tokens, size = half.size, qkv_width = half.qkv.rows();
  const int64_t queries = half.query_width(), keys = half.kv_heads * size, inner = half.heads * size;
  const Scratch qkv(rows * qkv_width), mixed(rows * inner);
  project_rotated(half, x, at, threads, qkv.get());
  const float *new_keys = qkv.get() + queries, *new_values = new_keys + keys;
  if (cache)
    each_row(rows, threads, [&](int64_t r) {
      const int64_t slot = at.slots ? at.slots[r / at.tokens] : r / at.tokens;
      for (int64_t k = 0; k < half.kv_heads; ++k) {
        const int64_t row = (slot * half.kv_heads + k) * cache->length + at.positions[r];
        cache->keys.store(new_keys + r * qkv_width + k * size, row);
        cache->values.store(new_values + r * qkv_width + k * size, row);
      }
    });
  const AttentionShape shape{at.batch, half.heads, half.kv_heads, at.tokens, size, half.sight, half.scores,
                             FloatType::f32, at.tokens * qkv_width, half.query_step(), qkv_width};
  const std::vector<Run> runs = runs_of(at.slots, at.positions, at.batch, at.tokens);
  if (prefill) {
    const auto seen = seen_among_new(runs, at.positions, rows, half.sight);
    attention_of_many(shape, qkv.get(), NewRows{new_keys, qkv_width, size}, NewRows{new_values, qkv_width, size},
                      runs, seen.data(), threads, mixed.get());
  } else {
    attention_over_cache(shape, qkv.get(), *cache, at.positions, runs, threads, mixed.get());
  }
  if (half.gated)
    each_row(rows, threads, [&](int64_t r) {
      for (int64_t h = 0; h < half.heads; ++h) {
        const float* gate = qkv.get() + r * qkv_width + h * 2 * size + size;
        float* values = mixed.get() + r * inner + h * size;
        for (int64_t i = 0; i < size; ++i) values[i] /= 1 + exponential(-gate[i]);
      }
    });
  add_product(half.branch, half.out, mixed.get(), rows, threads, x);
}

}  // namespace quantkit
