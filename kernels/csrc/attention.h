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

  // Where the query of a row, of B T in all, lies.
  int64_t query(int64_t row, int64_t head) const {
    return row / tokens * batch_step + head * head_step + row % tokens * token_step;
  }
};

// Rows of one sequence at rising positions, one after the other.
struct Run {
  int64_t slot, first, count;  // its place in the cache; its rows
};

// Rows [B, T] as runs. Sequences one after the other in one slot are one run where they rise, so T may be 1 for all.
// `slots` [B] are the sequences' places in the cache; null is 0, 1, 2, ...
inline std::vector<Run> runs_of(const int64_t* slots, const int64_t* positions, int64_t batch, int64_t tokens) {
  std::vector<Run> runs;
  for (int64_t row = 0; row < batch * tokens; ++row) {
    const int64_t slot = slots ? slots[row / tokens] : row / tokens;
    const bool goes_on = row % tokens || (row && runs.back().slot == slot && positions[row] > positions[row - 1]);
    if (goes_on)
      ++runs.back().count;
    else
      runs.push_back({slot, row, 1});
  }
  return runs;
}

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

// Grouped-query attention of some rows. keys and values [slots, K, S, Dh]; the query of a row sees the positions
// cached in its slot up to its own. out [B, T, H, Dh].
//
// Work is cut into spans of the cache, each with a softmax of its own; these are then joined
// by their maxima and sums (2112.05682).
inline void attention(const AttentionShape& at, const void* queries, const void* keys, const void* values,
                      const int64_t* positions, const std::vector<Run>& runs, int threads, void* out) {
  struct Line {  // of queries that share keys
    int64_t row, slot, kv_head;
  };
  std::vector<Line> all;
  int64_t last = 0;
  for (const Run& run : runs)
    for (int64_t kv_head = 0; kv_head < at.kv_heads; ++kv_head)
      for (int64_t row = run.first; row < run.first + run.count; ++row) {
        all.push_back({row, run.slot, kv_head});
        last = std::max(last, positions[row] + 1);
      }
  const int64_t group = at.heads / at.kv_heads, lines = all.size();
  const int64_t spans = (last + kSpan - 1) / kSpan, record = at.size + 2;
  std::vector<float> partial(lines * spans * group * record);
  if (lines * last * at.size * group < kMinParallelWork) threads = 1;
  Pool& pool = Pool::instance();
  pool.parallel_for(lines * spans, 1, threads, [&](int64_t index) {
    const Line& line = all[index / spans];
    const int64_t position = positions[line.row];
    const int64_t stop = std::min(index % spans * kSpan + kSpan, position + 1);
    const int64_t first_seen = at.window ? std::max<int64_t>(0, position + 1 - at.window) : 0;
    const int64_t start = std::max(index % spans * kSpan, first_seen);
    if (start >= stop) return;
    std::vector<float> scaled(group * at.size);
    std::vector<Partial> partials(group);
    for (int64_t g = 0; g < group; ++g) {
      float* query = scaled.data() + g * at.size;
      const int64_t from = at.query(line.row, line.kv_head * group + g);
      const float* loaded = load_floats(queries, at.type, from, at.size, query);
      for (int64_t i = 0; i < at.size; ++i) query[i] = loaded[i] * at.scale;
      float* to = partial.data() + (index * group + g) * record;
      partials[g] = Partial{to, to + 1, to + 2};
    }
    const int64_t first = (line.slot * at.kv_heads + line.kv_head) * at.length;
    attend_span(at, scaled.data(), keys, values, first, start, stop, partials.data());
  });
  pool.parallel_for(lines * group, 16, threads, [&](int64_t index) {
    const int64_t g = index % group;
    const float* first = partial.data() + (index / group * spans * group + g) * record;
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
    const Line& line = all[index / group];
    store_floats(total.data(), at.size, out, at.type, (line.row * at.heads + line.kv_head * group + g) * at.size);
  });
}

}  // namespace quantkit
