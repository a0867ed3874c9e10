// GPTQ's work on single weights: the search for scales, and rounding some inputs one after the other.
//
// Matrices are [inputs, outputs]; a vector holds the same input of neighbouring outputs, so no sum is taken across it.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "floats.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

// Codes and how inputs share them; without zero points codes are signed.
struct CodeGrid {
  int64_t inputs, outputs, size;  // size: inputs of a group
  int64_t levels;
  bool symmetric;
  FloatType scales;  // as they are stored

  int64_t groups() const { return inputs / size; }
};

inline Vector filled(float value) { return value - Vector{}; }

inline Vector nearest_whole(Vector x) {  // of less than 2^22, ties to even
  constexpr float kWhole = 12582912.f;
  return (x + kWhole) - kWhole;
}

inline Vector limited_to(Vector x, Vector low, Vector high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

// `count` neighbouring values of a row, with `rest` after them.
inline Vector load_part(const float* from, int64_t count, float rest = 0) {
  if (count == kLanes) return load(from);
  float lanes[kLanes];
  std::fill(lanes, lanes + kLanes, rest);
  std::copy(from, from + count, lanes);
  return load(lanes);
}

inline void store_part(Vector value, float* to, int64_t count) {
  float lanes[kLanes];
  store(value, lanes);
  std::copy(lanes, lanes + count, to);
}

// Over a group of kLanes outputs: the step, of all that are tried, whose weighted squared errors are least.
class ScaleSearch {
 public:
  ScaleSearch(const CodeGrid& grid, const float* importance, const float* values)
      : grid_(grid), importance_(importance), values_(values), top_(grid.levels - 1) {
    Vector low = {}, high = {};
    for (int64_t i = 0; i < grid.size; ++i) {
      const Vector value = load(values + i * kLanes);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    low_ = low;
    span_ = grid.symmetric ? (-low > high ? -low : high) / (top_ / 2) : (high - low) / top_;
    best_ = offset_ = scale_ = filled(1);
    if (grid.symmetric) offset_ = filled(static_cast<float>(grid.levels / 2));
    loss_ = filled(std::numeric_limits<float>::infinity());
  }

  // Take `factor` spans as the step wherever that loses less than the best so far.
  void attempt(Vector factor) {
    float lanes[kLanes];
    store(span_ * factor, lanes);
    for (float& lane : lanes) {
      if (grid_.scales == FloatType::bf16) lane = from_bf16(to_bf16(lane));
      if (grid_.scales == FloatType::f16) lane = from_f16(to_f16(lane));
    }
    const Vector step = load(lanes);
    Vector low = filled(-static_cast<float>(grid_.levels / 2)), offset = offset_;
    if (!grid_.symmetric) {
      offset = limited_to(nearest_whole(-low_ * factor / step), Vector{}, filled(top_));
      low = -offset;
    }
    const Vector high = low + top_;
    Vector loss = {};
    for (int64_t i = 0; i < grid_.size; ++i) {
      const Vector value = load(values_ + i * kLanes);
      const Vector error = nearest_whole(limited_to(value / step, low, high)) * step - value;
      loss += importance_[i] * error * error;
    }
    const auto better = (loss < loss_ * kLess) & (step != 0);  // never true of NaN
    loss_ = better ? loss : loss_;
    best_ = better ? factor : best_;
    scale_ = better ? step : scale_;
    offset_ = better ? offset : offset_;
  }

  Vector best() const { return best_; }
  Vector scale() const { return scale_; }
  Vector offset() const { return offset_; }

 private:
  static constexpr float kLess = 1 - 1e-6f;  // steps of both signs often lose the same but for rounding

  const CodeGrid& grid_;
  const float *importance_, *values_;
  const float top_;
  Vector low_, span_, best_, scale_, offset_, loss_;
};

// Scale [G, O] and, where there is a zero point, that [G, O], for weights [I, O]: the best of the steps of `coarse`
// times what spans the group, then of those that are `fine` away from it.
inline void search_scales(const CodeGrid& grid, const float* weight, const float* importance,
                          const std::vector<float>& coarse, const std::vector<float>& fine, int threads, void* scale,
                          uint8_t* zero) {
  constexpr int64_t kTogether = 4;  // vectors, so that a piece is some cache lines of each row
  const int64_t width = kTogether * kLanes, pieces = (grid.outputs + width - 1) / width;
  Pool::instance().parallel_for(grid.groups() * pieces, 1, threads, [&](int64_t item) {
    const int64_t group = item / pieces, end = std::min((item % pieces + 1) * width, grid.outputs);
    AlignedFloats memory;
    float* values = memory.resize(grid.size * kLanes);
    for (int64_t output = item % pieces * width; output < end; output += kLanes) {
      const int64_t count = std::min<int64_t>(kLanes, end - output);
      const float* from = weight + group * grid.size * grid.outputs + output;
      for (int64_t i = 0; i < grid.size; ++i) store(load_part(from + i * grid.outputs, count), values + i * kLanes);
      ScaleSearch search(grid, importance + group * grid.size, values);
      for (const float factor : coarse) search.attempt(filled(factor));
      const Vector middle = search.best();
      for (const float beside : fine) search.attempt(middle + beside);
      float lanes[kLanes];
      const int64_t place = group * grid.outputs + output;
      store(search.scale(), lanes);
      store_floats(lanes, count, scale, grid.scales, place);
      store(search.offset(), lanes);
      if (zero)
        for (int64_t lane = 0; lane < count; ++lane) zero[place + lane] = static_cast<uint8_t>(lanes[lane]);
    }
  });
}

// Columns that are rounded in turn; see `ColumnKernels`. Scale and zero points are float32 here.
struct Columns {
  int64_t count;
  const float *start, *ratios;
  const int64_t* numbers;
  const float *scale, *zero;
  float *codes, *errors;
};

// Round for each output one column after the other, each moved by the errors of those before; `steps` says what is
// rounded, in units of the scale, and `error` what the later ones are moved by.
template <class Steps, class Error>
void each_in_turn(const CodeGrid& grid, const Columns& at, int threads, const Steps& steps, const Error& error) {
  const int64_t outputs = grid.outputs, pieces = (outputs + kLanes - 1) / kLanes;
  Pool::instance().parallel_for(pieces, 4, threads, [&](int64_t piece) {
    const int64_t output = piece * kLanes, count = std::min<int64_t>(kLanes, outputs - output);
    AlignedFloats memory;
    float* errors = memory.resize(at.count * kLanes);
    for (int64_t i = 0; i < at.count; ++i) {
      Vector here = load_part(at.start + i * outputs + output, count);
      for (int64_t j = 0; j < i; ++j) here += at.ratios[j * at.count + i] * load(errors + j * kLanes);
      const int64_t column = at.numbers[i], group = column / grid.size * outputs + output;
      const Vector scale = load_part(at.scale + group, count, 1);
      Vector low = filled(-static_cast<float>(grid.levels / 2));
      if (!grid.symmetric) low = -load_part(at.zero + group, count);
      float* place = at.codes + column * outputs + output;
      const Vector code =
          nearest_whole(limited_to(steps(i, here / scale, place, count), low, low + static_cast<float>(grid.levels - 1)));
      const Vector wrong = error(i, code, scale, place, output, count);
      store(wrong, errors + i * kLanes);
      store_part(code, place, count);
      store_part(wrong, at.errors + i * outputs + output, count);
    }
  });
}

inline void round_in_turn(const CodeGrid& grid, const Columns& at, const float* wanted, int threads) {
  each_in_turn(
      grid, at, threads, [](int64_t, Vector here, const float*, int64_t) { return here; },
      [&](int64_t i, Vector code, Vector scale, const float*, int64_t output, int64_t count) {
        return load_part(wanted + i * grid.outputs + output, count) - code * scale;
      });
}

inline void improve_in_turn(const CodeGrid& grid, const Columns& at, const float* inverse, int threads) {
  each_in_turn(
      grid, at, threads,
      [&](int64_t i, Vector here, const float* before, int64_t count) { return load_part(before, count) + here * inverse[i]; },
      [](int64_t, Vector code, Vector scale, const float* before, int64_t, int64_t count) {
        return (load_part(before, count) - code) * scale;
      });
}

}  // namespace quantkit
