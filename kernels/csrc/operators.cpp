// The kernels of models as functions of C on tensors. Outputs are as large as the caller's shapes say;
// cpu_operators.py allocates them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>
#include <string_view>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "export.h"
#include "operands.h"
#include "rows.h"
#include "step.h"

namespace quantkit {

namespace {

std::optional<double> given(double value) {
  return std::isnan(value) ? std::nullopt : std::optional<double>(value);
}

// The tensors of a weight [O, I], or of some of its rows; null where it has none. Minima are of the type of the scales.
// With outer scales, [O, I / 256], the others are int8.
struct Weight {
  const Tensor *codes, *scale, *zero, *minimum, *outer, *outer_minimum;
};

// How a weight of these rows in all is packed.
Layout layout_of(const Weight& weight, int64_t rows, int64_t bits, int64_t table, bool exact) {
  const auto& [codes, scale, zero, minimum, outer, outer_minimum] = weight;
  require(codes->dims == 2 && codes->type == Type::u8, "codes: uint8 [O, I]");
  require((bits >= 2 && bits <= 6) || bits == 8, "bits: 2 to 6, or 8");
  require(scale->dims == 2 && scale->size(0) == codes->size(0), "scale: [O, G]");
  const int64_t columns = codes->size(1), groups = scale->size(1);
  require(groups > 0 && columns > 0 && columns % groups == 0, "groups must divide the columns");
  require(!zero || (scale->starts_with(*zero, 2) && zero->type == Type::u8), "zero: uint8 [O, G]");
  require(!minimum || (scale->starts_with(*minimum, 2) && minimum->type == scale->type && !zero),
          "minimum: [O, G] in the dtype of the scales, and no zero points");
  require(!table || (bits == 4 && !zero && !minimum), "a table: of 4 bits, without zero points and minima");
  require(table >= 0 && table <= 2, "tables: 1 and 2");
  const Offset of_table = table == 1 ? Offset::iq4 : Offset::e2m1;
  const Offset offset = zero ? Offset::zeros : minimum ? Offset::minima : table ? of_table : Offset::middle;
  Layout at{rows, columns, columns / groups, bits, offset, exact, float_type(outer ? outer->type : scale->type),
            outer != nullptr};
  if (outer) {
    require(scale->type == Type::i8 && !zero, "scales of nested groups: int8 [O, G], without zero points");
    require(at.group == kColumns / 2 || at.group == kColumns, "nested group size: 16 or 32");
    require(columns % kNested == 0 && outer->dims == 2 && outer->size(0) == codes->size(0) &&
                outer->size(1) == columns / kNested && at.scales == FloatType::f16,
            "outer: float16 [O, I / 256]");
    require((outer_minimum != nullptr) == (minimum != nullptr) &&
                (!outer_minimum || (outer->starts_with(*outer_minimum, 2) && outer_minimum->type == outer->type)),
            "outer_minimum: float16 [O, I / 256], where there are minima");
    return at;
  }
  require(!outer_minimum, "outer_minimum: only with outer scales");
  require(groups == 1 || at.group % kColumns == 0, "group size: a multiple of 32, or the whole row");
  require(!zero || bits == 4 || bits == 8, "zero points: of 4 or 8 bits");
  return at;
}

}  // namespace

// A layer's two halves, either of which may be missing.
struct Block {
  std::variant<std::monostate, AttentionHalf, ShortConvHalf, DeltaHalf, Mamba2Half> mixer;
  int64_t hidden;
  bool parallel;  // whether the second half reads what the first one reads, rather than what that has added to it
  std::optional<FeedForward> dense;
  std::optional<Experts> experts;
};

// The tensors of a list that a step has for each block: keys, their scales, values, and their scales; or the states of
// a layer without attention, the second of them in the place of values.
constexpr int64_t kCached = 4;

// What a step has for one block.
struct BlockStep {
  const Tensor *cosine, *sine, *query_scale, *positions, *slots;
  Tensors cached;
  bool prefill;
  int threads;
};

void run_mixer(std::monostate, const Tensor&, const BlockStep&) {}

void run_mixer(const AttentionHalf& half, const Tensor& x, const BlockStep& of) {
  const CheckedStep step = checked_step(x, *of.cosine, *of.sine, of.query_scale, *of.positions, of.slots, of.cached,
                                        of.prefill, half);
  run_attention(half, x.as<float>(), step.rows, of.cached[0] ? &step.cache : nullptr, of.prefill, of.threads);
}

// The rows of a step through a layer with states.
CheckedStep checked_rows_of(const Tensor& x, const BlockStep& of) {
  const int64_t slots = of.cached[0] ? of.cached[0]->size(0) : x.size(0);
  return checked_rows_of(x, *of.positions, of.slots, slots, std::numeric_limits<int64_t>::max());
}

void run_mixer(const ShortConvHalf& half, const Tensor& x, const BlockStep& of) {
  const CheckedStep step = checked_rows_of(x, of);
  const int64_t slots = of.cached[0] ? of.cached[0]->size(0) : 0;
  float* states = checked_states(of.cached[0], half.convolution.earlier() * half.convolution.channels, slots, of.prefill);
  run_short_conv(half, x.as<float>(), step.rows, states, of.prefill, of.threads);
}

// The tails of convolutions and the matrices of a step, null without a cache.
std::pair<float*, float*> checked_matrices(const BlockStep& of, const Convolution& convolution, int64_t size) {
  const int64_t slots = of.cached[0] ? of.cached[0]->size(0) : 0;
  float* tails = checked_states(of.cached[0], convolution.earlier() * convolution.channels, slots, of.prefill);
  float* matrices = checked_states(of.cached[2], size, slots, of.prefill);
  require((of.cached[0] != nullptr) == (of.cached[2] != nullptr), "both states, or none");
  return {tails, matrices};
}

void run_mixer(const DeltaHalf& half, const Tensor& x, const BlockStep& of) {
  const CheckedStep step = checked_rows_of(x, of);
  const auto [tails, matrices] =
      checked_matrices(of, half.convolution, half.heads * half.key_size * half.value_size);
  run_gated_delta(half, x.as<float>(), step.rows, tails, matrices, of.prefill, of.threads);
}

void run_mixer(const Mamba2Half& half, const Tensor& x, const BlockStep& of) {
  const CheckedStep step = checked_rows_of(x, of);
  const auto [tails, matrices] = checked_matrices(of, half.convolution, half.inner() * half.state_size);
  run_mamba2(half, x.as<float>(), step.rows, tails, matrices, of.prefill, of.threads);
}

// Run both halves on hidden states x.
void run_block(const Block& block, const Tensor& x, const BlockStep& of) {
  const int64_t rows = x.size(0) * x.size(1);
  float* states = x.as<float>();
  const Scratch before(block.parallel ? x.numel() : 0);
  if (block.parallel) std::memcpy(before.get(), states, x.numel() * sizeof(float));
  const float* source = block.parallel ? before.get() : states;
  std::visit([&](const auto& half) { run_mixer(half, x, of); }, block.mixer);
  if (block.dense) run_feed_forward(*block.dense, source, states, rows, of.threads);
  if (block.experts) run_experts(*block.experts, source, states, rows, of.threads);
}

}  // namespace quantkit

using namespace quantkit;

QUANTKIT_EXPORT const char* quantkit_instructions() {
  return kHasBf16 ? "avx512-bf16" : kInstructions;
}

// The bytes that a weight of `rows` rows takes, as some of them show.
QUANTKIT_EXPORT const char* quantkit_packed_bytes(const Tensor* codes, const Tensor* scale, const Tensor* zero,
                                                  const Tensor* minimum, const Tensor* outer,
                                                  const Tensor* outer_minimum, int64_t rows, int64_t bits, int64_t table,
                                                  bool exact, int64_t* bytes) {
  return guarded([&] {
    const Weight weight{codes, scale, zero, minimum, outer, outer_minimum};
    *bytes = kHead + layout_of(weight, rows, bits, table, exact).bytes();
  });
}

// Pack some rows of a weight of `rows` rows, from `first` on.
QUANTKIT_EXPORT const char* quantkit_pack(const Tensor* codes, const Tensor* scale, const Tensor* zero,
                                          const Tensor* minimum, const Tensor* outer, const Tensor* outer_minimum,
                                          int64_t rows, int64_t bits, int64_t table, bool exact, int64_t first,
                                          int threads, uint8_t* packed) {
  return guarded([&] {
    const Layout at = layout_of({codes, scale, zero, minimum, outer, outer_minimum}, rows, bits, table, exact);
    static_assert(sizeof(Layout) <= kHead && std::has_unique_object_representations_v<Layout>,
                  "layouts must fit their place, and be the same byte by byte");
    const int64_t count = codes->size(0);
    require(first >= 0 && first % kRows == 0 && first + count <= rows && (first + count == rows || count % kRows == 0),
            "rows to pack: whole bands of the weight");
    std::memset(packed, 0, kHead);
    std::memcpy(packed, &at, sizeof(at));
    const auto bytes = [](const Tensor* tensor) { return tensor ? tensor->as<uint8_t>() : nullptr; };
    const Source source{first, count, bytes(codes), bytes(scale), bytes(zero), bytes(minimum), bytes(outer),
                        bytes(outer_minimum)};
    Pool::instance().parallel_for((count + kRows - 1) / kRows, 1, threads, [&](int64_t band) {
      pack_band(at, first / kRows + band, source, packed + kHead);
    });
  });
}

QUANTKIT_EXPORT const char* quantkit_linear(const Tensor* x, const Tensor* packed, const Tensor* bias, int64_t rows,
                                            int threads, void* y) {
  return guarded([&] {
    const Projection by = packed_projection(*packed, bias, x->type);
    require(by.rows() == rows, "not a weight packed here, expected ", rows, " rows, found ", by.rows());
    require(x->dims > 0 && x->size(-1) == by.columns(), "expected ", by.columns(), " columns, found ", x->size(-1));
    const int64_t tokens = x->numel() / by.columns();
    if (tokens) project(by, x->data, float_type(x->type), tokens, threads, y);
  });
}

// Rows of a packed weight as floats, by their numbers: [N, I] for index [N].
QUANTKIT_EXPORT const char* quantkit_rows(const Tensor* packed, const Tensor* index, int64_t columns, float* y) {
  return guarded([&] {
    const Projection by = packed_projection(*packed, nullptr, Type::f32);
    require(by.columns() == columns, "expected ", by.columns(), " columns, found ", columns);
    require(index->dims == 1 && index->type == Type::i64, "index: int64 [N]");
    for (int64_t i = 0; i < index->numel(); ++i, y += columns) {
      int64_t row = index->as<int64_t>()[i];
      require(row >= 0 && row < by.rows(), "row ", row, " of ", by.rows());
      const Linear* part = by.parts.data();
      for (; row >= part->at.rows; ++part) row -= part->at.rows;
      dequantize_row(part->at, row, part->bands, y);
    }
  });
}

QUANTKIT_EXPORT const char* quantkit_cached_attention(const Tensor* queries, const Tensor* keys,
                                                      const Tensor* key_scales, const Tensor* values,
                                                      const Tensor* value_scales, const Tensor* positions,
                                                      const Tensor* slots, int64_t window, double scale,
                                                      double softcap, const Tensor* sinks, int threads, void* out) {
  return guarded([&] {
    require(queries->dims == 4, "queries: [B, H, T, Dh]");
    const Cache cache = checked_cache(*keys, key_scales, *values, value_scales);
    const int64_t heads = queries->size(1), tokens = queries->size(2), size = queries->size(3);
    const AttentionShape at{queries->size(0), heads, keys->size(1), tokens, size, Sight{window, 0},
                            checked_scores(scale, given(softcap), sinks, heads), float_type(queries->type),
                            heads * tokens * size, tokens * size, size};
    require(keys->size(3) == size && at.kv_heads > 0 && at.heads % at.kv_heads == 0, "queries of ", heads, " heads of ",
            size, " do not go with keys of ", at.kv_heads, " heads of ", keys->size(3));
    const std::vector<int64_t> from = checked_positions(*positions, at.batch, at.tokens, cache.length);
    const int64_t* places = checked_slots(slots, at.batch, keys->size(0));
    if (queries->numel() == 0) return;
    attention_over_cache(at, queries->data, cache, from.data(), runs_of(places, from.data(), at.batch, at.tokens),
                         threads, out);
  });
}

QUANTKIT_EXPORT const char* quantkit_experts(const Tensor* x, const Tensor* shares, const Tensor* chosen,
                                             const Tensor* gate_up, const Tensor* gate_up_bias, const Tensor* down,
                                             const Tensor* down_bias, const char* activation, double limit,
                                             bool exact, int threads, float* y) {
  return guarded([&] {
    require(x->dims == 2 && chosen->dims == 2 && chosen->size(0) == x->size(0) && chosen->size(1) > 0,
            "x: [N, D], chosen: [N, K]");
    const int64_t rows = x->size(0), hidden = x->size(1), per_token = chosen->size(1);
    const float* source = floats(*x, rows * hidden, "x");
    const Gating gating = checked_gating(activation, given(limit));
    const ExpertBank bank = checked_bank(*gate_up, gate_up_bias, *down, down_bias, hidden, gating, exact);
    const std::vector<Choice> choices = checked_choices(*shares, *chosen, bank.count);
    for (int64_t row = 0, count; row < rows; row += count) {
      count = std::min(max_rows(per_token), rows - row);
      run_grouped(grouped(bank, choices.data() + row * per_token, count, per_token, 1), gating, source + row * hidden,
                  hidden, count, threads, y + row * hidden);
    }
  });
}

QUANTKIT_EXPORT const char* quantkit_float_linear(const Tensor* x, const Tensor* weight, bool exact, int threads,
                                                  void* y) {
  return guarded([&] {
    require(weight->dims == 2, "weight: [O, I]");
    const int64_t columns = weight->size(1);
    require(x->dims > 0 && x->size(-1) == columns, "expected ", columns, " columns, found ", x->size(-1));
    const FloatRows rows{weight->data, float_type(weight->type), weight->size(0), nullptr, exact};
    float_products(&rows, 1, columns, x->data, float_type(x->type), x->numel() / columns, threads, y, rows.rows);
  });
}

// Cosine and sine [N, Dh] of positions [N] that turn by frequencies, [P] or [N, P] of each.
QUANTKIT_EXPORT const char* quantkit_rotations(const Tensor* positions, const Tensor* frequencies, double scale,
                                               const Tensor* cosine, const Tensor* sine) {
  return guarded([&] {
    require(positions->type == Type::i64, "positions: int64");
    const int64_t rows = positions->numel(), size = cosine->size(-1), pairs = frequencies->size(-1);
    require(size % 2 == 0 && pairs > 0 && pairs <= size / 2, pairs, " pairs of dimensions do not fit in ", size);
    require(frequencies->type == Type::f32 && (frequencies->numel() == pairs || frequencies->numel() == rows * pairs),
            "frequencies: float32 [P] or [N, P]");
    floats(*cosine, rows * size, "cosine");
    floats(*sine, rows * size, "sine");
    const int64_t step = frequencies->numel() == pairs ? 0 : pairs;
    for (int64_t row = 0; row < rows; ++row)
      rotation_of(static_cast<float>(positions->as<int64_t>()[row]), frequencies->as<float>() + row * step, pairs,
                  static_cast<float>(scale), size, cosine->as<float>() + row * size, sine->as<float>() + row * size);
  });
}

QUANTKIT_EXPORT const char* quantkit_norm(const Tensor* x, const Tensor* weight, double eps, bool centered,
                                          int threads, float* y) {
  return guarded([&] {
    const int64_t size = x->size(-1), rows = size ? x->numel() / size : 0;
    const float *from = floats(*x, rows * size, "x"), *by = floats(*weight, size, "weight");
    each_row(rows, threads, [&](int64_t row) {
      norm(from + row * size, by, size, static_cast<float>(eps), centered, y + row * size);
    });
  });
}

// The likeliest tokens [N] of logits [N, V], and the same with -1 where a row's logits are not finite.
QUANTKIT_EXPORT const char* quantkit_likeliest(const Tensor* logits, int threads, int64_t* tokens, int64_t* checked) {
  return guarded([&] {
    require(logits->dims == 2 && logits->size(1) > 0, "logits: [N, V]");
    const int64_t rows = logits->size(0), vocabulary = logits->size(1);
    const float* from = floats(*logits, rows * vocabulary, "logits");
    Pool::instance().parallel_for(rows, 1, threads, [&](int64_t row) {
      const Likeliest found = likeliest(from + row * vocabulary, vocabulary);
      tokens[row] = found.token;
      checked[row] = found.finite ? found.token : -1;
    });
  });
}

QUANTKIT_EXPORT std::vector<Block>* quantkit_new_blocks() { return new std::vector<Block>; }

QUANTKIT_EXPORT void quantkit_free_blocks(std::vector<Block>* blocks) { delete blocks; }

// Append a block to others. Its tensors must exist for as long as it does. `mixer` is "attention", "short_conv",
// "gated_delta", "joined_delta", "mamba2" or "none", and `mixing` the list of its tensors. The heads are those of queries
// and of keys and values; of a delta rule those of values and of keys, of Mamba-2 heads and groups. The list of a half
// that is missing is empty.
QUANTKIT_EXPORT const char* quantkit_add_block(std::vector<Block>* blocks, const char* mixer, const Tensor* mixing,
                                               int64_t mixing_count, const Tensor* feed_forward,
                                               int64_t feed_forward_count, int64_t heads, int64_t kv_heads,
                                               int64_t window, int64_t chunk, double scale, double softcap, double clip,
                                               bool gated, bool norms_rotated, const char* activation, double limit, double eps,
                                               bool centered, double multiplier, bool parallel, int64_t per_token,
                                               bool sigmoid, bool normalized, double normalization_eps, double scaling,
                                               bool weighted_inputs, bool exact) {
  return guarded([&] {
    const Tensors first{mixing, mixing_count, exact}, second{feed_forward, feed_forward_count, exact};
    const std::string_view kind = mixer;
    const BranchSettings branch{eps, centered, multiplier};
    // The first weight of each list follows the norm, and reads the hidden states.
    const bool mixes = kind != "none";
    const Tensors& shown = mixes ? first : second;
    require(shown.count > 2, "a mixer or a feed-forward: some tensors");
    const int64_t hidden = listed_projection(shown, 1, 1, "inputs").columns();
    Block block{{}, hidden, parallel, std::nullopt, std::nullopt};
    if (kind == "attention") {
      block.mixer = checked_attention(first, hidden, heads, kv_heads, Sight{window, chunk}, given(scale), given(softcap),
                                      given(clip), gated, norms_rotated, branch);
    } else if (kind == "short_conv") {
      block.mixer = checked_short_conv(first, branch);
    } else if (kind == "mamba2") {
      block.mixer = checked_mamba2(first, heads, kv_heads, branch);
    } else if (mixes) {
      require(kind == "gated_delta" || kind == "joined_delta", "no such mixer: ", kind);
      block.mixer = checked_gated_delta(first, kv_heads, heads, kind == "joined_delta", branch);
    }
    const Gating gating = checked_gating(activation, given(limit));
    const Routing routing{per_token, sigmoid, normalized, normalization_eps, scaling, weighted_inputs};
    if (per_token)
      block.experts = checked_experts(second, hidden, routing, gating, branch);
    else if (second.count)
      block.dense = checked_feed_forward(second, hidden, gating, branch);
    blocks->push_back(block);
  });
}

// Update hidden states x. `angles` has each block's cosine and sine, `query_scales` factors of its queries, some of which
// may be missing; `cached`, null without a cache, what `kCached` describes.
QUANTKIT_EXPORT const char* quantkit_run_blocks(const std::vector<Block>* blocks, const Tensor* x,
                                                const Tensor* angles, const Tensor* query_scales,
                                                const Tensor* positions, const Tensor* slots, const Tensor* cached,
                                                bool prefill, int threads) {
  return guarded([&] {
    require(x->dims == 3 && x->type == Type::f32, "x: float32 [B, T, D]");
    const Tensor missing{nullptr, Type::f32, -1, {}}, nothing[kCached] = {missing, missing, missing, missing};
    for (size_t at = 0; at < blocks->size(); ++at) {
      const Block& block = (*blocks)[at];
      require(x->size(2) == block.hidden, "expected ", block.hidden, " columns, found ", x->size(2));
      if (x->numel() == 0) return;
      const Tensor* query_scale = query_scales[at].dims < 0 ? nullptr : query_scales + at;
      const BlockStep step{&angles[2 * at], &angles[2 * at + 1], query_scale, positions, slots,
                           Tensors{cached ? cached + kCached * at : nothing, kCached}, prefill, threads};
      run_block(block, *x, step);
    }
  });
}
