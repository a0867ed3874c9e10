// The feed-forward half of a decoder block: gated linear units (2002.05202), or squares of what is positive (2109.08668).
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "branch.h"
#include "matmul.h"
#include "vector_math.h"

namespace quantkit {

enum class Activation { silu, gelu_tanh, swiglu_oai, relu2 };

// How gates and what they gate become inner states.
struct Gating {
  Activation activation;
  float limit;  // of swiglu_oai: of gates from above, and either way of what they gate

  // Values of the first linear that become one inner state: relu2 has no gate.
  int64_t parts() const { return activation == Activation::relu2 ? 1 : 2; }
};

struct FeedForward {
  Branch branch;
  Projection gate_up;
  Linear down;
  Gating gating;
};

constexpr int64_t kInnerRows = 512;  // of inner states of the feed-forward in memory at a time

// Inner states [F] of gates [F] and what they gate [F]; of relu2, of the first alone.
inline void gated(const Gating& by, const float* gate, const float* up, int64_t inner, float* to) {
  switch (by.activation) {
    case Activation::silu:
      for (int64_t i = 0; i < inner; ++i) to[i] = gate[i] / (1 + exponential(-gate[i])) * up[i];
      break;
    case Activation::gelu_tanh:  // (1 + tanh(u)) / 2 = 1 / (1 + e^-2u) with u = sqrt(2 / pi) (x + 0.044715 x^3)
      for (int64_t i = 0; i < inner; ++i) {
        const float x = gate[i], twice = 1.595769122f * x * (1 + 0.044715f * x * x);
        to[i] = x / (1 + exponential(-twice)) * up[i];
      }
      break;
    case Activation::swiglu_oai:
      for (int64_t i = 0; i < inner; ++i) {
        const float x = gate[i] > by.limit ? by.limit : gate[i];
        to[i] = x / (1 + exponential(-1.702f * x)) * (limited(up[i], -by.limit, by.limit) + 1);
      }
      break;
    case Activation::relu2:
      for (int64_t i = 0; i < inner; ++i) {
        const float x = gate[i] < 0 ? 0 : gate[i];  // NaN stays NaN
        to[i] = x * x;
      }
  }
}

// The half: add to hidden states x [rows, D] what it computes of `source` [rows, D], which may be x.
inline void run_feed_forward(const FeedForward& half, const float* source, float* x, int64_t rows, int threads) {
  const int64_t hidden = half.gate_up.columns(), inner = half.down.at.columns, max_rows = std::min(rows, kInnerRows);
  const int64_t width = half.gating.parts() * inner;
  const Scratch scratch(half.branch.input_norm ? max_rows * hidden : 0);
  const Scratch gates(max_rows * width), inners(max_rows * inner);
  for (int64_t count; rows > 0; rows -= count, source += count * hidden, x += count * hidden) {
    count = std::min(rows, max_rows);
    const float* normed = branch_input(half.branch, source, count, hidden, threads, scratch.get());
    project(half.gate_up, normed, FloatType::f32, count, threads, gates.get());
    each_row(count, threads, [&](int64_t r) {
      const float* gate = gates.get() + r * width;
      gated(half.gating, gate, gate + inner, inner, inners.get() + r * inner);
    });
    add_product(half.branch, half.down, inners.get(), count, threads, x);
  }
}

}  // namespace quantkit
