// The kernels as torch operators, in a namespace named by QUANTKIT_LIBRARY.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/zeros.h>
#include <dlfcn.h>
#include <sys/mman.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>
#include <string>
#include <vector>

#include "block.h"
#include "experts.h"
#include "matmul.h"

namespace {

using namespace quantkit;

constexpr int64_t kHead = 64;            // bytes before the bands, which hold the layout
constexpr int64_t kHugePage = 2 << 20;  // bytes

FloatType float_type(at::ScalarType type) {
  if (type == at::kFloat) return FloatType::f32;
  if (type == at::kHalf) return FloatType::f16;
  TORCH_CHECK(type == at::kBFloat16, "expected float32, float16 or bfloat16, found ", type);
  return FloatType::bf16;
}

CacheType cache_type(at::ScalarType type) {
  return type == at::kChar ? CacheType::i8 : static_cast<CacheType>(float_type(type));
}

// Memory for a packed weight, on huge pages where the system gives them, so that it takes few address translations.
at::Tensor allocate_packed(int64_t bytes) {
  const auto options = at::TensorOptions().dtype(at::kByte);
  if (bytes < kHugePage) return at::empty({bytes}, options);
  const int64_t reserved = bytes + kHugePage;
  void* memory = mmap(nullptr, reserved, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  TORCH_CHECK(memory != MAP_FAILED, "no memory for a packed weight of ", bytes, " bytes");
  const auto start = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
#if defined(MADV_HUGEPAGE)
  madvise(reinterpret_cast<void*>(start), bytes, MADV_HUGEPAGE);
#endif
  return at::from_blob(reinterpret_cast<void*>(start), {bytes}, [memory, reserved](void*) { munmap(memory, reserved); },
                       options);
}

at::Tensor pack(const at::Tensor& codes, const at::Tensor& scale, const std::optional<at::Tensor>& zero, int64_t bits,
                bool exact) {
  TORCH_CHECK(codes.dim() == 2 && codes.scalar_type() == at::kByte && codes.is_contiguous(), "codes: uint8 [O, I]");
  TORCH_CHECK(bits == 4 || bits == 8, "bits: 4 or 8");
  TORCH_CHECK(scale.dim() == 2 && scale.is_contiguous() && scale.size(0) == codes.size(0), "scale: [O, G]");
  const int64_t groups = scale.size(1);
  TORCH_CHECK(groups > 0 && codes.size(1) > 0 && codes.size(1) % groups == 0, "groups must divide the columns");
  Layout at{codes.size(0), codes.size(1), codes.size(1) / groups, bits, zero.has_value(), exact,
            float_type(scale.scalar_type())};
  TORCH_CHECK(groups == 1 || at.group % kColumns == 0, "group size: a multiple of 32, or the whole row");
  TORCH_CHECK(!zero || (zero->sizes() == scale.sizes() && zero->scalar_type() == at::kByte && zero->is_contiguous()),
              "zero: uint8 [O, G]");
  at::Tensor packed = allocate_packed(kHead + at.bytes());
  uint8_t* bytes = packed.data_ptr<uint8_t>();
  static_assert(sizeof(Layout) <= kHead, "the layout must fit its place");
  std::memset(bytes, 0, kHead);
  std::memcpy(bytes, &at, sizeof(at));
  const auto* scales = static_cast<const uint8_t*>(scale.data_ptr());
  const uint8_t* zeros = zero ? zero->data_ptr<uint8_t>() : nullptr;
  Pool::instance().parallel_for(at.bands(), 1, at::get_num_threads(), [&](int64_t band) {
    pack_band(at, band, codes.data_ptr<uint8_t>(), scales, zeros, bytes + kHead);
  });
  return packed;
}

// A packed weight and its bias, which is of the type of the activations.
Linear packed_linear(const at::Tensor& packed, const std::optional<at::Tensor>& bias, at::ScalarType type) {
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

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const std::optional<at::Tensor>& bias, int64_t rows) {
  const Linear by = packed_linear(packed, bias, x.scalar_type());
  TORCH_CHECK(by.at.rows == rows, "not a weight packed here, expected ", rows, " rows, found ", by.at.rows);
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == by.at.columns, "expected ", by.at.columns, " columns, found ", x.sizes());
  const at::Tensor source = x.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = rows;
  at::Tensor y = at::empty(shape, x.options());
  const int64_t tokens = x.numel() / by.at.columns;
  if (tokens == 0) return y;
  matmul(by, source.data_ptr(), float_type(x.scalar_type()), tokens, at::get_num_threads(), y.data_ptr());
  return y;
}

void check_cache(const at::Tensor& keys, const at::Tensor& values) {
  TORCH_CHECK(keys.dim() == 4 && keys.sizes() == values.sizes() && keys.scalar_type() == values.scalar_type() &&
                  keys.is_contiguous() && values.is_contiguous(),
              "keys and values: [B, K, S, Dh], contiguous, of one dtype; rows of int8 end with their scale");
}

// The positions of all rows [B, T], from those of each or, [T], of any sequence; rising in each sequence.
std::vector<int64_t> checked_positions(const at::Tensor& positions, int64_t batch, int64_t tokens, int64_t length) {
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

// The sequences' places in a cache that has so many; null where none are given.
const int64_t* checked_slots(const std::optional<at::Tensor>& slots, int64_t batch, int64_t places) {
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

at::Tensor cached_attention(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                            const at::Tensor& positions, const std::optional<at::Tensor>& slots, int64_t window,
                            double scale) {
  TORCH_CHECK(queries.dim() == 4 && keys.dim() == 4, "queries [B, H, T, Dh], keys [B, K, S, Dh]");
  const int64_t heads = queries.size(1), tokens = queries.size(2), size = queries.size(3);
  const FloatType type = float_type(queries.scalar_type());
  const AttentionShape at{queries.size(0), heads, keys.size(1), tokens, keys.size(2), size, window,
                          static_cast<float>(scale), type, cache_type(keys.scalar_type()), heads * tokens * size,
                          tokens * size, size};
  TORCH_CHECK(keys.size(3) == cache_width(at.cached, size) && at.kv_heads > 0 &&
                  at.heads % at.kv_heads == 0,
              "queries ", queries.sizes(), " do not go with keys ", keys.sizes());
  check_cache(keys, values);
  const std::vector<int64_t> from = checked_positions(positions, at.batch, at.tokens, at.length);
  const int64_t* places = checked_slots(slots, at.batch, keys.size(0));
  const at::Tensor source = queries.contiguous();
  at::Tensor out = at::empty({at.batch, at.tokens, at.heads * at.size}, queries.options());
  if (out.numel() == 0) return out;
  attention_over_cache(at, source.data_ptr(), keys.data_ptr(), values.data_ptr(), from.data(),
                       runs_of(places, from.data(), at.batch, at.tokens), at::get_num_threads(), out.data_ptr());
  return out;
}

const float* floats(const at::Tensor& tensor, int64_t count, const char* what) {
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.numel() == count && tensor.is_contiguous(), what, ": ", count,
              " values of float32");
  return tensor.data_ptr<float>();
}

using Optional = std::optional<at::Tensor>;

// A block's weights, checked against each other and the hidden states.
Block checked_block(const at::Tensor& x, const at::Tensor& input_norm, const at::Tensor& qkv, const Optional& qkv_bias,
                    const Optional& query_norm, const Optional& key_norm, const at::Tensor& out,
                    const Optional& out_bias, const at::Tensor& output_norm, const at::Tensor& gate_up,
                    const Optional& gate_up_bias, const at::Tensor& down, const Optional& down_bias, int64_t heads,
                    int64_t kv_heads, int64_t window, double eps) {
  TORCH_CHECK(x.dim() == 3, "x: [B, T, D]");
  floats(x, x.numel(), "x");
  const int64_t hidden = x.size(2);
  const Linear all[] = {packed_linear(qkv, qkv_bias, at::kFloat), packed_linear(out, out_bias, at::kFloat),
                        packed_linear(gate_up, gate_up_bias, at::kFloat), packed_linear(down, down_bias, at::kFloat)};
  const Layout &into = all[0].at, &from = all[1].at, &wide = all[2].at, &narrow = all[3].at;
  TORCH_CHECK(heads > 0 && kv_heads > 0 && heads % kv_heads == 0 && from.columns % (2 * heads) == 0,
              "heads do not divide");
  const int64_t size = from.columns / heads;
  TORCH_CHECK(into.columns == hidden && into.rows == (heads + 2 * kv_heads) * size && from.rows == hidden &&
                  wide.columns == hidden && wide.rows == 2 * narrow.columns && narrow.rows == hidden,
              "weights that do not go together");
  return Block{all[0], all[1], all[2], all[3], floats(input_norm, hidden, "input norm"),
               floats(output_norm, hidden, "output norm"), query_norm ? floats(*query_norm, size, "query norm") : nullptr,
               key_norm ? floats(*key_norm, size, "key norm") : nullptr, static_cast<float>(eps), heads, kv_heads,
               size, window};
}

// The weights of a block.
#define QUANTKIT_BLOCK                                                                                                \
  const at::Tensor &input_norm, const at::Tensor &qkv, const Optional &qkv_bias, const Optional &query_norm,          \
      const Optional &key_norm, const at::Tensor &out, const Optional &out_bias, const at::Tensor &output_norm,       \
      const at::Tensor &gate_up, const Optional &gate_up_bias, const at::Tensor &down, const Optional &down_bias,     \
      int64_t heads, int64_t kv_heads, int64_t window, double eps
#define QUANTKIT_CHECKED                                                                                              \
  checked_block(x, input_norm, qkv, qkv_bias, query_norm, key_norm, out, out_bias, output_norm, gate_up,              \
                gate_up_bias, down, down_bias, heads, kv_heads, window, eps)

void block(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, const at::Tensor& positions,
           const Optional& slots, const Optional& keys, const Optional& values, bool prefill, QUANTKIT_BLOCK) {
  const Block block = QUANTKIT_CHECKED;
  const int64_t batch = x.size(0), tokens = x.size(1), angles = positions.numel();
  TORCH_CHECK(keys.has_value() == values.has_value() && (prefill || keys), "keys and values, unless in a prefill");
  Cache cache{};
  int64_t length = std::numeric_limits<int64_t>::max();
  if (keys) {
    check_cache(*keys, *values);
    cache = {keys->data_ptr(), values->data_ptr(), cache_type(keys->scalar_type()), keys->size(2)};
    TORCH_CHECK(keys->size(1) == kv_heads && keys->size(3) == cache_width(cache.type, block.size),
                "a cache of other shape");
    length = cache.length;
  }
  const std::vector<int64_t> rising = checked_positions(positions, batch, tokens, length);
  const int64_t* places = checked_slots(slots, batch, keys ? keys->size(0) : batch);
  if (x.numel() == 0) return;
  const Rows rows{batch, tokens, rising.data(), floats(cosine, angles * block.size, "cosine"),
                  floats(sine, angles * block.size, "sine"), angles, places};
  run_block(block, x.data_ptr<float>(), rows, keys ? &cache : nullptr, prefill, at::get_num_threads());
}

#undef QUANTKIT_BLOCK
#undef QUANTKIT_CHECKED

// Packed weights of one shape, [E, bytes], with the biases [E, O] of all: the first of them, and its bytes.
std::pair<Linear, int64_t> packed_bank(const at::Tensor& packed, const Optional& bias) {
  TORCH_CHECK(packed.dim() == 2 && packed.size(0) > 0 && packed.is_contiguous(), "a bank: uint8 [E, bytes]");
  Linear first = packed_linear(packed[0], std::nullopt, at::kFloat);
  if (bias) first.bias = floats(*bias, packed.size(0) * first.at.rows, "biases [E, O]");
  return {first, packed.size(1)};
}

ExpertBank checked_bank(const at::Tensor& gate_up, const Optional& gate_up_bias, const at::Tensor& down,
                        const Optional& down_bias, int64_t columns) {
  const auto [wide, wide_bytes] = packed_bank(gate_up, gate_up_bias);
  const auto [narrow, narrow_bytes] = packed_bank(down, down_bias);
  TORCH_CHECK(gate_up.size(0) == down.size(0) && wide.at.columns == columns && narrow.at.rows == columns &&
                  wide.at.rows == 2 * narrow.at.columns,
              "weights that do not go together");
  return {{wide, narrow}, gate_up.size(0), wide_bytes, narrow_bytes};
}

at::Tensor stack(at::TensorList packed) {
  TORCH_CHECK(!packed.empty(), "weights to stack");
  const int64_t bytes = packed[0].numel(), count = static_cast<int64_t>(packed.size());
  at::Tensor all = allocate_packed(count * bytes).view({count, bytes});
  uint8_t* to = all.data_ptr<uint8_t>();
  const Layout at = packed_linear(packed[0], std::nullopt, at::kFloat).at;
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(packed_linear(packed[i], std::nullopt, at::kFloat).at == at, "weights of different shapes or schemes");
    std::memcpy(to + i * bytes, packed[i].data_ptr<uint8_t>(), bytes);
  }
  return all;
}

at::Tensor experts(const at::Tensor& x, const at::Tensor& chosen, const at::Tensor& shares, const at::Tensor& gate_up,
                   const Optional& gate_up_bias, const at::Tensor& down, const Optional& down_bias,
                   int64_t activation, double limit) {
  TORCH_CHECK(x.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == x.size(0), "x: [N, D], chosen: [N, K]");
  TORCH_CHECK(chosen.scalar_type() == at::kLong && chosen.is_contiguous(), "chosen: int64 [N, K]");
  TORCH_CHECK(activation >= 0 && activation <= 2, "unknown activation");
  const int64_t rows = x.size(0), columns = x.size(1), per_token = chosen.size(1);
  const ExpertBank bank = checked_bank(gate_up, gate_up_bias, down, down_bias, columns);
  const float* share = floats(shares, chosen.numel(), "shares [N, K]");
  std::vector<Choice> choices(chosen.numel());
  for (int64_t i = 0; i < chosen.numel(); ++i) {
    const int64_t expert = chosen.data_ptr<int64_t>()[i];
    TORCH_CHECK(expert >= 0 && expert < bank.count, "expert ", expert, " of ", bank.count);
    choices[i] = {expert, share[i]};
  }
  const at::Tensor source = x.to(at::kFloat).contiguous();
  at::Tensor y = at::zeros({rows, columns}, source.options());
  for (int64_t row = 0; row < rows; row += kInnerRows)
    run_experts(grouped(bank, choices.data() + row * per_token, std::min(kInnerRows, rows - row), per_token, 1),
                static_cast<Activation>(activation), static_cast<float>(limit),
                source.data_ptr<float>() + row * columns, columns, at::get_num_threads(),
                y.data_ptr<float>() + row * columns);
  return y.to(x.scalar_type());
}

at::Tensor float_linear(const at::Tensor& x, const at::Tensor& weight) {
  TORCH_CHECK(weight.dim() == 2 && weight.is_contiguous(), "weight: [O, I]");
  const int64_t columns = weight.size(1);
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == columns, "expected ", columns, " columns, found ", x.sizes());
  const at::Tensor source = x.contiguous();
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(0);
  at::Tensor y = at::empty(shape, x.options());
  float_product(weight.size(0), columns, weight.data_ptr(), float_type(weight.scalar_type()), source.data_ptr(),
               float_type(x.scalar_type()), x.numel() / columns, at::get_num_threads(), y.data_ptr());
  return y;
}

// Set how many threads torch's own operations use from the calling thread; returns the number before, or 0 if it
// cannot be told.
int64_t torch_threads(int64_t count) {
  static const auto get = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "omp_get_max_threads"));
  static const auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  if (!get || !set) return 0;
  const int before = get();
  if (count > 0) set(static_cast<int>(count));
  return before;
}

std::string instructions() { return kInstructions; }

}  // namespace

TORCH_LIBRARY(QUANTKIT_LIBRARY, library) {
  library.def("pack(Tensor codes, Tensor scale, Tensor? zero, int bits, bool exact) -> Tensor");
  library.def("linear(Tensor x, Tensor packed, Tensor? bias, int rows) -> Tensor");
  library.def(
      "cached_attention(Tensor queries, Tensor keys, Tensor values, Tensor positions, Tensor? slots, int window, "
      "float scale) -> Tensor");
  const std::string weights =
      "Tensor input_norm, Tensor qkv, Tensor? qkv_bias, Tensor? query_norm, Tensor? key_norm, Tensor out, "
      "Tensor? out_bias, Tensor output_norm, Tensor gate_up, Tensor? gate_up_bias, Tensor down, Tensor? down_bias, "
      "int heads, int kv_heads, int window, float eps)";
  library.def(("block(Tensor(a!) x, Tensor cosine, Tensor sine, Tensor positions, Tensor? slots, Tensor(b!)? keys, "
               "Tensor(c!)? values, bool prefill, " + weights + " -> ()").c_str());
  library.def("stack(Tensor[] packed) -> Tensor");
  library.def(
      "experts(Tensor x, Tensor chosen, Tensor shares, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
      "Tensor? down_bias, int activation, float limit) -> Tensor");
  library.def("float_linear(Tensor x, Tensor weight) -> Tensor");
  library.def("torch_threads(int count) -> int", &torch_threads);
  library.def("instructions() -> str", &instructions);
}

TORCH_LIBRARY_IMPL(QUANTKIT_LIBRARY, CPU, library) {
  library.impl("pack", &pack);
  library.impl("linear", &linear);
  library.impl("cached_attention", &cached_attention);
  library.impl("block", &block);
  library.impl("stack", &stack);
  library.impl("experts", &experts);
  library.impl("float_linear", &float_linear);
}
