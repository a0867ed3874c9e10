// A tensor as its owner describes it, and errors that name what is wrong with one.
#pragma once

#include <algorithm>
#include <cstdint>
#include <sstream>
#include <stdexcept>

namespace quantkit {

enum class Type : int64_t { f32, f16, bf16, i8, u8, i64 };

// Contiguous, on the CPU, with up to four dimensions; in a list, -1 dimensions are of one that is missing.
// cpu_operators.py writes it.
struct Tensor {
  void* data;
  Type type;
  int64_t dims;
  int64_t sizes[4];

  int64_t size(int64_t dim) const { return sizes[dim < 0 ? dims + dim : dim]; }
  int64_t numel() const {
    int64_t count = 1;
    for (int64_t dim = 0; dim < dims; ++dim) count *= sizes[dim];
    return count;
  }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data);
  }
  // Whether its first dimensions, `count` of them, are those of the other.
  bool starts_with(const Tensor& other, int64_t count) const {
    return other.dims == count && std::equal(other.sizes, other.sizes + count, sizes);
  }
};

template <typename... Parts>
inline void require(bool met, const Parts&... parts) {
  if (met) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::invalid_argument(message.str());
}

}  // namespace quantkit
