// Torch's tensors as operands of the kernels, checked.
#pragma once

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "block_attention.h"
#include "experts.h"
#include "feed_forward.h"
#include "matmul.h"

namespace quantkit {

using Optional = std::optional<at::Tensor>;
using Optionals = c10::List<std::optional<at::Tensor>>;

constexpr int64_t kHead = 64;  // bytes before a packed weight's bands, which hold its layout

inline FloatType float_type(at::ScalarType type) {
  if (type == at::kFloat) return FloatType::f32;
  if (type == at::kHalf) return FloatType::f16;
  TORCH_CHECK(type == at::kBFloat16, "expected float32, float16 or bfloat16, found ", type);
  return FloatType::bf16;
}

inline CacheType cache_type(at::ScalarType type) {
  return type == at::kChar ? CacheType::i8 : static_cast<CacheType>(float_type(type));
}

// A packed weight and its bias, which is of the type of the activations.
inline Linear packed_linear(const at::Tensor& packed, const Optional& bias, at::ScalarType type) {
  TORCH_CHECK(packed.scalar_type() == at::kByte && packed.numel() >= kHead && packed.is_contiguous(),
              "not a weight packed here");
  const uint8_t* bytes = packed.data_ptr<uint8_t>();
  Layout at;
  std::memcpy(&at, bytes, sizeof(at));
  TORCH_CHECK(packed.numel() == kHead + at.bytes(), "not a weight packed here");
  TORCH_CHECK(!bias || (bias->scalar_type() == type && bias->numel() == at.rows && bias->is_contiguous()),
              "bias: [O] in the dtype of x");
  return Linear{at, bytes + kHead, bias ? bias->data_ptr() : nullptr};
}

// Keys or values of a cache [slots, K, S, Dh], and the scales [slots, K, S] that those in int8 have.
inline CachedRows checked_rows(const at::Tensor& rows, const Optional& scales) {
  TORCH_CHECK(rows.dim() == 4 && rows.is_contiguous(), "keys and values: [B, K, S, Dh], contiguous");
  const CacheType type = cache_type(rows.scalar_type());
  TORCH_CHECK(scales.has_value() == (type == CacheType::i8), "keys and values have scales in int8, and only there");
  TORCH_CHECK(!scales || (scales->sizes() == rows.sizes().slice(0, 3) && scales->scalar_type() == at::kFloat &&
                          scales->is_contiguous()),
              "scales of keys and values: float32 [B, K, S]");
  return {rows.data_ptr(), scales ? scales->data_ptr<float>() : nullptr, type, rows.size(3)};
}

inline Cache checked_cache(const at::Tensor& keys, const Optional& key_scales, const at::Tensor& values,
                           const Optional& value_scales) {
  TORCH_CHECK(keys.sizes() == values.sizes() && keys.scalar_type() == values.scalar_type(),
              "keys and values: of one shape and dtype");
  return {checked_rows(keys, key_scales), checked_rows(values, value_scales), keys.size(2)};
}

// The positions of all rows [B, T], from those of each or, [T], of any sequence; rising in each sequence.
inline std::vector<int64_t> checked_positions(const at::Tensor& positions, int64_t batch, int64_t tokens,
                                              int64_t length) {
  const int64_t count = positions.numel();
  TORCH_CHECK(positions.scalar_type() == at::kLong && (count == tokens || count == batch * tokens) &&
                  positions.is_contiguous(),
              "positions: int64 [T] or [B, T]");
  const int64_t* from = positions.data_ptr<int64_t>();
  std::vector<int64_t> all(batch * tokens);
  for (int64_t row = 0; row < batch * tokens; ++row) {
    all[row] = from[row % count];
    TORCH_CHECK(all[row] >= 0 && all[row] < length, "position ", all[row], " is outside the cache of ", length);
    TORCH_CHECK(row % tokens == 0 || all[row - 1] <= all[row], "positions must rise");
  }
  return all;
}

// The sequences' slots in a cache; null for the default order.
inline const int64_t* checked_slots(const Optional& slots, int64_t batch, int64_t places) {
  if (!slots) {
    TORCH_CHECK(batch <= places, "the cache has ", places, " slots, and there are ", batch, " sequences");
    return nullptr;
  }
  TORCH_CHECK(slots->scalar_type() == at::kLong && slots->numel() == batch && slots->is_contiguous(),
              "slots: int64 [B]");
  const int64_t* from = slots->data_ptr<int64_t>();
  for (int64_t b = 0; b < batch; ++b)
    TORCH_CHECK(from[b] >= 0 && from[b] < places, "slot ", from[b], " is outside the cache's ", places);
  return from;
}

inline const float* floats(const at::Tensor& tensor, int64_t count, const char* what) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.numel() == count && tensor.is_contiguous(), what, ": ",
              count, " values of float32");
  return tensor.data_ptr<float>();
}

inline const float* floats(const Optional& tensor, int64_t count, const char* what) {
  return tensor ? floats(*tensor, count, what) : nullptr;
}

inline Scores checked_scores(double scale, std::optional<double> softcap, const Optional& sinks, int64_t heads) {
  TORCH_CHECK(!softcap || *softcap > 0, "softcap: above 0");
  return {static_cast<float>(scale), static_cast<float>(softcap.value_or(0)), floats(sinks, heads, "sinks")};
}

// Tensors of the attention half of a block, in this order.
struct AttentionTensors {
  enum { input_norm, qkv, qkv_bias, query_norm, key_norm, sinks, out, out_bias, output_norm, count };
};

// Tensors of the feed-forward half, in this order.
struct FeedForwardTensors {
  enum { input_norm, gate_up, gate_up_bias, down, down_bias, output_norm, count };
};

// The packed weight of a list, which its bias follows.
inline Linear listed_linear(const Optionals& tensors, int64_t at, const char* what) {
  const Optional packed = tensors.get(at);
  TORCH_CHECK(packed, what, ": no weight");
  return packed_linear(*packed, tensors.get(at + 1), at::kFloat);
}

inline Branch checked_branch(const Optional& input_norm, const Optional& output_norm, int64_t hidden, double eps,
                             double multiplier) {
  return {floats(input_norm, hidden, "input norm"), floats(output_norm, hidden, "output norm"),
          static_cast<float>(eps), static_cast<float>(multiplier)};
}

// The attention half of a block, its weights checked against each other and the hidden states [.., D].
inline AttentionHalf checked_attention(const Optionals& tensors, int64_t hidden, int64_t heads, int64_t kv_heads,
                                       int64_t window, std::optional<double> scale, std::optional<double> softcap,
                                       std::optional<double> clip, double eps, double multiplier) {
  using At = AttentionTensors;
  TORCH_CHECK(tensors.size() == At::count, "attention: ", int64_t{At::count}, " tensors");
  const Linear qkv = listed_linear(tensors, At::qkv, "qkv"), out = listed_linear(tensors, At::out, "out");
  TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && out.at.columns % (2 * heads) == 0,
              "heads do not divide");
  const int64_t size = out.at.columns / heads;
  TORCH_CHECK(qkv.at.columns == hidden && qkv.at.rows == (heads + 2 * kv_heads) * size && out.at.rows == hidden,
              "weights that do not go together");
  // Norms of each head, or of all together, by the size of their weights.
  const auto normed = [size](const Optional& norm, int64_t count) {
    return norm && norm->numel() == count * size ? count * size : size;
  };
  const Optional query_norm = tensors.get(At::query_norm), key_norm = tensors.get(At::key_norm);
  const int64_t query_width = normed(query_norm, heads), key_width = normed(key_norm, kv_heads);
  const Branch branch =
      checked_branch(tensors.get(At::input_norm), tensors.get(At::output_norm), hidden, eps, multiplier);
  const float plain = 1 / std::sqrt(static_cast<float>(size));
  return {branch, qkv, out, floats(query_norm, query_width, "query norm"), floats(key_norm, key_width, "key norm"),
          query_width, key_width, checked_scores(scale.value_or(plain), softcap, tensors.get(At::sinks), heads),
          static_cast<float>(clip.value_or(std::numeric_limits<double>::infinity())), heads, kv_heads, size, window};
}

inline Gating checked_gating(std::string_view activation, std::optional<double> limit) {
  const float most = static_cast<float>(limit.value_or(std::numeric_limits<double>::infinity()));
  if (activation == "silu") return {Activation::silu, most};
  if (activation == "gelu_tanh") return {Activation::gelu_tanh, most};
  TORCH_CHECK(activation == "swiglu_oai", "no such activation: ", activation);
  return {Activation::swiglu_oai, most};
}

inline FeedForward checked_feed_forward(const Optionals& tensors, int64_t hidden, const Gating& gating, double eps,
                                        double multiplier) {
  using At = FeedForwardTensors;
  TORCH_CHECK(tensors.size() == At::count, "feed-forward: ", int64_t{At::count}, " tensors");
  const Linear wide = listed_linear(tensors, At::gate_up, "gate and up");
  const Linear narrow = listed_linear(tensors, At::down, "down");
  TORCH_CHECK(wide.at.columns == hidden && wide.at.rows == 2 * narrow.at.columns && narrow.at.rows == hidden,
              "weights that do not go together");
  const Branch branch =
      checked_branch(tensors.get(At::input_norm), tensors.get(At::output_norm), hidden, eps, multiplier);
  return {branch, wide, narrow, gating};
}

// Packed weights of one shape, [E, bytes], with the biases [E, O] of all: the first of them, and its bytes.
inline std::pair<Linear, int64_t> packed_bank(const at::Tensor& packed, const Optional& bias) {
  TORCH_CHECK(packed.dim() == 2 && packed.size(0) > 0 && packed.is_contiguous(), "experts' weights: uint8 [E, bytes]");
  Linear first = packed_linear(packed[0], std::nullopt, at::kFloat);
  first.bias = floats(bias, packed.size(0) * first.at.rows, "experts' biases");
  return {first, packed.size(1)};
}

inline ExpertBank checked_bank(const at::Tensor& gate_up, const Optional& gate_up_bias, const at::Tensor& down,
                               const Optional& down_bias, int64_t hidden) {
  const auto [wide, wide_bytes] = packed_bank(gate_up, gate_up_bias);
  const auto [narrow, narrow_bytes] = packed_bank(down, down_bias);
  TORCH_CHECK(gate_up.size(0) == down.size(0) && wide.at.columns == hidden && narrow.at.rows == hidden &&
                  wide.at.rows == 2 * narrow.at.columns,
              "weights that do not go together");
  return {{wide, narrow}, gate_up.size(0), wide_bytes, narrow_bytes};
}

// Which experts each row is routed to [N, K], and what their outputs are multiplied by [N, K].
inline std::vector<Choice> checked_choices(const at::Tensor& shares, const at::Tensor& chosen, int64_t experts) {
  TORCH_CHECK(chosen.scalar_type() == at::kLong && chosen.is_contiguous(), "chosen: int64 [N, K]");
  const float* share = floats(shares, chosen.numel(), "shares");
  std::vector<Choice> choices(chosen.numel());
  for (int64_t i = 0; i < chosen.numel(); ++i) {
    choices[i] = {chosen.data_ptr<int64_t>()[i], share[i]};
    TORCH_CHECK(choices[i].expert >= 0 && choices[i].expert < experts, "no expert ", choices[i].expert);
  }
  return choices;
}

// Tensors of a half of experts, in this order; those of the shared experts may be missing.
struct ExpertTensors {
  enum {
    input_norm, router, router_bias, gate_up, gate_up_bias, down, down_bias, shared_gate_up, shared_gate_up_bias,
    shared_down, shared_down_bias, shared_gate, output_norm, count
  };
};

inline Experts checked_experts(const Optionals& tensors, int64_t hidden, int64_t per_token, bool normalized,
                               const Gating& gating, double eps, double multiplier) {
  using At = ExpertTensors;
  TORCH_CHECK(tensors.size() == At::count, "experts: ", int64_t{At::count}, " tensors");
  const Optional router = tensors.get(At::router), gate_up = tensors.get(At::gate_up), down = tensors.get(At::down);
  TORCH_CHECK(router && gate_up && down, "experts: no weight");
  const ExpertBank bank =
      checked_bank(*gate_up, tensors.get(At::gate_up_bias), *down, tensors.get(At::down_bias), hidden);
  TORCH_CHECK(router->numel() == bank.count * hidden && router->is_contiguous() && per_token > 0 &&
                  per_token <= bank.count,
              "a router that does not go with the experts");
  Experts half{checked_branch(tensors.get(At::input_norm), tensors.get(At::output_norm), hidden, eps, multiplier),
               {router->data_ptr(), float_type(router->scalar_type()),
                floats(tensors.get(At::router_bias), bank.count, "router bias"), bank.count, per_token, normalized},
               bank, gating, std::nullopt, floats(tensors.get(At::shared_gate), hidden, "shared gate")};
  if (!tensors.get(At::shared_gate_up)) return half;
  const Linear wide = listed_linear(tensors, At::shared_gate_up, "shared gate and up");
  const Linear narrow = listed_linear(tensors, At::shared_down, "shared down");
  TORCH_CHECK(wide.at.columns == hidden && wide.at.rows == 2 * narrow.at.columns && narrow.at.rows == hidden,
              "weights that do not go together");
  half.shared = Expert{wide, narrow};
  return half;
}

// A step's rows and cache, checked against the hidden states and the attention half that they go through.
struct CheckedStep {
  std::vector<int64_t> positions;
  Cache cache;
  Rows rows;
};

inline CheckedStep checked_step(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine,
                                const Optional& query_scale, const at::Tensor& positions, const Optional& slots,
                                const Optional& keys, const Optional& key_scales, const Optional& values,
                                const Optional& value_scales, bool prefill, const AttentionHalf& half) {
  const int64_t batch = x.size(0), tokens = x.size(1), angles = positions.numel();
  TORCH_CHECK(keys.has_value() == values.has_value() && (prefill || keys), "keys and values, unless in a prefill");
  Cache cache{{}, {}, std::numeric_limits<int64_t>::max()};
  if (keys) {
    cache = checked_cache(*keys, key_scales, *values, value_scales);
    TORCH_CHECK(keys->size(1) == half.kv_heads && keys->size(3) == half.size, "a cache of other shape");
  }
  CheckedStep step{checked_positions(positions, batch, tokens, cache.length), cache, {}};
  const int64_t* places = checked_slots(slots, batch, keys ? keys->size(0) : batch);
  step.rows = {batch, tokens, step.positions.data(), floats(cosine, angles * half.size, "cosine"),
               floats(sine, angles * half.size, "sine"), floats(query_scale, angles, "query scale"), angles, places};
  return step;
}

}  // namespace quantkit
