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

// The numbers that codes stand for, at most 256 that rise, and one fewer bounds between them; see `CodeTable`.
struct Table {
  int64_t count;  // 0: codes are whole numbers
  const float *values, *bounds;
};

// Codes and how inputs share them; without zero points codes are signed.
struct CodeGrid {
  int64_t inputs, outputs, size;  // size: inputs of a group
  int64_t levels;
  Table table;
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

// Rounds quotients to the nearest of `levels` whole numbers from `low` on.
struct WholeNumbers {
  static constexpr bool kIsTable = false;
  float top;  // of those from 0 on

  explicit WholeNumbers(const CodeGrid& grid) : top(grid.levels - 1) {}

  Vector operator()(Vector quotient, Vector low) const {
    return nearest_whole(limited_to(quotient, low, low + top));
  }
};

// Rounds quotients to the nearest numbers of a table.
struct TableNumbers {
  static constexpr bool kIsTable = true;
  const Table table;

  explicit TableNumbers(const CodeGrid& grid) : table(grid.table) {}

  Vector operator()(Vector quotient, Vector) const {
    return table.count <= kCompared ? compared(quotient) : bisected(quotient);
  }

 private:
  // Numbers up to which comparing with all bounds, without loads that depend on each other, is faster.
  static constexpr int64_t kCompared = 16;

  Vector compared(Vector quotient) const {
    Vector nearest = filled(table.values[0]);
    for (int64_t i = 1; i < table.count; ++i)
      nearest = quotient <= table.bounds[i - 1] ? nearest : filled(table.values[i]);
    return nearest;
  }

  Vector bisected(Vector quotient) const {
    float lanes[kLanes];
    int32_t first[kLanes] = {};
    store(quotient, lanes);
    for (int32_t count = table.count; count > 1;) {
      const int32_t half = count / 2;
      for (int lane = 0; lane < kLanes; ++lane)  // NaN is above all bounds
        first[lane] += lanes[lane] <= table.bounds[first[lane] + half - 1] ? 0 : half;
      count -= half;
    }
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = table.values[first[lane]];
    return load(lanes);
  }
};

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
template <class Rounding>
class ScaleSearch {
 public:
  ScaleSearch(const CodeGrid& grid, const float* importance, const float* values)
      : grid_(grid), rounding_(grid), importance_(importance), values_(values), top_(grid.levels - 1) {
    Vector low = {}, high = {};
    for (int64_t i = 0; i < grid.size; ++i) {
      const Vector value = load(values + i * kLanes);
      low = value < low ? value : low;
      high = value > high ? value : high;
    }
    low_ = low;
    best_ = offset_ = scale_ = filled(1);
    if constexpr (Rounding::kIsTable) {
      const float first = grid.table.values[0], last = grid.table.values[grid.table.count - 1];
      span_ = larger(high / last, low / first);
      turned_span_ = larger(high / -first, low / -last);
      scale_ = as_stored(span_);  // kept where squares overflow
    } else {
      span_ = turned_span_ = grid.symmetric ? larger(-low, high) / (top_ / 2) : (high - low) / top_;
    }
    if (grid.symmetric) offset_ = filled(static_cast<float>(grid.levels / 2));
    loss_ = filled(std::numeric_limits<float>::infinity());
  }

  // Take `factor` spans as the step wherever that loses less than the best so far; then also the step that fits its
  // codes best, where these are in a table.
  void attempt(Vector factor) {
    const Vector step = as_stored((factor < 0 ? turned_span_ : span_) * factor);
    const Vector fitted = compare(step, factor);
    if constexpr (Rounding::kIsTable) compare(as_stored(fitted), factor);
  }

  Vector best() const { return best_; }
  Vector scale() const { return scale_; }
  Vector offset() const { return offset_; }

 private:
  static constexpr float kLess = 1 - 1e-6f;  // steps of both signs often lose the same but for rounding

  static Vector larger(Vector a, Vector b) { return a > b ? a : b; }

  Vector as_stored(Vector step) const {
    float lanes[kLanes];
    store(step, lanes);
    for (float& lane : lanes) {
      if (grid_.scales == FloatType::bf16) lane = from_bf16(to_bf16(lane));
      if (grid_.scales == FloatType::f16) lane = from_f16(to_f16(lane));
    }
    return load(lanes);
  }

  // Take a step wherever that loses less than the best so far; return the one that fits the codes of a table best, by
  // weighted least squares.
  Vector compare(Vector step, Vector factor) {
    Vector low = filled(-static_cast<float>(grid_.levels / 2)), offset = offset_;
    if (!grid_.symmetric) {
      offset = limited_to(nearest_whole(-low_ * factor / step), Vector{}, filled(top_));
      low = -offset;
    }
    Vector loss = {}, product = {}, square = {};
    for (int64_t i = 0; i < grid_.size; ++i) {
      const Vector value = load(values_ + i * kLanes);
      const Vector code = rounding_(value / step, low);
      const Vector error = code * step - value;
      loss += importance_[i] * error * error;
      if constexpr (Rounding::kIsTable) {
        product += importance_[i] * code * value;
        square += importance_[i] * code * code;
      }
    }
    const auto better = (loss < loss_ * kLess) & (step != 0);  // never true of NaN
    loss_ = better ? loss : loss_;
    best_ = better ? factor : best_;
    scale_ = better ? step : scale_;
    offset_ = better ? offset : offset_;
    return product / square;
  }

  const CodeGrid& grid_;
  const Rounding rounding_;
  const float *importance_, *values_;
  const float top_;
  Vector low_, span_, turned_span_, best_, scale_, offset_, loss_;
};

// Scale [G, O] and, where there is a zero point, that [G, O], for weights [I, O]: the best of the steps of `coarse`
// times what spans the group, then of those that are `fine` away from it.
template <class Rounding>
void search_scales_of(const CodeGrid& grid, const float* weight, const float* importance,
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
      ScaleSearch<Rounding> search(grid, importance + group * grid.size, values);
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

inline void search_scales(const CodeGrid& grid, const float* weight, const float* importance,
                          const std::vector<float>& coarse, const std::vector<float>& fine, int threads, void* scale,
                          uint8_t* zero) {
  const auto search = grid.table.count ? search_scales_of<TableNumbers> : search_scales_of<WholeNumbers>;
  search(grid, weight, importance, coarse, fine, threads, scale, zero);
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
template <class Rounding, class Steps, class Error>
void each_in_turn_to(const CodeGrid& grid, const Columns& at, int threads, const Steps& steps, const Error& error) {
  const Rounding rounding(grid);
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
      const Vector code = rounding(steps(i, here / scale, place, count), low);
      const Vector wrong = error(i, code, scale, place, output, count);
      store(wrong, errors + i * kLanes);
      store_part(code, place, count);
      store_part(wrong, at.errors + i * outputs + output, count);
    }
  });
}

template <class Steps, class Error>
void each_in_turn(const CodeGrid& grid, const Columns& at, int threads, const Steps& steps, const Error& error) {
  if (grid.table.count)
    each_in_turn_to<TableNumbers>(grid, at, threads, steps, error);
  else
    each_in_turn_to<WholeNumbers>(grid, at, threads, steps, error);
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
