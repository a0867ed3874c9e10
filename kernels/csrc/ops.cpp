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
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "operands.h"

namespace {

using namespace quantkit;

constexpr int64_t kHugePage = 2 << 20;  // bytes

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

at::Tensor pack(const at::Tensor& codes, const at::Tensor& scale, const Optional& zero, int64_t bits,
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

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const Optional& bias, int64_t rows) {
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

// Rows of a packed weight as floats, by their numbers: [N, I] for index [N].
at::Tensor rows(const at::Tensor& packed, const at::Tensor& index, int64_t columns) {
  const Linear by = packed_linear(packed, std::nullopt, at::kFloat);
  TORCH_CHECK(by.at.columns == columns, "expected ", by.at.columns, " columns, found ", columns);
  TORCH_CHECK(index.dim() == 1 && index.scalar_type() == at::kLong && index.is_contiguous(), "index: int64 [N]");
  const int64_t* wanted = index.data_ptr<int64_t>();
  for (int64_t i = 0; i < index.numel(); ++i)
    TORCH_CHECK_INDEX(wanted[i] >= 0 && wanted[i] < by.at.rows, "row ", wanted[i], " of ", by.at.rows);
  at::Tensor y = at::empty({index.numel(), columns}, packed.options().dtype(at::kFloat));
  float* out = y.data_ptr<float>();
  std::vector<uint8_t> codes(columns);
  for (int64_t i = 0; i < index.numel(); ++i, out += columns) {
    unpack_row(by.at, wanted[i], by.bands, codes.data(),
               [&](int64_t first, int64_t count, const uint8_t* own, const uint8_t* scale, const uint8_t* zero) {
                 const float step = load_scale(scale, by.at.scales, 0);
                 const float low = zero ? *zero : by.at.fixed_zero();
                 for (int64_t c = 0; c < count; ++c) out[first + c] = (own[c] - low) * step;
               });
  }
  return y;
}

at::Tensor cached_attention(const at::Tensor& queries, const at::Tensor& keys, const Optional& key_scales,
                            const at::Tensor& values, const Optional& value_scales, const at::Tensor& positions,
                            const Optional& slots, int64_t window, double scale, std::optional<double> softcap,
                            const Optional& sinks) {
  TORCH_CHECK(queries.dim() == 4, "queries: [B, H, T, Dh]");
  const Cache cache = checked_cache(keys, key_scales, values, value_scales);
  const int64_t heads = queries.size(1), tokens = queries.size(2), size = queries.size(3);
  const FloatType type = float_type(queries.scalar_type());
  const AttentionShape at{queries.size(0), heads, keys.size(1), tokens, size, window,
                          checked_scores(scale, softcap, sinks, heads), type, heads * tokens * size, tokens * size,
                          size};
  TORCH_CHECK(keys.size(3) == size && at.kv_heads > 0 && at.heads % at.kv_heads == 0, "queries ", queries.sizes(),
              " do not go with keys ", keys.sizes());
  const std::vector<int64_t> from = checked_positions(positions, at.batch, at.tokens, cache.length);
  const int64_t* places = checked_slots(slots, at.batch, keys.size(0));
  const at::Tensor source = queries.contiguous();
  at::Tensor out = at::empty({at.batch, at.tokens, at.heads * at.size}, queries.options());
  if (out.numel() == 0) return out;
  attention_over_cache(at, source.data_ptr(), cache, from.data(), runs_of(places, from.data(), at.batch, at.tokens),
                       at::get_num_threads(), out.data_ptr());
  return out;
}

void block(const at::Tensor& x, const at::Tensor& cosine, const at::Tensor& sine, const Optional& query_scale,
           const at::Tensor& positions, const Optional& slots, const Optional& keys, const Optional& key_scales,
           const Optional& values, const Optional& value_scales, bool prefill, const Optionals& attention,
           const Optionals& feed_forward, int64_t heads, int64_t kv_heads, int64_t window, std::optional<double> scale, std::optional<double> softcap, std::optional<double> clip,
           std::string_view activation, std::optional<double> limit, double eps, double multiplier, int64_t per_token,
           bool normalized) {
  TORCH_CHECK(x.dim() == 3, "x: [B, T, D]");
  float* states = const_cast<float*>(floats(x, x.numel(), "x"));
  const int64_t hidden = x.size(2);
  const AttentionHalf first =
      checked_attention(attention, hidden, heads, kv_heads, window, scale, softcap, clip, eps, multiplier);
  const Gating gating = checked_gating(activation, limit);
  std::optional<FeedForward> dense;
  std::optional<Experts> experts;
  if (per_token)
    experts = checked_experts(feed_forward, hidden, per_token, normalized, gating, eps, multiplier);
  else
    dense = checked_feed_forward(feed_forward, hidden, gating, eps, multiplier);
  const CheckedStep step =
      checked_step(x, cosine, sine, query_scale, positions, slots, keys, key_scales, values, value_scales, prefill,
                   first);
  if (x.numel() == 0) return;
  const int threads = at::get_num_threads();
  run_attention(first, states, step.rows, keys ? &step.cache : nullptr, prefill, threads);
  const int64_t rows = step.rows.batch * step.rows.tokens;
  if (dense) run_feed_forward(*dense, states, rows, threads);
  if (experts) run_experts(*experts, states, rows, threads);
}

// Packed weights of one shape, one after the other: [E, bytes].
at::Tensor stack(at::TensorList packed) {
  TORCH_CHECK(!packed.empty(), "weights to stack");
  const int64_t bytes = packed[0].numel(), count = static_cast<int64_t>(packed.size());
  const Layout at = packed_linear(packed[0], std::nullopt, at::kFloat).at;
  at::Tensor all = allocate_packed(count * bytes).view({count, bytes});
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK(packed_linear(packed[i], std::nullopt, at::kFloat).at == at, "weights of different shapes or schemes");
    std::memcpy(all.data_ptr<uint8_t>() + i * bytes, packed[i].data_ptr<uint8_t>(), bytes);
  }
  return all;
}

at::Tensor experts(const at::Tensor& x, const at::Tensor& shares, const at::Tensor& chosen, const at::Tensor& gate_up,
                   const Optional& gate_up_bias, const at::Tensor& down, const Optional& down_bias,
                   std::string_view activation, std::optional<double> limit) {
  TORCH_CHECK(x.dim() == 2 && chosen.dim() == 2 && chosen.size(0) == x.size(0) && chosen.size(1) > 0, "x: [N, D], chosen: [N, K]");
  const int64_t rows = x.size(0), hidden = x.size(1), per_token = chosen.size(1);
  const ExpertBank bank = checked_bank(gate_up, gate_up_bias, down, down_bias, hidden);
  const Gating gating = checked_gating(activation, limit);
  const std::vector<Choice> choices = checked_choices(shares, chosen, bank.count);
  const at::Tensor source = x.to(at::kFloat).contiguous();
  at::Tensor y = at::zeros({rows, hidden}, source.options());
  for (int64_t row = 0, count; row < rows; row += count) {
    count = std::min(max_rows(per_token), rows - row);
    run_grouped(grouped(bank, choices.data() + row * per_token, count, per_token, 1), gating,
                source.data_ptr<float>() + row * hidden, hidden, count, at::get_num_threads(),
                y.data_ptr<float>() + row * hidden);
  }
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
// are unknown.
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
  library.def("rows(Tensor packed, Tensor index, int columns) -> Tensor");
  library.def(
      "cached_attention(Tensor queries, Tensor keys, Tensor? key_scales, Tensor values, Tensor? value_scales, "
      "Tensor positions, Tensor? slots, int window, float scale, float? softcap=None, Tensor? sinks=None) -> Tensor");
  library.def(
      "block(Tensor(a!) x, Tensor cosine, Tensor sine, Tensor? query_scale, Tensor positions, Tensor? slots, "
      "Tensor(b!)? keys, Tensor(c!)? key_scales, Tensor(d!)? values, Tensor(e!)? value_scales, bool prefill, Tensor?[] attention, Tensor?[] feed_forward, int heads, "
      "int kv_heads, int window, float? scale, float? softcap, float? clip, str activation, float? limit, float eps, "
      "float multiplier, int per_token=0, bool normalized=True) -> ()");
  library.def("stack(Tensor[] packed) -> Tensor");
  library.def(
      "experts(Tensor x, Tensor shares, Tensor chosen, Tensor gate_up, Tensor? gate_up_bias, Tensor down, "
      "Tensor? down_bias, str activation, float? limit) -> Tensor");
  library.def("float_linear(Tensor x, Tensor weight) -> Tensor");
  library.def("torch_threads(int count) -> int", &torch_threads);
  library.def("instructions() -> str", &instructions);
}

TORCH_LIBRARY_IMPL(QUANTKIT_LIBRARY, CPU, library) {
  library.impl("pack", &pack);
  library.impl("linear", &linear);
  library.impl("rows", &rows);
  library.impl("cached_attention", &cached_attention);
  library.impl("block", &block);
  library.impl("stack", &stack);
  library.impl("experts", &experts);
  library.impl("float_linear", &float_linear);
}
