// A pool of threads for parallel loops, whose work goes out piece by piece.
//
// The caller works too. At the end it waits for pieces that other threads have begun, never for
// threads that have not been scheduled, so on a busy machine a thread without a processor delays
// nothing. Idle threads spin for a moment before they sleep, since the next product follows
// within microseconds.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quantkit {

constexpr int64_t kMinParallelWork = 1 << 16;  // products below which a second thread is not worth it

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  // Never destroyed: its threads may outlive everything static.
  static Pool& instance() {
    static Pool* pool = new Pool;
    return *pool;
  }

  // Call work(i) for all i below count, at least `chunk` of them at a time, on at most `threads` threads. A thread
  // takes half of its share of what is left: long stretches of memory first, short ones so that all end together.
  template <class Work>
  void parallel_for(int64_t count, int64_t chunk, int threads, const Work& work) {
    std::unique_lock<std::mutex> owned(owner_, std::defer_lock);
    if (threads <= 1 || count <= chunk || !owned.try_lock()) {
      for (int64_t i = 0; i < count; ++i) work(i);
      return;
    }
    spawn(threads - 1);
    call_ = [](const void* of, int64_t i) { (*static_cast<const Work*>(of))(i); };
    work_ = &work;
    count_ = count;
    chunk_ = chunk;
    helpers_ = threads - 1;
    next_.store(0, std::memory_order_relaxed);
    inside_.store(kOpen, std::memory_order_release);
    jobs_.fetch_add(1, std::memory_order_release);
    jobs_.notify_all();
    do_pieces();
    uint32_t inside = inside_.fetch_and(~kOpen, std::memory_order_acq_rel) & ~kOpen;
    const auto start = std::chrono::steady_clock::now();
    for (; inside; inside = inside_.load(std::memory_order_acquire)) {
      if (std::chrono::steady_clock::now() - start < kWaitSpin) {
        relax();
      } else {
        inside_.wait(inside, std::memory_order_acquire);
      }
    }
  }

 private:
  static constexpr uint32_t kOpen = 1u << 31;
  static constexpr std::chrono::microseconds kWaitSpin{20};   // of the caller at the end, before it sleeps
  static constexpr std::chrono::microseconds kIdleSpin{100};  // of helpers, before they sleep

  void spawn(int helpers) {
    for (; spawned_ < helpers; ++spawned_) std::thread(&Pool::help, this, spawned_).detach();
  }

  void do_pieces() {
    const int64_t shares = 2 * (helpers_ + 1);
    for (int64_t start = next_.load(std::memory_order_relaxed); start < count_;) {
      const int64_t stop = std::min(start + std::max(chunk_, (count_ - start) / shares), count_);
      if (!next_.compare_exchange_weak(start, stop, std::memory_order_relaxed)) continue;
      for (int64_t i = start; i < stop; ++i) call_(work_, i);
      start = next_.load(std::memory_order_relaxed);
    }
  }

  void help(int index) {
    for (uint32_t seen = 0;;) {
      const auto start = std::chrono::steady_clock::now();
      while (jobs_.load(std::memory_order_acquire) == seen) {
        if (std::chrono::steady_clock::now() - start < kIdleSpin) {
          for (int i = 0; i < 16; ++i) relax();
        } else {
          jobs_.wait(seen, std::memory_order_acquire);
        }
      }
      seen = jobs_.load(std::memory_order_acquire);
      uint32_t inside = inside_.load(std::memory_order_acquire);
      while (inside & kOpen) {
        if (!inside_.compare_exchange_weak(inside, inside + 1, std::memory_order_acq_rel)) continue;
        if (index < helpers_) do_pieces();
        if (inside_.fetch_sub(1, std::memory_order_acq_rel) == 1) inside_.notify_one();
        break;
      }
    }
  }

  std::mutex owner_;
  int spawned_ = 0;
  alignas(64) std::atomic<uint32_t> jobs_{0};
  alignas(64) std::atomic<uint32_t> inside_{0};  // helpers at the job; the top bit lets more in
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) void (*call_)(const void*, int64_t) = nullptr;
  const void* work_ = nullptr;
  int64_t count_ = 0, chunk_ = 0;
  int helpers_ = 0;
};

}  // namespace quantkit
