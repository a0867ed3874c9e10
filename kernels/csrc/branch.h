// The residual branches of a decoder block: what both halves of it, attention and feed-forward, have in common.
#pragma once

#include <cmath>
#include <cstdint>

#include "matmul.h"
#include "scratch.h"
#include "threads.h"
#include "vector_math.h"

namespace quantkit {

// How a branch reads the hidden states and how its output is added to them.
struct Branch {
  const float *input_norm, *output_norm;  // weights [D] of the norms before and after it; null where there is none
  float eps;
  bool centered;     // whether these norms subtract the mean first
  float multiplier;  // of the output
};

// Call work(r) for all rows, on several threads where they are many.
template <class Work>
void each_row(int64_t rows, int threads, const Work& work) {
  Pool::instance().parallel_for(rows, 1, rows > 4 ? threads : 1, work);
}

// What a norm subtracts from all values of a row, and what it multiplies the differences by.
struct NormTerms {
  float middle, factor;
};

// Those of a root-mean-square norm (1910.07467), or, centered, of a layer norm (1607.06450).
inline NormTerms norm_terms(const float* x, int64_t size, float eps, bool centered) {
  const float count = static_cast<float>(size);
  const float middle = centered ? total(x, size) / count : 0;
  const float squares = centered ? squared_distance(x, middle, size) : dot(x, x, size);
  return {middle, 1 / std::sqrt(squares / count + eps)};
}

// The norm of one row.
inline void norm(const float* x, const float* weight, int64_t size, float eps, bool centered, float* y) {
  const auto [middle, factor] = norm_terms(x, size, eps, centered);
  for (int64_t i = 0; i < size; ++i) y[i] = (x[i] - middle) * factor * weight[i];
}

inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
  norm(x, weight, size, eps, false, y);
}

// What a branch reads of hidden states x [rows, D]: them, or their norms in `scratch` [rows, D].
inline const float* branch_input(const Branch& branch, const float* x, int64_t rows, int64_t hidden, int threads,
                                 float* scratch) {
  if (!branch.input_norm) return x;
  each_row(rows, threads, [&](int64_t r) {
    norm(x + r * hidden, branch.input_norm, hidden, branch.eps, branch.centered, scratch + r * hidden);
  });
  return scratch;
}

// Add the output [rows, D] of a branch to the hidden states x [rows, D].
inline void add_output(const Branch& branch, const float* output, int64_t rows, int64_t hidden, int threads,
                       float* x) {
  each_row(rows, threads, [&](int64_t r) {
    const float *of = output + r * hidden, *weight = branch.output_norm;
    float *to = x + r * hidden, factor = branch.multiplier, middle = 0;
    if (weight) {
      const NormTerms terms = norm_terms(of, hidden, branch.eps, branch.centered);
      middle = terms.middle;
      factor *= terms.factor;
    }
    for (int64_t i = 0; i < hidden; ++i) to[i] += factor * (of[i] - middle) * (weight ? weight[i] : 1);
  });
}

// The same where the output is a product, of what the branch's last linear reads.
inline void add_product(const Branch& branch, const Linear& last, const float* inner, int64_t rows, int threads,
                        float* x) {
  if (!branch.output_norm && branch.multiplier == 1) return matmul(last, inner, FloatType::f32, rows, threads, x, true);
  const Scratch output(rows * last.at.rows);
  matmul(last, inner, FloatType::f32, rows, threads, output.get());
  add_output(branch, output.get(), rows, last.at.rows, threads, x);
}

}  // namespace quantkit
