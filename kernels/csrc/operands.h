// Tensors as operands of the kernels, checked.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <vector>

#include "block_attention.h"
#include "experts.h"
#include "feed_forward.h"
#include "gated_delta.h"
#include "mamba2.h"
#include "matmul.h"
#include "short_conv.h"
#include "tensor.h"

namespace quantkit {

// Tensors by their places in a list.
struct Tensors {
  const Tensor* all;
  int64_t count;
  bool exact = true;  // whether activations stay as they are where weights are floats

  // Null for one that is missing.
  const Tensor* operator[](int64_t at) const { return all[at].dims < 0 ? nullptr : all + at; }
};

constexpr int64_t kHead = 64;  // bytes before a packed weight's bands, which hold its layout

inline FloatType float_type(Type type) {
  require(type <= Type::bf16, "expected float32, float16 or bfloat16");
  return static_cast<FloatType>(type);
}

inline CacheType cache_type(Type type) {
  return type == Type::i8 ? CacheType::i8 : static_cast<CacheType>(float_type(type));
}

// Packed weights, one after the other, and the bias of all, which is of the type of the activations.
inline Projection packed_projection(const Tensor& packed, const Tensor* bias, Type type) {
  require(packed.type == Type::u8, "not a weight packed here");
  Projection projection;
  const uint8_t* bytes = packed.as<uint8_t>();
  for (int64_t rest = packed.numel(); rest > 0 || projection.parts.empty();) {
    require(rest >= kHead, "not a weight packed here");
    Layout at;
    std::memcpy(&at, bytes, sizeof(at));
    require(rest >= kHead + at.bytes() && (projection.parts.empty() || at.columns == projection.columns()),
            "not a weight packed here");
    projection.parts.push_back({at, bytes + kHead, nullptr});
    bytes += kHead + at.bytes();
    rest -= kHead + at.bytes();
  }
  if (!bias) return projection;
  require(bias->type == type && bias->numel() == projection.rows(), "bias: [O] in the dtype of x");
  const uint8_t* values = bias->as<uint8_t>();
  for (Linear& part : projection.parts) {
    part.bias = values;
    values += part.at.rows * bytes_of(float_type(type));
  }
  return projection;
}

// The same of a single weight.
inline Linear packed_linear(const Tensor& packed, const Tensor* bias, Type type) {
  const Projection projection = packed_projection(packed, bias, type);
  require(projection.parts.size() == 1, "a single packed weight is expected");
  return projection.parts[0];
}

// Keys or values of a cache [slots, K, S, Dh], and the scales [slots, K, S] that those in int8 have.
inline CachedRows checked_rows(const Tensor& rows, const Tensor* scales) {
  require(rows.dims == 4, "keys and values: [B, K, S, Dh]");
  const CacheType type = cache_type(rows.type);
  require((scales != nullptr) == (type == CacheType::i8), "keys and values have scales in int8, and only there");
  require(!scales || (rows.starts_with(*scales, 3) && scales->type == Type::f32),
          "scales of keys and values: float32 [B, K, S]");
  return {rows.data, scales ? scales->as<float>() : nullptr, type, rows.size(3)};
}

inline Cache checked_cache(const Tensor& keys, const Tensor* key_scales, const Tensor& values,
                           const Tensor* value_scales) {
  require(keys.starts_with(values, keys.dims) && keys.type == values.type, "keys and values: of one shape and dtype");
  return {checked_rows(keys, key_scales), checked_rows(values, value_scales), keys.size(2)};
}

// The positions of all rows [B, T], from those of each or, [T], of any sequence; rising in each sequence.
inline std::vector<int64_t> checked_positions(const Tensor& positions, int64_t batch, int64_t tokens,
                                              int64_t length) {
  const int64_t count = positions.numel();
  require(positions.type == Type::i64 && (count == tokens || count == batch * tokens),
          "positions: int64 [T] or [B, T]");
  const int64_t* from = positions.as<int64_t>();
  std::vector<int64_t> all(batch * tokens);
  for (int64_t row = 0; row < batch * tokens; ++row) {
    all[row] = from[row % count];
    require(all[row] >= 0 && all[row] < length, "position ", all[row], " is outside the cache of ", length);
    require(row % tokens == 0 || all[row - 1] <= all[row], "positions must rise");
  }
  return all;
}

// The sequences' slots in a cache; null for the default order.
inline const int64_t* checked_slots(const Tensor* slots, int64_t batch, int64_t places) {
  if (!slots) {
    require(batch <= places, "the cache has ", places, " slots, and there are ", batch, " sequences");
    return nullptr;
  }
  require(slots->type == Type::i64 && slots->numel() == batch, "slots: int64 [B]");
  const int64_t* from = slots->as<int64_t>();
  for (int64_t b = 0; b < batch; ++b)
    require(from[b] >= 0 && from[b] < places, "slot ", from[b], " is outside the cache's ", places);
  return from;
}

inline const float* floats(const Tensor& tensor, int64_t count, const char* what) {
  require(tensor.type == Type::f32 && tensor.numel() == count, what, ": ", count, " values of float32");
  return tensor.as<float>();
}

inline const float* floats(const Tensor* tensor, int64_t count, const char* what) {
  return tensor ? floats(*tensor, count, what) : nullptr;
}

inline Scores checked_scores(double scale, std::optional<double> softcap, const Tensor* sinks, int64_t heads) {
  require(!softcap || *softcap > 0, "softcap: above 0");
  return {static_cast<float>(scale), static_cast<float>(softcap.value_or(0)), floats(sinks, heads, "sinks")};
}

// Tensors of the attention half of a block, in this order. Weights of queries, keys and values may be one: those of keys
// and values are missing then.
struct AttentionTensors {
  enum {
    input_norm, query, query_bias, key, key_bias, value, value_bias, query_norm, key_norm, sinks, out, out_bias,
    output_norm, count
  };
};

// Tensors of the feed-forward half, in this order; the weights of gate and up may be one. Without a gate, up is in its
// place.
struct FeedForwardTensors {
  enum { input_norm, gate, gate_bias, up, up_bias, down, down_bias, output_norm, count };
};

// A weight of floats [O, I] and its bias, which is of the type of the activations.
inline Linear float_linear(const Tensor& weight, const Tensor* bias, Type type, bool exact) {
  require(weight.dims == 2, "weight: [O, I]");
  Layout at{};
  at.rows = weight.size(0);
  at.columns = at.group = weight.size(1);
  at.scales = float_type(weight.type);
  at.exact = exact;
  require(!bias || (bias->type == type && bias->numel() == at.rows), "bias: [O] in the dtype of x");
  return Linear{at, weight.as<uint8_t>(), bias ? bias->data : nullptr};
}

// The weight of a list, which its bias follows: packed, or floats.
inline Linear listed_linear(const Tensors& tensors, int64_t at, const char* what) {
  const Tensor* weight = tensors[at];
  require(weight, what, ": no weight");
  if (weight->type == Type::u8) return packed_linear(*weight, tensors[at + 1], Type::f32);
  return float_linear(*weight, tensors[at + 1], Type::f32, tensors.exact);
}

// Weights of a list that share their input, up to `count` of them, each of which may be several packed ones.
inline Projection listed_projection(const Tensors& tensors, int64_t at, int64_t count, const char* what) {
  require(tensors[at], what, ": no weight");
  Projection projection;
  for (int64_t i = 0; i < count; ++i) {
    const Tensor *weight = tensors[at + 2 * i], *bias = tensors[at + 2 * i + 1];
    if (!weight) continue;
    if (weight->type == Type::u8) {
      const Projection packed = packed_projection(*weight, bias, Type::f32);
      projection.parts.insert(projection.parts.end(), packed.parts.begin(), packed.parts.end());
    } else {
      projection.parts.push_back(float_linear(*weight, bias, Type::f32, tensors.exact));
    }
  }
  for (const Linear& part : projection.parts)
    require(part.at.columns == projection.columns(), what, ": weights that do not go together");
  return projection;
}

// What both branches of a block have in common.
struct BranchSettings {
  double eps;
  bool centered;
  double multiplier;
};

inline Branch checked_branch(const Tensor* input_norm, const Tensor* output_norm, int64_t hidden,
                             const BranchSettings& of) {
  return {floats(input_norm, hidden, "input norm"), floats(output_norm, hidden, "output norm"),
          static_cast<float>(of.eps), of.centered, static_cast<float>(of.multiplier)};
}

// The attention half of a block, its weights checked against each other and the hidden states [.., D].
inline AttentionHalf checked_attention(const Tensors& tensors, int64_t hidden, int64_t heads, int64_t kv_heads,
                                       const Sight& sight, std::optional<double> scale, std::optional<double> softcap,
                                       std::optional<double> clip, bool gated, bool norms_rotated,
                                       const BranchSettings& of) {
  using At = AttentionTensors;
  require(tensors.count == At::count, "attention: ", int64_t{At::count}, " tensors");
  const Projection qkv = listed_projection(tensors, At::query, 3, "queries, keys and values");
  const Linear out = listed_linear(tensors, At::out, "out");
  require(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && out.at.columns % (2 * heads) == 0,
          "heads do not divide");
  const int64_t size = out.at.columns / heads;
  const int64_t query_heads = gated ? 2 * heads : heads;
  require(qkv.columns() == hidden && qkv.rows() == (query_heads + 2 * kv_heads) * size && out.at.rows == hidden,
          "weights that do not go together");
  // Norms of each head, or of all together, by the size of their weights.
  const auto normed = [size](const Tensor* norm, int64_t count) {
    return norm && norm->numel() == count * size ? count * size : size;
  };
  const Tensor *query_norm = tensors[At::query_norm], *key_norm = tensors[At::key_norm];
  const int64_t query_width = normed(query_norm, heads), key_width = normed(key_norm, kv_heads);
  require(!gated || (query_width == size && !clip), "gates go with norms of each head, and without a clip");
  require(!norms_rotated || (query_width == size && key_width == size), "norms after the rotation are of each head");
  const Branch branch = checked_branch(tensors[At::input_norm], tensors[At::output_norm], hidden, of);
  const float plain = 1 / std::sqrt(static_cast<float>(size));
  return {branch, qkv, out, floats(query_norm, query_width, "query norm"), floats(key_norm, key_width, "key norm"),
          query_width, key_width, checked_scores(scale.value_or(plain), softcap, tensors[At::sinks], heads),
          static_cast<float>(clip.value_or(std::numeric_limits<double>::infinity())), heads, kv_heads, size, sight,
          gated, norms_rotated};
}

// A convolution's weight [K, C] and its bias.
inline Convolution checked_convolution(const Tensor* weight, const Tensor* bias, int64_t channels) {
  require(weight && weight->dims == 2 && weight->size(0) > 0 && weight->size(1) == channels, "convolution: [K, ",
          channels, "]");
  const int64_t size = weight->size(0);
  return {floats(*weight, size * channels, "convolution"), floats(bias, channels, "convolution's bias"), size, channels};
}

// Tensors of a short convolution, in this order.
struct ShortConvTensors {
  enum { input_norm, in, in_bias, convolution, convolution_bias, out, out_bias, output_norm, count };
};

inline ShortConvHalf checked_short_conv(const Tensors& tensors, const BranchSettings& of) {
  using At = ShortConvTensors;
  require(tensors.count == At::count, "short convolution: ", int64_t{At::count}, " tensors");
  const Projection in = listed_projection(tensors, At::in, 1, "inputs of the convolution");
  const Linear out = listed_linear(tensors, At::out, "out");
  const int64_t hidden = in.columns();
  require(in.rows() == 3 * hidden && out.at.columns == hidden && out.at.rows == hidden,
          "weights that do not go together");
  return {checked_branch(tensors[At::input_norm], tensors[At::output_norm], hidden, of), in,
          checked_convolution(tensors[At::convolution], tensors[At::convolution_bias], hidden), out};
}

// Tensors of a gated delta rule, in this order; of joined linears, the weights of gates and rates are missing.
struct DeltaTensors {
  enum {
    input_norm, qkv, qkv_bias, gates, gates_bias, shares, shares_bias, rates, rates_bias, convolution, rate_bias, decay,
    norm, out, out_bias, output_norm, count
  };
};

inline DeltaHalf checked_gated_delta(const Tensors& tensors, int64_t key_heads, int64_t heads, bool joined,
                                     const BranchSettings& of) {
  using At = DeltaTensors;
  require(tensors.count == At::count, "delta rule: ", int64_t{At::count}, " tensors");
  const Projection in = listed_projection(tensors, At::qkv, 4, "inputs of the delta rule");
  const Linear out = listed_linear(tensors, At::out, "out");
  const Tensor *convolution = tensors[At::convolution], *decay = tensors[At::decay], *norm = tensors[At::norm];
  require(convolution && decay && norm && tensors[At::rate_bias], "delta rule: no weight");
  const int64_t hidden = in.columns(), channels = convolution->size(-1), values = out.at.columns;
  require(key_heads > 0 && heads > 0 && heads % key_heads == 0 && values % heads == 0 && channels > values &&
              (channels - values) % (2 * key_heads) == 0,
          "heads do not divide");
  require(in.rows() == channels + values + 2 * heads && out.at.rows == hidden, "weights that do not go together");
  const int64_t value_size = values / heads, key_size = (channels - values) / (2 * key_heads);
  return {checked_branch(tensors[At::input_norm], tensors[At::output_norm], hidden, of),
          in,
          checked_convolution(convolution, nullptr, channels),
          floats(tensors[At::rate_bias], heads, "rate bias"),
          floats(*decay, heads, "decay"),
          floats(*norm, value_size, "norm"),
          out,
          key_heads,
          heads,
          key_size,
          value_size,
          joined};
}

// Tensors of Mamba-2, in this order; the limits of steps are the lowest and the highest.
struct Mamba2Tensors {
  enum {
    input_norm, in, in_bias, convolution, convolution_bias, step_bias, decay, skip, step_limits, norm, out, out_bias,
    output_norm, count
  };
};

inline Mamba2Half checked_mamba2(const Tensors& tensors, int64_t heads, int64_t groups, const BranchSettings& of) {
  using At = Mamba2Tensors;
  require(tensors.count == At::count, "Mamba-2: ", int64_t{At::count}, " tensors");
  const Projection in = listed_projection(tensors, At::in, 1, "inputs of Mamba-2");
  const Linear out = listed_linear(tensors, At::out, "out");
  for (int64_t at : {At::convolution, At::step_bias, At::decay, At::skip, At::step_limits, At::norm})
    require(tensors[at], "Mamba-2: no weight");
  const int64_t hidden = in.columns(), inner = out.at.columns, channels = tensors[At::convolution]->size(-1);
  require(heads > 0 && groups > 0 && heads % groups == 0 && inner % heads == 0 && channels > inner &&
              (channels - inner) % (2 * groups) == 0,
          "heads do not divide");
  require(in.rows() == inner + channels + heads && out.at.rows == hidden, "weights that do not go together");
  const float* limits = floats(*tensors[At::step_limits], 2, "limits of steps");
  return {checked_branch(tensors[At::input_norm], tensors[At::output_norm], hidden, of),
          in,
          checked_convolution(tensors[At::convolution], tensors[At::convolution_bias], channels),
          floats(*tensors[At::step_bias], heads, "step bias"),
          floats(*tensors[At::decay], heads, "decay"),
          floats(*tensors[At::skip], heads, "skip"),
          limits[0],
          limits[1],
          floats(*tensors[At::norm], inner, "norm"),
          out,
          heads,
          groups,
          inner / heads,
          (channels - inner) / (2 * groups)};
}

inline Gating checked_gating(std::string_view activation, std::optional<double> limit) {
  const float most = static_cast<float>(limit.value_or(std::numeric_limits<double>::infinity()));
  if (activation == "silu") return {Activation::silu, most};
  if (activation == "gelu_tanh") return {Activation::gelu_tanh, most};
  if (activation == "relu2") return {Activation::relu2, most};
  require(activation == "swiglu_oai", "no such activation: ", activation);
  return {Activation::swiglu_oai, most};
}

inline FeedForward checked_feed_forward(const Tensors& tensors, int64_t hidden, const Gating& gating,
                                        const BranchSettings& of) {
  using At = FeedForwardTensors;
  require(tensors.count == At::count, "feed-forward: ", int64_t{At::count}, " tensors");
  const Projection wide = listed_projection(tensors, At::gate, 2, "gate and up");
  const Linear narrow = listed_linear(tensors, At::down, "down");
  require(wide.columns() == hidden && wide.rows() == gating.parts() * narrow.at.columns && narrow.at.rows == hidden,
          "weights that do not go together");
  return {checked_branch(tensors[At::input_norm], tensors[At::output_norm], hidden, of), wide, narrow, gating};
}

// Weights of one shape, packed [E, bytes] or floats [E, O, I], with the biases [E, O] of all: the first of them, and its
// bytes.
inline std::pair<Linear, int64_t> stacked_linear(const Tensor& weights, const Tensor* bias, bool exact) {
  const bool packed = weights.type == Type::u8;
  require(weights.dims == (packed ? 2 : 3) && weights.size(0) > 0,
          "experts' weights: uint8 [E, bytes], or floats [E, O, I]");
  Tensor one{weights.data, weights.type, weights.dims - 1, {weights.size(1), weights.size(-1)}};
  Linear first = packed ? packed_linear(one, nullptr, Type::f32) : float_linear(one, nullptr, Type::f32, exact);
  first.bias = floats(bias, weights.size(0) * first.at.rows, "experts' biases");
  return {first, one.numel() * (packed ? 1 : bytes_of(float_type(one.type)))};
}

inline ExpertBank checked_bank(const Tensor& gate_up, const Tensor* gate_up_bias, const Tensor& down,
                               const Tensor* down_bias, int64_t hidden, const Gating& gating, bool exact) {
  const auto [wide, wide_bytes] = stacked_linear(gate_up, gate_up_bias, exact);
  const auto [narrow, narrow_bytes] = stacked_linear(down, down_bias, exact);
  require(gate_up.size(0) == down.size(0) && wide.at.columns == hidden && narrow.at.rows == hidden &&
              wide.at.rows == gating.parts() * narrow.at.columns,
          "weights that do not go together");
  return {{wide, narrow}, gate_up.size(0), wide_bytes, narrow_bytes};
}

// Which experts each row is routed to [N, K], and what their outputs are multiplied by [N, K].
inline std::vector<Choice> checked_choices(const Tensor& shares, const Tensor& chosen, int64_t experts) {
  require(chosen.type == Type::i64, "chosen: int64 [N, K]");
  const float* share = floats(shares, chosen.numel(), "shares");
  std::vector<Choice> choices(chosen.numel());
  for (int64_t i = 0; i < chosen.numel(); ++i) {
    choices[i] = {chosen.as<int64_t>()[i], share[i]};
    require(choices[i].expert >= 0 && choices[i].expert < experts, "no expert ", choices[i].expert);
  }
  return choices;
}

// Tensors of a half of experts, in this order; those of latent states and of the shared experts may be missing.
struct ExpertTensors {
  enum {
    input_norm, router, router_bias, correction, latent_in, latent_in_bias, gate_up, gate_up_bias, down, down_bias,
    latent_out, latent_out_bias, shared_gate_up, shared_gate_up_bias, shared_down, shared_down_bias, shared_gate,
    output_norm, count
  };
};

// How a router chooses, see `Router`.
struct Routing {
  int64_t per_token;  // 0 where a block has no experts
  bool sigmoid, normalized;
  double normalization_eps, scaling;
  bool weighted_inputs;
};

inline Experts checked_experts(const Tensors& tensors, int64_t hidden, const Routing& routing, const Gating& gating,
                               const BranchSettings& of) {
  using At = ExpertTensors;
  require(tensors.count == At::count, "experts: ", int64_t{At::count}, " tensors");
  const Tensor *router = tensors[At::router], *gate_up = tensors[At::gate_up], *down = tensors[At::down];
  require(router && gate_up && down, "experts: no weight");
  std::optional<Latents> latents;
  int64_t width = hidden;  // of the states that experts see
  if (tensors[At::latent_in]) {
    latents = Latents{listed_linear(tensors, At::latent_in, "latent in"), listed_linear(tensors, At::latent_out, "latent out")};
    width = latents->in.at.rows;
    require(latents->in.at.columns == hidden && latents->out.at.rows == hidden && latents->out.at.columns == width,
            "weights that do not go together");
  }
  const ExpertBank bank =
      checked_bank(*gate_up, tensors[At::gate_up_bias], *down, tensors[At::down_bias], width, gating, tensors.exact);
  require(router->numel() == bank.count * hidden && routing.per_token > 0 && routing.per_token <= bank.count,
          "a router that does not go with the experts");
  Experts half{checked_branch(tensors[At::input_norm], tensors[At::output_norm], hidden, of),
               {router->data, float_type(router->type), floats(tensors[At::router_bias], bank.count, "router bias"),
                floats(tensors[At::correction], bank.count, "correction of scores"), bank.count, routing.per_token,
                routing.sigmoid, routing.normalized, static_cast<float>(routing.normalization_eps),
                static_cast<float>(routing.scaling)},
               routing.weighted_inputs, bank, gating, latents, std::nullopt, floats(tensors[At::shared_gate], hidden, "shared gate")};
  if (!tensors[At::shared_gate_up]) return half;
  const Linear wide = listed_linear(tensors, At::shared_gate_up, "shared gate and up");
  const Linear narrow = listed_linear(tensors, At::shared_down, "shared down");
  require(wide.at.columns == hidden && wide.at.rows == gating.parts() * narrow.at.columns && narrow.at.rows == hidden,
          "weights that do not go together");
  half.shared = Expert{wide, narrow};
  return half;
}

// A step's rows, and its cache where it has attention.
struct CheckedStep {
  std::vector<int64_t> positions;
  Cache cache;
  Rows rows;
};

// The rows of hidden states x [B, T, D] in a cache of `places` slots, each of `length` positions.
inline CheckedStep checked_rows_of(const Tensor& x, const Tensor& positions, const Tensor* slots, int64_t places,
                                   int64_t length) {
  const int64_t batch = x.size(0), tokens = x.size(1);
  CheckedStep step{checked_positions(positions, batch, tokens, length), {}, {}};
  step.rows.batch = batch;
  step.rows.tokens = tokens;
  step.rows.positions = step.positions.data();
  step.rows.slots = checked_slots(slots, batch, places);
  return step;
}

// A step checked against an attention half.
inline CheckedStep checked_step(const Tensor& x, const Tensor& cosine, const Tensor& sine,
                                const Tensor* query_scale, const Tensor& positions, const Tensor* slots,
                                const Tensors& cached, bool prefill, const AttentionHalf& half) {
  const Tensor *keys = cached[0], *key_scales = cached[1], *values = cached[2], *value_scales = cached[3];
  require((keys != nullptr) == (values != nullptr) && (prefill || keys), "keys and values, unless in a prefill");
  Cache cache{{}, {}, std::numeric_limits<int64_t>::max()};
  if (keys) {
    cache = checked_cache(*keys, key_scales, *values, value_scales);
    require(keys->size(1) == half.kv_heads && keys->size(3) == half.size, "a cache of other shape");
  }
  CheckedStep step = checked_rows_of(x, positions, slots, keys ? keys->size(0) : x.size(0), cache.length);
  step.cache = cache;
  Rows& rows = step.rows;
  rows.angles = positions.numel();
  rows.rotated = cosine.size(-1);
  require(rows.rotated <= half.size && rows.rotated % 2 == 0, "angles of ", rows.rotated, " dimensions for heads of ",
          half.size);
  rows.cosine = floats(cosine, rows.angles * rows.rotated, "cosine");
  rows.sine = floats(sine, rows.angles * rows.rotated, "sine");
  rows.query_scale = floats(query_scale, rows.angles, "query scale");
  return step;
}

// States [slots, ...] of `size` numbers each; null without a cache, which only a prefill lacks.
inline float* checked_states(const Tensor* states, int64_t size, int64_t slots, bool prefill) {
  require(prefill || states, "states, unless in a prefill");
  if (states) floats(*states, slots * size, "states");
  return states ? states->as<float>() : nullptr;
}

}  // namespace quantkit
