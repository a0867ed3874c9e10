// Attention of a few queries over the live part of a static cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "cache.h"
#include "floats.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

constexpr int64_t kSpan = 256;  // cached positions that one piece of work covers
constexpr int64_t kTile = 64;   // of them that are converted to float32 at a time

struct AttentionShape {
  int64_t batch, heads, kv_heads, tokens, length, size;  // B, H, K, T, S, Dh
  int64_t window;                                      // positions seen, the own included; 0 for all
  float scale;
  FloatType type;    // of queries and outputs
  CacheType cached;
  int64_t batch_step, head_step, token_step;  // from one query to the next
};

// The softmax of one query head over some cached positions: its largest score, the sum of the
// exponentials and the sum of the values weighted by them.
struct Partial {
  float *max, *sum, *values;
};

// Four products of one vector with vectors `step` apart.
inline void four_dots(const float* a, const float* b, int64_t step, int64_t count, float* out) {
  Vector sums[4] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vector left = load(a + i);
    for (int j = 0; j < 4; ++j) sums[j] += left * load(b + j * step + i);
  }
  for (int j = 0; j < 4; ++j) {
    out[j] = total(sums[j]);
    for (int64_t rest = i; rest < count; ++rest) out[j] += a[rest] * b[j * step + rest];
  }
}

// sums += the rows of `values`, `size` apart, each times its weight.
template <int Vectors>
inline void weighted_rows(const float* weights, const float* values, int64_t size, int64_t count, float* sums) {
  Vector total[Vectors];
  for (int v = 0; v < Vectors; ++v) total[v] = load(sums + v * kLanes);
  for (int64_t s = 0; s < count; ++s)
    for (int v = 0; v < Vectors; ++v) total[v] += weights[s] * load(values + s * size + v * kLanes);
  for (int v = 0; v < Vectors; ++v) store(total[v], sums + v * kLanes);
}

// All query heads that share keys and values, over positions from start to stop.
inline void attend_span(const AttentionShape& at, const float* queries, const void* keys, const void* values,
                        int64_t first, int64_t start, int64_t stop, const Partial* partials) {
  const int64_t size = at.size, group = at.heads / at.kv_heads, count = stop - start;
  thread_local std::vector<float> scratch, scores;
  scratch.resize(kTile * size);
  scores.resize(group * kSpan);
  for (int64_t tile = 0; tile < count; tile += kTile) {
    const int64_t width = std::min(kTile, count - tile);
    const float* of = load_rows(keys, at.cached, first + start + tile, width, size, scratch.data());
    for (int64_t g = 0; g < group; ++g) {
      float* to = scores.data() + g * kSpan + tile;
      int64_t s = 0;
      for (; s + 4 <= width; s += 4) four_dots(queries + g * size, of + s * size, size, size, to + s);
      for (; s < width; ++s) to[s] = dot(queries + g * size, of + s * size, size);
    }
  }
  for (int64_t g = 0; g < group; ++g) {
    float* weights = scores.data() + g * kSpan;
    const float max = largest(weights, count);
    for (int64_t s = 0; s < count; ++s) weights[s] = exponential(weights[s] - max);
    *partials[g].max = max;
    *partials[g].sum = total(weights, count);
  }
  for (int64_t tile = 0; tile < count; tile += kTile) {
    const int64_t width = std::min(kTile, count - tile);
    const float* of = load_rows(values, at.cached, first + start + tile, width, size, scratch.data());
    for (int64_t g = 0; g < group; ++g) {
      const float* weights = scores.data() + g * kSpan + tile;
      float* sums = partials[g].values;
      int64_t i = 0;
      for (; i + 4 * kLanes <= size; i += 4 * kLanes) weighted_rows<4>(weights, of + i, size, width, sums + i);
      for (; i + kLanes <= size; i += kLanes) weighted_rows<1>(weights, of + i, size, width, sums + i);
      for (; i < size; ++i)
        for (int64_t s = 0; s < width; ++s) sums[i] += weights[s] * of[s * size + i];
    }
  }
}

// Grouped-query attention. keys and values [B, K, S, Dh]; the query at positions[t] sees the
// cached positions up to its own. out [B, T, H, Dh].
//
// Work is cut into spans of the cache, each with a softmax of its own; these are then joined
// by their maxima and sums (2112.05682).
inline void attention(const AttentionShape& at, const void* queries, const void* keys, const void* values,
                      const int64_t* positions, int threads, void* out) {
  const int64_t group = at.heads / at.kv_heads;
  const int64_t last = *std::max_element(positions, positions + at.tokens) + 1;
  const int64_t spans = (last + kSpan - 1) / kSpan, record = at.size + 2;
  const int64_t lines = at.batch * at.kv_heads * at.tokens;  // of queries that share keys
  std::vector<float> partial(lines * spans * group * record);
  if (lines * last * at.size * group < kMinParallelWork) threads = 1;
  Pool& pool = Pool::instance();
  pool.parallel_for(lines * spans, 1, threads, [&](int64_t index) {
    const int64_t line = index / spans, token = line % at.tokens, pair = line / at.tokens;
    const int64_t batch = pair / at.kv_heads, kv_head = pair % at.kv_heads;
    const int64_t stop = std::min(index % spans * kSpan + kSpan, positions[token] + 1);
    const int64_t first_seen = at.window ? std::max<int64_t>(0, positions[token] + 1 - at.window) : 0;
    const int64_t start = std::max(index % spans * kSpan, first_seen);
    if (start >= stop) return;
    std::vector<float> scaled(group * at.size);
    std::vector<Partial> partials(group);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t row = batch * at.batch_step + (kv_head * group + g) * at.head_step + token * at.token_step;
      float* query = scaled.data() + g * at.size;
      const float* loaded = load_floats(queries, at.type, row, at.size, query);
      for (int64_t i = 0; i < at.size; ++i) query[i] = loaded[i] * at.scale;
      float* to = partial.data() + (index * group + g) * record;
      partials[g] = Partial{to, to + 1, to + 2};
    }
    attend_span(at, scaled.data(), keys, values, pair * at.length, start, stop, partials.data());
  });
  pool.parallel_for(lines * group, 16, threads, [&](int64_t index) {
    const int64_t line = index / group, g = index % group;
    const float* first = partial.data() + (line * spans * group + g) * record;
    float max = -std::numeric_limits<float>::infinity();
    for (int64_t s = 0; s < spans; ++s) {
      const float* part = first + s * group * record;
      if (part[1] != 0 && !(part[0] <= max)) max = part[0];  // spans that see nothing have no sum
    }
    std::vector<float> total(at.size);
    float sum = 0;
    for (int64_t s = 0; s < spans; ++s) {
      const float* part = first + s * group * record;
      if (part[1] == 0) continue;
      const float factor = exponential(part[0] - max);
      sum += factor * part[1];
      for (int64_t i = 0; i < at.size; ++i) total[i] += factor * part[2 + i];
    }
    for (float& value : total) value /= sum;
    const int64_t token = line % at.tokens, pair = line / at.tokens;
    const int64_t head = pair % at.kv_heads * group + g;
    const int64_t row = (pair / at.kv_heads * at.tokens + token) * at.heads + head;
    store_floats(total.data(), at.size, out, at.type, row * at.size);
  });
}

}  // namespace quantkit
