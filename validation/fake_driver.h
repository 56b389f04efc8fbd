// A driver that hands out addresses and no memory: what lies below a BFC allocator, without a GPU.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <new>
#include <vector>

namespace alloclab {

inline uint64_t align_up(uint64_t bytes, uint64_t alignment) {
  return (bytes + alignment - 1) / alignment * alignment;
}

struct DriverCall {
  enum Kind : int64_t { kAlloc, kRefused, kFree };
  int64_t kind, offset, bytes;  // offset is -1 where refused
};

struct DriverConfig {
  uint64_t address_space;  // bytes of addresses
  uint64_t capacity;       // bytes that it gives in total
  uint64_t largest;        // the largest single allocation that it grants
  uint64_t gap;            // addresses left unused after each region
  uint64_t granularity;    // what it gives is a multiple of this
};

// Addresses come from one reserved range that nothing may touch, and are never given out twice.
class FakeDriver {
 public:
  explicit FakeDriver(const DriverConfig& config) : config_(config) {
    mapped_bytes_ = config.address_space + kBaseAlignment;
    mapped_ = mmap(nullptr, mapped_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    if (mapped_ == MAP_FAILED) throw std::bad_alloc();
    base_ = align_up(reinterpret_cast<uintptr_t>(mapped_), kBaseAlignment);
    next_ = base_;
  }
  ~FakeDriver() { munmap(mapped_, mapped_bytes_); }
  FakeDriver(const FakeDriver&) = delete;
  FakeDriver& operator=(const FakeDriver&) = delete;

  void* alloc(size_t bytes, size_t* received) {
    const uint64_t given = align_up(bytes, config_.granularity);
    const bool granted = bytes <= config_.largest && given <= config_.capacity - in_use_;
    const bool deadly = next_ + given > base_ + config_.address_space || (granted && is_deadly());
    // Asked for the same again, the caller would ask for ever; granting ends its loop.
    const bool asks_again = !granted && bytes == last_refused_;
    stuck_ |= deadly || asks_again;
    if (deadly || !(granted || asks_again)) {
      last_refused_ = bytes;
      calls_.push_back({DriverCall::kRefused, -1, static_cast<int64_t>(bytes)});
      return nullptr;
    }
    const uintptr_t address = next_;
    next_ = align_up(address + given + config_.gap, kAlignment);
    in_use_ += given;
    *received = given;
    calls_.push_back({DriverCall::kAlloc, static_cast<int64_t>(address - base_),
                      static_cast<int64_t>(given)});
    return reinterpret_cast<void*>(address);
  }

  void free(void* region, size_t bytes) {
    if (bytes == 0) return;
    in_use_ -= bytes;
    calls_.push_back({DriverCall::kFree, offset(region), static_cast<int64_t>(bytes)});
  }

  // A new request to the caller begins.
  void begin_request() { last_refused_ = 0; }
  // Whether the caller did what would never end, or end the process, had it a real driver.
  bool stuck() const { return stuck_; }
  // Whether the caller would not survive another region; set by who knows it.
  std::function<bool()> is_deadly = [] { return false; };

  uintptr_t base() const { return base_; }
  int64_t offset(const void* address) const {
    return static_cast<int64_t>(reinterpret_cast<uintptr_t>(address) - base_);
  }
  uint64_t granularity() const { return config_.granularity; }
  const std::vector<DriverCall>& calls() const { return calls_; }

 private:
  static constexpr uint64_t kAlignment = 256;  // what BFC insists on
  static constexpr uint64_t kBaseAlignment = uint64_t{1} << 30;  // offset 0 suits any alignment

  DriverConfig config_;
  void* mapped_;
  size_t mapped_bytes_;
  uintptr_t base_, next_;
  uint64_t in_use_ = 0, last_refused_ = 0;
  bool stuck_ = false;
  std::vector<DriverCall> calls_;
};

}  // namespace alloclab
