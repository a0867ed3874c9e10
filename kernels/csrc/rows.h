// A few tokens times a weight of floats, row by row: what the head of a quantized model often is.
#pragma once

#include <cstdint>
#include <vector>

#include "dot.h"
#include "floats.h"
#include "threads.h"

namespace quantkit {

// y[m, n] = sum over k of x[m, k] w[n, k]; x and y of one type, the weight of another or the same.
inline void rows_product(int64_t rows, int64_t columns, const void* weight, FloatType weight_type, const void* x,
                         FloatType type, int64_t tokens, int threads, void* y) {
  std::vector<float> wide(tokens * columns);
  for (int64_t m = 0; m < tokens; ++m) {
    float* row = wide.data() + m * columns;
    const float* loaded = load_floats(x, type, m * columns, columns, row);
    if (loaded != row) std::copy_n(loaded, columns, row);
  }
  Pool::shared().share(rows, 64, threads, [&](int64_t n) {
    thread_local std::vector<float> room;
    room.resize(columns);
    const float* w = load_floats(weight, weight_type, n * columns, columns, room.data());
    for (int64_t m = 0; m < tokens; ++m) {
      const float value = dot(wide.data() + m * columns, w, columns);
      store_floats(&value, 1, y, type, m * rows + n);
    }
  });
}

}  // namespace quantkit
