// The kernels without torch, as a process: requests on standard input, products on standard output.
// A request is a line of a name and numbers, then its operands one after the other as bytes.
#include <cstdio>
#include <iostream>
#include <string>
#include <vector>

#include "attention_many.h"
#include "matmul.h"

using namespace quantkit;

namespace {

int64_t number() {
  int64_t value;
  std::cin >> value;
  return value;
}

int64_t width(FloatType type) { return type == FloatType::f32 ? 4 : 2; }

// Bytes on whole cache lines, as the kernels want them.
struct Line {
  alignas(64) char bytes[64];
};
using Bytes = std::vector<Line>;

Bytes allocated(int64_t count) { return Bytes(count / 64 + 1); }

Bytes operand(int64_t count) {
  Bytes to = allocated(count);
  std::cin.read(to.data()->bytes, count);
  return to;
}

template <class T>
T* as(Bytes& bytes) {
  return reinterpret_cast<T*>(bytes.data());
}

void reply(Bytes& bytes, int64_t count) { std::cout.write(as<char>(bytes), count).flush(); }

void linear(int threads) {
  Layout at{number(), number(), number(), number(), number() != 0, number() != 0, FloatType(number())};
  const FloatType type = FloatType(number());
  const int64_t tokens = number(), scales = at.rows * at.groups();
  std::cin.ignore();
  Bytes codes = operand(at.rows * at.columns), scale = operand(scales * at.scale_width());
  Bytes zeros = operand(at.zeros ? scales : 0), x = operand(tokens * at.columns * width(type));
  Bytes packed = allocated(at.bytes()), y = allocated(tokens * at.rows * width(type));
  for (int64_t band = 0; band < at.bands(); ++band)
    pack_band(at, band, as<uint8_t>(codes), as<uint8_t>(scale), as<uint8_t>(zeros), as<uint8_t>(packed));
  matmul(Linear{at, as<uint8_t>(packed), nullptr}, x.data(), type, tokens, threads, y.data());
  reply(y, tokens * at.rows * width(type));
}

void cached_attention(int threads) {
  const int64_t batch = number(), heads = number(), kv_heads = number(), tokens = number(), length = number();
  AttentionShape at{batch, heads, kv_heads, tokens, number(), number(), {}, FloatType(number()), 0, 0, 0};
  const CacheType type = CacheType(number());
  const int64_t places = number(), sinks = number() ? at.heads * 4 : 0;
  at.head_step = at.tokens * at.size, at.batch_step = at.heads * at.head_step, at.token_step = at.size;
  std::cin >> at.scores.scale >> at.scores.softcap;
  std::cin.ignore();
  const int64_t mixed = at.batch * at.batch_step * width(at.type);
  const int64_t cached = places * kv_heads * length * at.size * width(FloatType(type));
  Bytes queries = operand(mixed), keys = operand(cached), values = operand(cached);
  Bytes positions = operand(at.batch * at.tokens * 8), slots = operand(at.batch * 8), out = allocated(mixed);
  Bytes scores = operand(sinks);
  if (sinks) at.scores.sinks = as<float>(scores);
  const auto runs = runs_of(as<int64_t>(slots), as<int64_t>(positions), at.batch, at.tokens);
  const Cache cache{{keys.data(), nullptr, type, at.size}, {values.data(), nullptr, type, at.size}, length};
  attention_over_cache(at, queries.data(), cache, as<int64_t>(positions), runs, threads, out.data());
  reply(out, mixed);
}

void float_linear(int threads) {
  const int64_t count = number(), columns = number(), tokens = number();
  const FloatType weight_type = FloatType(number()), type = FloatType(number());
  std::cin.ignore();
  Bytes weight = operand(count * columns * width(weight_type)), x = operand(tokens * columns * width(type));
  Bytes y = allocated(tokens * count * width(type));
  float_product(count, columns, weight.data(), weight_type, x.data(), type, tokens, threads, y.data());
  reply(y, tokens * count * width(type));
}

}  // namespace

int main() {
  std::cout << kInstructions << std::endl;
  for (std::string name; std::cin >> name;) {
    const int threads = static_cast<int>(number());
    if (name == "linear") linear(threads);
    if (name == "cached_attention") cached_attention(threads);
    if (name == "float_linear") float_linear(threads);
  }
}
