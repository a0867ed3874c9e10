// A mixture of experts: a router chooses some of many gated feed-forwards for each token.
//
// Rows are grouped by expert, so that the weights of each chosen one are read once for all its rows, and no others. The
// experts' bands go to the threads in one loop. What a row gives has the same bits whichever rows are beside it: its
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
  int64_t experts, per_token;
  bool normalized;  // the shares of a token's experts add up to 1, rather than those of all
};

// An expert that a row goes to, and what its output is multiplied by.
struct Choice {
  int64_t expert;
  float share;
};

// The experts of each row [rows, per_token] by their shares in the softmax over all, the largest first; of equal ones
// the lower number first.
inline void route(const Router& router, const float* x, int64_t rows, int64_t columns, int threads, Choice* choices) {
  const int64_t experts = router.experts, per_token = router.per_token;
  std::vector<float> all(rows * experts);
  float_product(experts, columns, router.weight, router.type, x, FloatType::f32, rows, threads, all.data(), 1);
  Pool::instance().parallel_for(rows, 16, threads, [&](int64_t row) {
    float* logits = all.data() + row * experts;
    if (router.bias)
      for (int64_t e = 0; e < experts; ++e) logits[e] += router.bias[e];
    const float max = largest(logits, experts);
    float sum = 0;
    if (!router.normalized)
      for (int64_t e = 0; e < experts; ++e) sum += exponential(logits[e] - max);
    Choice* chosen = choices + row * per_token;
    for (int64_t k = 0; k < per_token; ++k) {
      int64_t best = -1;
      for (int64_t e = 0; e < experts; ++e) {
        const bool taken = std::any_of(chosen, chosen + k, [&](const Choice& one) { return one.expert == e; });
        if (!taken && (best < 0 || logits[e] > logits[best])) best = e;  // NaN is never larger, and never left out
      }
      chosen[k] = {best, exponential(logits[best] - max)};
      if (router.normalized) sum += chosen[k].share;
    }
    for (int64_t k = 0; k < per_token; ++k) chosen[k].share /= sum;
  });
}

// A gated feed-forward: rows of the gate above those of what it gates.
struct Expert {
  Linear gate_up, down;
};

// A feed-forward and the rows that go through it.
struct ExpertRows {
  Expert expert;
  std::vector<int64_t> rows;   // rising
  std::vector<float> factors;  // of what it gives for each
};

// Experts of one shape, packed one after the other.
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

// The rows of each chosen expert, in the order of the experts.
inline std::vector<ExpertRows> grouped(const ExpertBank& bank, const Choice* choices, int64_t rows, int64_t per_token,
                                       float factor) {
  std::vector<int64_t> place(bank.count, -1);
  for (int64_t i = 0; i < rows * per_token; ++i) place[choices[i].expert] = 0;
  std::vector<ExpertRows> groups;
  for (int64_t e = 0; e < bank.count; ++e) {
    if (place[e] < 0) continue;
    place[e] = static_cast<int64_t>(groups.size());
    groups.push_back({bank[e], {}, {}});
  }
  for (int64_t i = 0; i < rows * per_token; ++i) {
    ExpertRows& group = groups[place[choices[i].expert]];
    group.rows.push_back(i / per_token);
    group.factors.push_back(choices[i].share * factor);
  }
  return groups;
}

constexpr int64_t kDownBands = 8;       // of outputs that a thread takes through all experts at a time
constexpr int64_t kStreamStart = 4096;  // bytes

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

// Ask for the beginning of bands that come soon: to follow a stream the processor must have seen some of it.
inline void prefetch(const Linear& linear, int64_t band) {
  const uint8_t* from = linear.bands + band * linear.at.band_bytes();
  const int64_t bytes = std::min(kStreamStart, (linear.at.bands() - band) * linear.at.band_bytes());
  for (int64_t at = 0; at < bytes; at += kLine) __builtin_prefetch(from + at);
}

// out[n][t * 16 + r]: products of some bands of a linear with tokens of a panel, biases added.
inline void panel_products(const Linear& linear, int64_t band, int64_t bands, const Workspace& x, int64_t token,
                           int64_t count, float* out) {
  const Layout& at = linear.at;
  for (int64_t n = 0; n < bands; n += kBands)
    band_products(at, linear.bands + (band + n) * at.band_bytes(), std::min<int64_t>(kBands, bands - n), x, token,
                  count, out + n * kPanel * kRows, kPanel * kRows);
  if (!linear.bias) return;
  for (int64_t n = 0; n < bands; ++n) {
    const float* bias = static_cast<const float*>(linear.bias) + (band + n) * kRows;
    const int64_t rows = std::min(kRows, at.rows - (band + n) * kRows);
    for (int64_t t = 0; t < count; ++t)
      for (int64_t r = 0; r < rows; ++r) out[(n * kPanel + t) * kRows + r] += bias[r];
  }
}

// y += what the groups give for their rows of x [N, D], both float32.
inline void run_grouped(const std::vector<ExpertRows>& groups, const Gating& gating, const float* x, int64_t columns,
                        int threads, float* y) {
  if (groups.empty()) return;
  Pool& pool = Pool::instance();
  std::vector<Workspace> inputs, inner;
  std::vector<size_t> input_of;
  Pieces rows, bands, values, all;
  const auto same = [](const Layout& a, const Layout& b) {
    return a.bits == b.bits && a.exact == b.exact && a.zeros == b.zeros;
  };
  for (const ExpertRows& group : groups) {
    const Layout &wide = group.expert.gate_up.at, &narrow = group.expert.down.at;
    const int64_t count = static_cast<int64_t>(group.rows.size());
    // A single row that goes to several becomes integers once.
    const ExpertRows* before = inputs.empty() ? nullptr : &groups[input_of.size() - 1];
    const bool shared = before && count == 1 && before->rows == group.rows && same(before->expert.gate_up.at, wide);
    if (!shared) inputs.emplace_back(wide, count);
    input_of.push_back(inputs.size() - 1);
    rows.add(shared ? 0 : count);
    inner.emplace_back(narrow, count);
    bands.add((count + kPanel - 1) / kPanel * ((wide.bands() + kBands - 1) / kBands));
    values.add(count * wide.rows);
    all.add(count);
  }
  const int some = rows.count() > 1 ? threads : 1;
  pool.parallel_for(rows.count(), 1, some, [&](int64_t index) {
    const auto [g, token] = rows[index];
    inputs[input_of[g]].quantize(x + groups[g].rows[token] * columns, columns, token, 0);
  });
  const auto gates = uninitialized(values.count());
  pool.parallel_for(bands.count(), 1, threads, [&](int64_t index) {
    const auto [g, piece] = bands[index];
    const Linear& linear = groups[g].expert.gate_up;
    const int64_t per_panel = (linear.at.bands() + kBands - 1) / kBands, token = piece / per_panel * kPanel;
    const int64_t band = piece % per_panel * kBands, both = std::min<int64_t>(kBands, linear.at.bands() - band);
    const int64_t count = std::min<int64_t>(kPanel, groups[g].rows.size() - token);
    alignas(64) float out[kBands * kPanel * kRows];
    panel_products(linear, band, both, inputs[input_of[g]], token, count, out);
    for (int64_t n = 0; n < both; ++n) {
      const int64_t row = (band + n) * kRows, some = std::min(kRows, linear.at.rows - row);
      float* to = gates.get() + values.first(g) + token * linear.at.rows + row;
      for (int64_t t = 0; t < count; ++t) std::copy_n(out + (n * kPanel + t) * kRows, some, to + t * linear.at.rows);
    }
  });
  pool.parallel_for(all.count(), 1, all.count() > 4 ? threads : 1, [&](int64_t index) {
    const auto [g, token] = all[index];
    const int64_t width = groups[g].expert.down.at.columns;
    float* gate = gates.get() + values.first(g) + token * 2 * width;
    gated(gating, gate, gate + width, width, gate);
    inner[g].quantize(gate, width, token, 0);
  });
  const int64_t width = groups[0].expert.down.at.rows, down_bands = groups[0].expert.down.at.bands();
  pool.parallel_for((down_bands + kDownBands - 1) / kDownBands, 1, threads, [&](int64_t piece) {
    const int64_t first = piece * kDownBands, end = std::min(first + kDownBands, down_bands);
    alignas(64) float out[kBands * kPanel * kRows];
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto& [expert, at, factors] = groups[g];
      for (int64_t token = 0; token < static_cast<int64_t>(at.size()); token += kPanel) {
        const int64_t count = std::min<int64_t>(kPanel, at.size() - token);
        for (int64_t band = first; band < end; band += kBands) {
          const int64_t both = std::min<int64_t>(kBands, end - band);
          if (band + kBands >= end && token + kPanel >= static_cast<int64_t>(at.size()) && g + 1 < groups.size())
            prefetch(groups[g + 1].expert.down, first);
          panel_products(expert.down, band, both, inner[g], token, count, out);
          for (int64_t n = 0; n < both; ++n) {
            const int64_t row = (band + n) * kRows, some = std::min(kRows, width - row);
            for (int64_t t = 0; t < count; ++t) {
              float* sums = y + at[token + t] * width + row;
              for (int64_t r = 0; r < some; ++r) sums[r] += factors[token + t] * out[(n * kPanel + t) * kRows + r];
            }
          }
        }
      }
    }
  });
}

// The feed-forward half of a block that has experts.
struct Experts {
  Branch branch;
  Router router;
  ExpertBank bank;
  Gating gating;
  std::optional<Expert> shared;  // takes every token
  const float* shared_gate;      // [D], whose product with a row is the logit of the shared one's share; null is all
};

// The half, hidden states x [rows, D] in place.
inline void run_experts(const Experts& half, float* x, int64_t rows, int threads) {
  const int64_t hidden = half.bank.first.down.at.rows, per_token = half.router.per_token;
  const bool direct = !half.branch.output_norm;  // each expert's output is added to the hidden states as it comes
  const float factor = direct ? half.branch.multiplier : 1;
  const auto scratch = uninitialized(std::min(rows, kInnerRows) * hidden);
  std::vector<Choice> choices(std::min(rows, kInnerRows) * per_token);
  std::vector<float> output;
  for (int64_t count; rows > 0; rows -= count, x += count * hidden) {
    count = std::min(rows, kInnerRows);
    const float* normed = branch_input(half.branch, x, count, hidden, threads, scratch.get());
    if (normed == x && direct) normed = std::copy_n(x, count * hidden, scratch.get()) - count * hidden;
    route(half.router, normed, count, hidden, threads, choices.data());
    std::vector<ExpertRows> groups = grouped(half.bank, choices.data(), count, per_token, factor);
    if (half.shared) {
      groups.push_back({*half.shared, std::vector<int64_t>(count), std::vector<float>(count, factor)});
      for (int64_t row = 0; row < count; ++row) {
        groups.back().rows[row] = row;
        if (half.shared_gate)
          groups.back().factors[row] /= 1 + exponential(-dot(normed + row * hidden, half.shared_gate, hidden));
      }
    }
    if (!direct) output.assign(count * hidden, 0);
    run_grouped(groups, half.gating, normed, hidden, threads, direct ? x : output.data());
    if (!direct) add_output(half.branch, output.data(), count, hidden, threads, x);
  }
}

}  // namespace quantkit
