// Attention of many queries, a tile of them at a time against a tile of keys.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "attention.h"
#include "cache.h"
#include "floats.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kSumRows = 8;  // whose sums stay in registers per_tile, two vectors each
#else
constexpr int kSumRows = 4;
#endif
constexpr int64_t kSumWidth = 2 * kLanes;
constexpr int64_t kFewTokens = 16;  // of a run; for them attention is cut along the cache, not along the queries
constexpr int64_t kQueries = 128;  // query heads that one piece of work takes, or those that share keys if more

// The keys that a query sees, by their index.
struct KeyRange {
  int64_t first, stop;
};

// c += a b, row-major: a [rows, depth], b [depth, columns]; rows and columns in whole multiples of what stays
// in registers.
inline void multiply_add(const float* a, int64_t a_step, const float* b, int64_t b_step, int64_t rows, int64_t columns,
                         int64_t depth, float* c, int64_t c_step) {
  for (int64_t j = 0; j < columns; j += kSumWidth)
    for (int64_t i = 0; i < rows; i += kSumRows) {
      Vector sums[kSumRows][2];
      for (int r = 0; r < kSumRows; ++r)
        for (int v = 0; v < 2; ++v) sums[r][v] = load(c + (i + r) * c_step + j + v * kLanes);
      for (int64_t k = 0; k < depth; ++k) {
        const Vector of[2] = {load(b + k * b_step + j), load(b + k * b_step + j + kLanes)};
        for (int r = 0; r < kSumRows; ++r)
          for (int v = 0; v < 2; ++v) sums[r][v] += a[(i + r) * a_step + k] * of[v];
      }
      for (int r = 0; r < kSumRows; ++r)
        for (int v = 0; v < 2; ++v) store(sums[r][v], c + (i + r) * c_step + j + v * kLanes);
    }
}

inline int64_t round_up(int64_t count, int64_t to) { return (count + to - 1) / to * to; }

// The softmax of some query heads over the keys so far: largest scores, sums of exponentials, and sums of the
// values weighted by them.
struct RunningSoftmax {
  float *max, *sums, *values;
};

// Add scores [kTile] of one query to its softmax: they become weights, and the sums so far are rescaled.
inline void update_softmax(float* scores, int64_t first, int64_t stop, int64_t width, int64_t row,
                           const RunningSoftmax& to) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  std::fill(scores, scores + first, kNone);
  std::fill(scores + stop, scores + kTile, kNone);
  const float before = to.max[row], here = largest(scores, kTile), max = here <= before ? before : here;
  for (int64_t s = 0; s < kTile; ++s) scores[s] = exponential(scores[s] - max);
  std::fill(scores, scores + first, 0.f);
  std::fill(scores + stop, scores + kTile, 0.f);
  if (max != before) {
    const float factor = to.sums[row] == 0 ? 0 : exponential(before - max);
    to.sums[row] *= factor;
    for (int64_t i = 0; i < width; ++i) to.values[row * width + i] *= factor;
  }
  to.max[row] = max;
  to.sums[row] += total(scores, kTile);
}

// Grouped-query attention of runs whose rows see `seen` [B T] of the keys. `keys` and `values` give rows of a run
// and a head as floats: (run, head, first, count, scratch). out [B, T, H, Dh].
template <class Keys, class Values>
void attention_of_many(const AttentionShape& at, const void* queries, const Keys& keys, const Values& values,
                       const std::vector<Run>& runs, const KeyRange* seen, int threads, void* out) {
  struct Tile {
    const Run* run;
    int64_t first, tokens;  // its rows
    KeyRange all;           // the keys that any of them sees
  };
  const int64_t group = at.heads / at.kv_heads, size = at.size, width = round_up(size, kSumWidth);
  const int64_t per_tile = std::max<int64_t>(1, kQueries / group);
  std::vector<Tile> tiles;
  for (const Run& run : runs)
    for (int64_t done = 0; done < run.count; done += per_tile) {
      Tile tile{&run, run.first + done, std::min(per_tile, run.count - done), seen[run.first + done]};
      for (int64_t row = tile.first; row < tile.first + tile.tokens; ++row)
        tile.all = {std::min(tile.all.first, seen[row].first), std::max(tile.all.stop, seen[row].stop)};
      // Sums of a row begin at the same key whichever rows are read with it.
      tile.all.first -= tile.all.first % kTile;
      tiles.push_back(tile);
    }
  std::stable_sort(tiles.begin(), tiles.end(), [](const Tile& a, const Tile& b) {
    return a.all.stop - a.all.first > b.all.stop - b.all.first;  // the longest work first
  });
  Pool::instance().parallel_for(static_cast<int64_t>(tiles.size()) * at.kv_heads, 1, threads, [&](int64_t index) {
    const Tile& tile = tiles[index / at.kv_heads];
    const int64_t kv_head = index % at.kv_heads;
    const int64_t rows = tile.tokens * group, padded = round_up(rows, kSumRows);
    thread_local AlignedFloats memory[5];
    thread_local std::vector<float> max, sums;
    float *scaled = memory[0].resize(padded * size), *transposed = memory[1].resize(size * kTile);
    float *scores = memory[2].resize(padded * kTile), *scratch = memory[3].resize(kTile * width);
    float* mixed = memory[4].resize(padded * width);
    std::fill_n(scaled, padded * size, 0.f);
    std::fill_n(scratch, kTile * width, 0.f);
    std::fill_n(mixed, padded * width, 0.f);
    max.assign(rows, -std::numeric_limits<float>::infinity());
    sums.assign(rows, 0);
    if (at.scores.sinks)
      for (int64_t r = 0; r < rows; ++r) max[r] = at.scores.sinks[kv_head * group + r % group], sums[r] = 1;
    const RunningSoftmax running{max.data(), sums.data(), mixed};
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t from = at.query(tile.first + r / group, kv_head * group + r % group);
      float* query = scaled + r * size;
      const float* loaded = load_floats(queries, at.type, from, size, query);
      for (int64_t i = 0; i < size; ++i) query[i] = loaded[i] * at.scores.scale;
    }
    for (int64_t start = tile.all.first; start < tile.all.stop; start += kTile) {
      const int64_t count = std::min(kTile, tile.all.stop - start);
      const float* key = keys(*tile.run, kv_head, start, count, scratch);
      for (int64_t s = 0; s < count; ++s)
        for (int64_t i = 0; i < size; ++i) transposed[i * kTile + s] = key[s * size + i];
      std::fill_n(scores, padded * kTile, 0.f);
      multiply_add(scaled, size, transposed, kTile, padded, kTile, size, scores, kTile);
      for (int64_t r = 0; r < rows; ++r) {
        const KeyRange& by = seen[tile.first + r / group];
        const int64_t first = std::clamp<int64_t>(by.first - start, 0, count);
        const int64_t stop = std::clamp<int64_t>(by.stop - start, first, count);
        at.scores.cap(scores + r * kTile, kTile);
        update_softmax(scores + r * kTile, first, stop, width, r, running);
      }
      const float* value = values(*tile.run, kv_head, start, count, scratch);
      if (width != size) {  // each row on its own width, from the last on
        if (value != scratch) std::memcpy(scratch, value, count * size * sizeof(float));
        for (int64_t s = count - 1; s >= 0; --s) {
          std::memmove(scratch + s * width, scratch + s * size, size * sizeof(float));
          std::fill(scratch + s * width + size, scratch + (s + 1) * width, 0.f);
        }
        value = scratch;
      }
      multiply_add(scores, kTile, value, width, padded, width, count, mixed, width);
    }
    for (int64_t r = 0; r < rows; ++r) {
      float* row = mixed + r * width;
      for (int64_t i = 0; i < size; ++i) row[i] /= sums[r];
      const int64_t row_out = (tile.first + r / group) * at.heads + kv_head * group + r % group;
      store_floats(row, size, out, at.type, row_out * size);
    }
  });
}

// Grouped-query attention over a cache, of runs of any number of rows; as `attention`, which does it for a few.
inline void attention_over_cache(const AttentionShape& at, const void* queries, const Cache& cache,
                                 const int64_t* positions, const std::vector<Run>& runs, int threads, void* out) {
  std::vector<Run> short_runs, long_runs;
  for (const Run& run : runs) (run.count <= kFewTokens ? short_runs : long_runs).push_back(run);
  if (!short_runs.empty()) attention(at, queries, cache, positions, short_runs, threads, out);
  if (long_runs.empty()) return;
  std::vector<KeyRange> seen(at.batch * at.tokens);
  for (size_t row = 0; row < seen.size(); ++row)
    seen[row] = {at.sight.first(positions[row]), positions[row] + 1};
  const auto of = [&](const CachedRows& rows) {
    return [&](const Run& run, int64_t head, int64_t first, int64_t count, float* scratch) {
      return rows.load((run.slot * at.kv_heads + head) * cache.length + first, count, scratch);
    };
  };
  attention_of_many(at, queries, of(cache.keys), of(cache.values), long_runs, seen.data(), threads, out);
}

}  // namespace quantkit
