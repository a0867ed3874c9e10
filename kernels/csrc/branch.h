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
  float multiplier;  // of the output
};

// Call work(r) for all rows, on several threads where they are many.
template <class Work>
void each_row(int64_t rows, int threads, const Work& work) {
  Pool::instance().parallel_for(rows, 1, rows > 4 ? threads : 1, work);
}

// What root-mean-square norms multiply a row by (1910.07467).
inline float rms_factor(const float* x, int64_t size, float eps) {
  return 1 / std::sqrt(dot(x, x, size) / static_cast<float>(size) + eps);
}

// Root-mean-square norm of one row.
inline void rms_norm(const float* x, const float* weight, int64_t size, float eps, float* y) {
  const float factor = rms_factor(x, size, eps);
  for (int64_t i = 0; i < size; ++i) y[i] = x[i] * factor * weight[i];
}

// What a branch reads of hidden states x [rows, D]: them, or their norms in `scratch` [rows, D].
inline const float* branch_input(const Branch& branch, const float* x, int64_t rows, int64_t hidden, int threads,
                                 float* scratch) {
  if (!branch.input_norm) return x;
  each_row(rows, threads, [&](int64_t r) {
    rms_norm(x + r * hidden, branch.input_norm, hidden, branch.eps, scratch + r * hidden);
  });
  return scratch;
}

// Add the output [rows, D] of a branch to the hidden states x [rows, D].
inline void add_output(const Branch& branch, const float* output, int64_t rows, int64_t hidden, int threads,
                       float* x) {
  each_row(rows, threads, [&](int64_t r) {
    const float *of = output + r * hidden, *weight = branch.output_norm;
    float *to = x + r * hidden, factor = branch.multiplier;
    if (weight) factor *= rms_factor(of, hidden, branch.eps);
    for (int64_t i = 0; i < hidden; ++i) to[i] += factor * of[i] * (weight ? weight[i] : 1);
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
