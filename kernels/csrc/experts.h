// A mixture of experts: a router chooses some of many gated feed-forwards for each token.
//
// Rows are grouped by expert, so that the weights of each chosen one are read once for all its rows, and no others. The
// experts' bands go to the threads in one loop. The result for a row has the same bits whatever the other rows: its
// experts are added up in the order of their numbers.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "branch.h"
#include "feed_forward.h"
#include "matmul.h"
#include "vector_math.h"

namespace quantkit {

struct Router {
  const void* weight;  // [E, D]
  FloatType type;      // of the weight
  const float* bias;   // [E], or null
  const float* correction;  // [E], of the scores by which experts are chosen, but not of shares (2408.15664); or null
  int64_t experts, per_token;
  bool sigmoid;     // scores are sigmoids of each logit, rather than a softmax
  bool normalized;  // the scores of a token's experts are divided by their sum
  float normalization_eps, scaling;  // added to that sum; a factor of all shares
};

// An expert that a row goes to, and what its output is multiplied by.
struct Choice {
  int64_t expert;
  float share;
};

// The experts of each row [rows, per_token] by their scores, the largest first; of equal ones the lower number first.
inline void route(const Router& router, const float* x, int64_t rows, int64_t columns, int threads, Choice* choices) {
  const int64_t experts = router.experts, per_token = router.per_token;
  // A softmax has the order of its logits.
  const bool by_logits = !router.sigmoid && !router.correction;
  std::vector<float> all(rows * experts), ranks(by_logits ? 0 : rows * experts);
  const FloatRows weight{router.weight, router.type, experts, nullptr};
  float_products(&weight, 1, columns, x, FloatType::f32, rows, threads, all.data(),
                 experts);
  Pool::instance().parallel_for(rows, 16, threads, [&](int64_t row) {
    float* logits = all.data() + row * experts;
    if (router.bias)
      for (int64_t e = 0; e < experts; ++e) logits[e] += router.bias[e];
    const float max = router.sigmoid ? 0 : largest(logits, experts);
    // Scores are this, divided by `whole`.
    const auto numerator = [&](int64_t e) {
      return router.sigmoid ? 1 / (1 + exponential(-logits[e])) : exponential(logits[e] - max);
    };
    float whole = 1;
    if (!router.sigmoid && (router.correction || router.normalization_eps > 0 || !router.normalized)) {
      whole = 0;
      for (int64_t e = 0; e < experts; ++e) whole += numerator(e);
    }
    const float* ranked = logits;
    if (!by_logits) {
      float* to = ranks.data() + row * experts;
      for (int64_t e = 0; e < experts; ++e)
        to[e] = numerator(e) / whole + (router.correction ? router.correction[e] : 0);
      ranked = to;
    }
    float sum = router.normalization_eps * whole;
    Choice* chosen = choices + row * per_token;
    for (int64_t k = 0; k < per_token; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        const bool taken = std::any_of(chosen, chosen + k, [&](const Choice& one) { return one.expert == e; });
        if (!taken && (best < 0 || ranked[e] > ranked[best])) best = e;  // NaN is never larger, and never left out
      }
      chosen[k] = {best, numerator(best)};
      sum += chosen[k].share;
    }
    const float divisor = router.normalized ? sum : whole;
    for (int64_t k = 0; k < per_token; ++k) chosen[k].share = chosen[k].share / divisor * router.scaling;
  });
}

// A feed-forward: rows of the gate, if it has one, above those of what it gates.
struct Expert {
  Linear gate_up, down;
};

// A feed-forward and the rows that go through it.
struct ExpertRows {
  Expert expert;
  std::vector<int64_t> rows;   // rising
  std::vector<float> factors;  // of what it gives for each
  std::vector<float> input_factors;  // of each row before it; empty if there are none
};

// Experts of one shape, one after the other: packed, or floats.
struct ExpertBank {
  Expert first;
  int64_t count, gate_up_bytes, down_bytes;  // of an expert's weights, to the next one's

  Expert operator[](int64_t expert) const {
    Expert at = first;
    at.gate_up.bands += expert * gate_up_bytes;
    at.down.bands += expert * down_bytes;
    if (first.gate_up.bias) at.gate_up.bias = static_cast<const float*>(first.gate_up.bias) + expert * first.gate_up.at.rows;
    if (first.down.bias) at.down.bias = static_cast<const float*>(first.down.bias) + expert * first.down.at.rows;
    return at;
  }
};

// The rows of each chosen expert, in the order of the experts. Shares multiply what it reads, or what it gives.
inline std::vector<ExpertRows> grouped(const ExpertBank& bank, const Choice* choices, int64_t rows, int64_t per_token,
                                       float factor, bool weighted_inputs = false) {
  std::vector<int64_t> place(bank.count, -1);
  for (int64_t i = 0; i < rows * per_token; ++i) place[choices[i].expert] = 0;
  std::vector<ExpertRows> groups;
  for (int64_t e = 0; e < bank.count; ++e) {
    if (place[e] < 0) continue;
    place[e] = static_cast<int64_t>(groups.size());
    groups.push_back({bank[e], {}, {}, {}});
  }
  for (int64_t i = 0; i < rows * per_token; ++i) {
    ExpertRows& group = groups[place[choices[i].expert]];
    group.rows.push_back(i / per_token);
    group.factors.push_back(weighted_inputs ? factor : choices[i].share * factor);
    if (weighted_inputs) group.input_factors.push_back(choices[i].share);
  }
  return groups;
}

constexpr int64_t kChosen = 2048;  // rows of experts' outputs in memory at a time

// Tokens at a time.
inline int64_t max_rows(int64_t per_token) { return std::clamp<int64_t>(kChosen / per_token, 1, kInnerRows); }

// What the pieces of several groups are counted by: the first of each group, and the end.
class Pieces {
 public:
  void add(int64_t count) { first_.push_back(first_.back() + count); }
  int64_t count() const { return first_.back(); }
  int64_t first(int64_t group) const { return first_[group]; }
  // The group of a piece, and which of its pieces it is.
  std::pair<int64_t, int64_t> operator[](int64_t piece) const {
    const int64_t group = std::upper_bound(first_.begin(), first_.end(), piece) - first_.begin() - 1;
    return {group, piece - first_[group]};
  }

 private:
  std::vector<int64_t> first_{0};
};

// The activations of some tokens for a linear: integers, or floats together with the product.
struct ExpertInput {
  std::optional<Workspace> integers;
  std::optional<FloatProduct> floats;

  ExpertInput(const Linear& linear, int64_t tokens) {
    if (linear.of_floats()) {
      const FloatRows rows = linear.float_rows();
      floats.emplace(&rows, 1, linear.at.columns, FloatType::f32, tokens);
    } else {
      integers.emplace(linear.at, tokens);
    }
  }

  // Take a row of some columns as a token.
  void take(const float* row, int64_t columns, int64_t token) const {
    if (floats)
      floats->take(row, 0, token);
    else
      integers->quantize(row, columns, token, 0);
  }
};

// One of several products that threads share: y [tokens, O] of activations, and the linear's biases.
struct Product {
  const Linear* linear;
  const ExpertInput* x;
  int64_t tokens;
  float* y;

  int64_t pairs() const { return (linear->at.bands() + kBands - 1) / kBands; }
  int64_t pieces() const { return x->floats ? x->floats->count() : (tokens + kPanel - 1) / kPanel * pairs(); }
};

// Each weight is read from front to back, by as few threads as can be: a thread's bands lie one after the other.
inline void run_products(const std::vector<Product>& products, int threads) {
  Pieces pieces;
  for (const Product& one : products) pieces.add(one.pieces());
  Pool::instance().parallel_for(pieces.count(), 1, threads, [&](int64_t index) {
    const auto [g, piece] = pieces[index];
    const Product& one = products[g];
    const Layout& at = one.linear->at;
    if (one.x->floats) return one.x->floats->run_piece(piece, one.y, at.rows, false);
    const int64_t token = piece / one.pairs() * kPanel, count = std::min(kPanel, one.tokens - token);
    const int64_t band = piece % one.pairs() * kBands, bands = std::min<int64_t>(kBands, at.bands() - band);
    alignas(64) float out[kBands][kPanel * kRows];
    band_products(at, one.linear->bands + band * at.band_bytes(), bands, *one.x->integers, token, count, out[0], kPanel * kRows);
    for (int64_t n = 0; n < bands; ++n) {
      const int64_t row = (band + n) * kRows, rows = std::min(kRows, at.rows - row);
      const float* bias = static_cast<const float*>(one.linear->bias);
      for (int64_t t = 0; t < count; ++t) {
        float* to = one.y + (token + t) * at.rows + row;
        for (int64_t r = 0; r < rows; ++r) to[r] = out[n][t * kRows + r] + (bias ? bias[row + r] : 0);
      }
    }
  });
}

// y += what the groups give for their rows of x [N, D], both float32; each row's in the order of the groups.
inline void run_grouped(const std::vector<ExpertRows>& groups, const Gating& gating, const float* x, int64_t hidden,
                        int64_t rows, int threads, float* y) {
  std::vector<ExpertInput> inputs, inner;
  std::vector<int64_t> input_of;  // of each group
  Pieces taken, chosen, values;
  for (const ExpertRows& group : groups) {
    const Linear &wide = group.expert.gate_up, &narrow = group.expert.down;
    const int64_t count = group.rows.size(), before = input_of.size() - 1;
    // A single row that goes to several becomes integers once, unless each multiplies it by something else.
    const bool again = before >= 0 && rows == 1 && !wide.of_floats() && group.input_factors.empty() &&
                       groups[before].input_factors.empty() && wide.at.like(groups[before].expert.gate_up.at);
    if (!again) inputs.emplace_back(wide, count);
    input_of.push_back(inputs.size() - 1);
    taken.add(again ? 0 : count);
    inner.emplace_back(narrow, count);
    chosen.add(count);
    values.add(count * wide.at.rows);
  }
  each_row(taken.count(), threads, [&](int64_t index) {
    const auto [g, token] = taken[index];
    const float* row = x + groups[g].rows[token] * hidden;
    thread_local AlignedFloats memory;
    if (!groups[g].input_factors.empty()) {
      float* scaled = memory.resize(hidden);
      for (int64_t i = 0; i < hidden; ++i) scaled[i] = row[i] * groups[g].input_factors[token];
      row = scaled;
    }
    inputs[input_of[g]].take(row, hidden, token);
  });
  const Scratch gates(values.count()), outputs(chosen.count() * hidden);
  std::vector<Product> wide, narrow;
  std::vector<std::vector<std::pair<int64_t, float>>> of_row(rows);  // where its outputs are, and their factors
  for (size_t g = 0; g < groups.size(); ++g) {
    const Expert& expert = groups[g].expert;
    const std::vector<int64_t>& at = groups[g].rows;
    const std::vector<float>& factors = groups[g].factors;
    const int64_t count = at.size();
    wide.push_back({&expert.gate_up, &inputs[input_of[g]], count, gates.get() + values.first(g)});
    narrow.push_back({&expert.down, &inner[g], count, outputs.get() + chosen.first(g) * hidden});
    for (int64_t i = 0; i < count; ++i) of_row[at[i]].push_back({chosen.first(g) + i, factors[i]});
  }
  run_products(wide, threads);
  each_row(chosen.count(), threads, [&](int64_t index) {
    const auto [g, token] = chosen[index];
    const int64_t width = groups[g].expert.down.at.columns;
    float* gate = gates.get() + values.first(g) + token * gating.parts() * width;
    gated(gating, gate, gate + width, width, gate);
    inner[g].take(gate, width, token);
  });
  run_products(narrow, threads);
  each_row(rows, threads, [&](int64_t row) {
    for (const auto& [at, factor] : of_row[row])
      for (int64_t i = 0; i < hidden; ++i) y[row * hidden + i] += factor * outputs[at * hidden + i];
  });
}

// Linears from hidden states to the narrower ones that experts see, and from the sum of their outputs back.
struct Latents {
  Linear in, out;
};

// The feed-forward half of a block that has experts.
struct Experts {
  Branch branch;
  Router router;
  bool weighted_inputs;  // whether shares multiply what chosen experts read, rather than what they give
  ExpertBank bank;
  Gating gating;
  std::optional<Latents> latents;
  std::optional<Expert> shared;  // takes every token, at the width of the hidden states
  const float* shared_gate;      // [D], whose product with a row is the logit of the shared one's share; null is all
};

// The half: add to hidden states x [rows, D] what it computes of `source` [rows, D], which may be x.
inline void run_experts(const Experts& half, const float* source, float* x, int64_t rows, int threads) {
  const int64_t width = half.bank.first.down.at.rows, per_token = half.router.per_token;
  const int64_t hidden = half.latents ? half.latents->in.at.columns : width;
  // Each expert's output is added to the hidden states as it comes.
  const bool direct = !half.branch.output_norm && !half.latents;
  const float factor = direct ? half.branch.multiplier : 1;
  const int64_t most = std::min(rows, max_rows(per_token));
  const Scratch scratch(most * hidden), latents(half.latents ? most * width : 0);
  std::vector<Choice> choices(most * per_token);
  std::vector<float> output, mixed;
  for (int64_t count; rows > 0; rows -= count, source += count * hidden, x += count * hidden) {
    count = std::min(rows, max_rows(per_token));
    const float* normed = branch_input(half.branch, source, count, hidden, threads, scratch.get());
    if (normed == x && direct) normed = std::copy_n(x, count * hidden, scratch.get()) - count * hidden;
    route(half.router, normed, count, hidden, threads, choices.data());
    if (!direct) output.assign(count * hidden, 0);
    float* to = direct ? x : output.data();
    std::vector<ExpertRows> groups =
        grouped(half.bank, choices.data(), count, per_token, factor, half.weighted_inputs);
    if (half.latents) {
      matmul(half.latents->in, normed, FloatType::f32, count, threads, latents.get());
      mixed.assign(count * width, 0);
      run_grouped(groups, half.gating, latents.get(), width, count, threads, mixed.data());
      matmul(half.latents->out, mixed.data(), FloatType::f32, count, threads, to, true);
      groups.clear();
    }
    if (half.shared) {
      groups.push_back({*half.shared, std::vector<int64_t>(count), std::vector<float>(count, factor), {}});
      for (int64_t row = 0; row < count; ++row) {
        groups.back().rows[row] = row;
        if (half.shared_gate)
          groups.back().factors[row] /= 1 + exponential(-dot(normed + row * hidden, half.shared_gate, hidden));
      }
    }
    if (!groups.empty()) run_grouped(groups, half.gating, normed, hidden, count, threads, to);
    if (!direct) add_output(half.branch, output.data(), count, hidden, threads, x);
  }
}

}  // namespace quantkit
