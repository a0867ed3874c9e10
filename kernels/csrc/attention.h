// Attention of a few queries over the live part of a static cache.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "cache.h"
#include "floats.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

constexpr int64_t kSpan = 256;  // cached positions that one piece of work covers
constexpr int64_t kTile = 64;   // of them that are converted to float32 at a time

// How products of queries and keys become scores: times `scale`, below `softcap`; and what takes part in the softmax
// besides them.
struct Scores {
  float scale, softcap;  // cap tanh(score / cap); 0 for none
  const float* sinks;    // [H], a score of each head that has no value; null for none

  void cap(float* scores, int64_t count) const {
    if (softcap == 0) return;
    const float over = 1 / softcap;
    for (int64_t s = 0; s < count; ++s) scores[s] = softcap * hyperbolic_tangent(scores[s] * over);
  }
};

// What a query sees up to its own position: so many positions with it, or those of its chunk of so many; 0 for all.
struct Sight {
  int64_t window, chunk;

  int64_t first(int64_t position) const {
    if (chunk) return position - position % chunk;
    return window ? std::max<int64_t>(0, position + 1 - window) : 0;
  }
};

struct AttentionShape {
  int64_t batch, heads, kv_heads, tokens, size;  // B, H, K, T, Dh
  Sight sight;
  Scores scores;
  FloatType type;  // of queries and outputs
  int64_t batch_step, head_step, token_step;  // from one query to the next

  int64_t record() const { return size + 2; }  // floats that the softmax of a head over a span takes

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

#if defined(__AVX512F__)
constexpr int kValueHeads = 4;  // whose sums of values stay in registers, four vectors each
#else
constexpr int kValueHeads = 2;
#endif

// Products of some query heads with `count` keys; those of a head go to `out`, `step` apart.
template <int Heads>
inline void scores_of(const float* queries, const float* keys, int64_t count, int64_t size, float* out, int64_t step) {
  constexpr int kKeys = kLanes / Heads;
  for (int64_t key = 0; key < count; key += kKeys) {
    const float* rows[kKeys];
    for (int s = 0; s < kKeys; ++s) rows[s] = keys + std::min(key + s, count - 1) * size;
    Vector sums[kLanes] = {};
    add_products<Heads>(queries, size, rows, size / kLanes * kLanes, sums);
    const Vector all = totals(sums);
    alignas(64) float scores[kLanes];
    store(all, scores);
    for (int64_t i = size / kLanes * kLanes; i < size; ++i)
      for (int h = 0; h < Heads; ++h)
        for (int s = 0; s < kKeys; ++s) scores[h * kKeys + s] += queries[h * size + i] * rows[s][i];
    const int64_t some = std::min<int64_t>(kKeys, count - key);
#pragma GCC unroll 16
    for (int h = 0; h < Heads; ++h) {
      if (some == kKeys)
        std::memcpy(out + h * step + key, scores + h * kKeys, sizeof(float) * kKeys);
      else
        std::memcpy(out + h * step + key, scores + h * kKeys, sizeof(float) * some);
    }
  }
}

// sums += the rows of `values`, each times its weight; the weights of a head are `step` apart, its sums `sums_step`.
template <int Heads, int Vectors>
inline void weighted_rows(const float* weights, int64_t step, const float* values, int64_t size, int64_t count,
                          float* sums, int64_t sums_step) {
  Vector total[Heads][Vectors];
  for (int h = 0; h < Heads; ++h)
    for (int v = 0; v < Vectors; ++v) total[h][v] = load(sums + h * sums_step + v * kLanes);
  for (int64_t s = 0; s < count; ++s) {
    Vector row[Vectors];
    for (int v = 0; v < Vectors; ++v) row[v] = load(values + s * size + v * kLanes);
    for (int h = 0; h < Heads; ++h)
      for (int v = 0; v < Vectors; ++v) total[h][v] += weights[h * step + s] * row[v];
  }
  for (int h = 0; h < Heads; ++h)
    for (int v = 0; v < Vectors; ++v) store(total[h][v], sums + h * sums_step + v * kLanes);
}

// The same over the whole width of some heads.
template <int Heads>
inline void mix_values(const float* weights, const float* values, int64_t size, int64_t count, float* sums,
                       int64_t sums_step) {
  int64_t i = 0;
  for (; i + 4 * kLanes <= size; i += 4 * kLanes)
    weighted_rows<Heads, 4>(weights, kSpan, values + i, size, count, sums + i, sums_step);
  for (; i + kLanes <= size; i += kLanes)
    weighted_rows<Heads, 1>(weights, kSpan, values + i, size, count, sums + i, sums_step);
  for (; i < size; ++i)
    for (int h = 0; h < Heads; ++h)
      for (int64_t s = 0; s < count; ++s) sums[h * sums_step + i] += weights[h * kSpan + s] * values[s * size + i];
}

// All query heads that share keys and values, over positions from start to stop. The softmax of a head over them is a
// record: its largest score, the sum of the exponentials, and the sum of the values weighted by them.
inline void attend_span(const AttentionShape& at, const float* queries, const Cache& cache, int64_t first,
                        int64_t start, int64_t stop, float* records) {
  constexpr int kKeyHeads = kLanes / 4;
  const int64_t size = at.size, group = at.heads / at.kv_heads, count = stop - start, record = at.record();
  thread_local AlignedFloats tile_memory, score_memory;
  float *scratch = tile_memory.resize(kTile * size), *scores = score_memory.resize(group * kSpan);
  for (int64_t tile = 0; tile < count; tile += kTile) {
    const int64_t width = std::min(kTile, count - tile);
    const float* of = cache.keys.load(first + start + tile, width, scratch);
    const int64_t next = tile + kTile < count ? tile + kTile : 0;  // values follow the last of the keys
    (next ? cache.keys : cache.values).prefetch(first + start + next, std::min(kTile, count - next));
    int64_t g = 0;
    float* to = scores + tile;
    for (; g + kKeyHeads <= group; g += kKeyHeads)
      scores_of<kKeyHeads>(queries + g * size, of, width, size, to + g * kSpan, kSpan);
    for (; g < group; ++g) scores_of<1>(queries + g * size, of, width, size, to + g * kSpan, kSpan);
  }
  for (int64_t g = 0; g < group; ++g) {
    float *weights = scores + g * kSpan, *to = records + g * record;
    at.scores.cap(weights, count);
    const float max = largest(weights, count);
    for (int64_t s = 0; s < count; ++s) weights[s] = exponential(weights[s] - max);
    to[0] = max;
    to[1] = total(weights, count);
    std::fill(to + 2, to + record, 0.f);
  }
  for (int64_t tile = 0; tile < count; tile += kTile) {
    const int64_t width = std::min(kTile, count - tile);
    const float* of = cache.values.load(first + start + tile, width, scratch);
    if (tile + kTile < count)
      cache.values.prefetch(first + start + tile + kTile, std::min(kTile, count - tile - kTile));
    const float* weights = scores + tile;
    int64_t g = 0;
    for (; g + kValueHeads <= group; g += kValueHeads)
      mix_values<kValueHeads>(weights + g * kSpan, of, size, width, records + g * record + 2, record);
    for (; g < group; ++g) mix_values<1>(weights + g * kSpan, of, size, width, records + g * record + 2, record);
  }
}

// Grouped-query attention of some rows; the query of each sees the positions cached in its slot up to its own. out [B, T, H, Dh].
//
// Work is cut into spans of the cache, each with a separate softmax; these are then joined
// by their maxima and sums (2112.05682).
inline void attention(const AttentionShape& at, const void* queries, const Cache& cache, const int64_t* positions,
                      const std::vector<Run>& runs, int threads, void* out) {
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
  const int64_t spans = (last + kSpan - 1) / kSpan, record = at.record();
  const std::unique_ptr<float[]> records(new float[lines * spans * group * record]);
  if (lines * last * at.size * group < kMinParallelWork) threads = 1;
  Pool& pool = Pool::instance();
  // The positions of a span that a row sees.
  const auto seen = [&](int64_t row, int64_t span) {
    const int64_t stop = positions[row] + 1, first = at.sight.first(positions[row]);
    return std::pair(std::max(span * kSpan, first), std::min(span * kSpan + kSpan, stop));
  };
  pool.parallel_for(lines * spans, 1, threads, [&](int64_t index) {
    const Line& line = all[index / spans];
    const auto [start, stop] = seen(line.row, index % spans);
    if (start >= stop) return;
    thread_local AlignedFloats memory;
    float* scaled = memory.resize(group * at.size);
    for (int64_t g = 0; g < group; ++g) {
      float* query = scaled + g * at.size;
      const int64_t from = at.query(line.row, line.kv_head * group + g);
      const float* loaded = load_floats(queries, at.type, from, at.size, query);
      for (int64_t i = 0; i < at.size; ++i) query[i] = loaded[i] * at.scores.scale;
    }
    const int64_t first = (line.slot * at.kv_heads + line.kv_head) * cache.length;
    attend_span(at, scaled, cache, first, start, stop, records.get() + index * group * record);
  });
  pool.parallel_for(lines * group, 16, threads, [&](int64_t index) {
    const Line& line = all[index / group];
    const int64_t g = index % group;
    const auto part = [&](int64_t span) {
      return records.get() + ((index / group * spans + span) * group + g) * record;
    };
    const auto sees = [&](int64_t span) {
      const auto [start, stop] = seen(line.row, span);
      return start < stop;
    };
    const int64_t head = line.kv_head * group + g;
    const float* sink = at.scores.sinks ? at.scores.sinks + head : nullptr;
    float max = sink ? *sink : -std::numeric_limits<float>::infinity();
    for (int64_t s = 0; s < spans; ++s)
      if (sees(s) && !(part(s)[0] <= max)) max = part(s)[0];
    thread_local std::vector<float> total;
    total.assign(at.size, 0);
    float sum = sink ? exponential(*sink - max) : 0;
    for (int64_t s = 0; s < spans; ++s) {
      if (!sees(s)) continue;
      const float* from = part(s);
      const float factor = exponential(from[0] - max);
      sum += factor * from[1];
      for (int64_t i = 0; i < at.size; ++i) total[i] += factor * from[2 + i];
    }
    for (float& value : total) value /= sum;
    store_floats(total.data(), at.size, out, at.type, (line.row * at.heads + head) * at.size);
  });
}

}  // namespace quantkit
