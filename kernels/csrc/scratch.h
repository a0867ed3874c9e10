// Scratch memory for floats, which threads keep for their next calls.
//
// A step of many tokens needs megabytes for every product. Returned to the system, they would come back as new pages,
// each of which the system clears: a tenth of the time of a prefill.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <new>
#include <utility>
#include <vector>

namespace quantkit {

// Memory that begins with a cache line; the values are unspecified.
class Scratch {
 public:
  explicit Scratch(int64_t count) : block_(take(count)) {}
  Scratch(Scratch&& other) : block_(std::move(other.block_)) {}
  ~Scratch() {
    if (block_.values && kept_floats() + block_.count <= kMostKept) kept().push_back(std::move(block_));
  }

  float* get() const { return block_.values.get(); }
  float& operator[](int64_t at) const { return get()[at]; }

 private:
  static constexpr int64_t kMostKept = 1 << 23;  // floats, by a thread
  static constexpr int64_t kSmall = 1 << 12;     // floats, which matter to no one

  struct Free {
    void operator()(float* values) const { operator delete[](values, std::align_val_t(64)); }
  };
  struct Block {
    std::unique_ptr<float, Free> values;
    int64_t count;
  };

  static std::vector<Block>& kept() {
    thread_local std::vector<Block> blocks;
    return blocks;
  }

  static int64_t kept_floats() {
    int64_t count = 0;
    for (const Block& block : kept()) count += block.count;
    return count;
  }

  // The smallest block that is kept and large enough, but not much too large, or a new one.
  static Block take(int64_t count) {
    std::vector<Block>& blocks = kept();
    auto best = blocks.end();
    for (auto block = blocks.begin(); block != blocks.end(); ++block)
      if (block->count >= count && block->count <= 4 * count + kSmall &&
          (best == blocks.end() || block->count < best->count))
        best = block;
    if (best == blocks.end())
      return {std::unique_ptr<float, Free>(new (std::align_val_t(64)) float[count]), count};
    Block taken = std::move(*best);
    blocks.erase(best);
    return taken;
  }

  Block block_;
};

}  // namespace quantkit
