// What both harnesses share: the interface to a real BFC allocator and the C functions that drive
// it. A harness defines Library, with `open` and `create`, and includes this file.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "fake_driver.h"

namespace alloclab {

constexpr uint64_t kMinAllocationSize = 256;
constexpr int64_t kRefused = -1, kFreed = -2, kStopped = -3;

// How an end of a spatial pool is used, as in BFCAllocator::Options of 0.12.
struct EndRules {
  int32_t descending, exact_holes, exact_gap;
};

struct Config {
  uint64_t limit;
  DriverConfig driver;
  double fragmentation_fraction;
  int32_t growth, spatial;
  EndRules lower, upper;
};

enum Tag : int64_t { kGap, kLower, kUpper };

struct Chunk {
  int64_t region, offset, size, requested, in_use, bin, tag;
};

struct Stats {  // tsl::AllocatorStats; -1 where unset
  int64_t num_allocs, bytes_in_use, peak_bytes_in_use, largest_alloc_size, bytes_limit,
      bytes_reserved, peak_bytes_reserved, bytes_reservable_limit, largest_free_block_bytes,
      pool_bytes, peak_pool_bytes;
};

// A real allocator above a fake driver. Retry is off: a refused request returns at once.
class Bfc {
 public:
  explicit Bfc(const Config& config) : config(config), driver(config.driver) {}
  virtual ~Bfc() = default;

  virtual void* allocate(size_t size, size_t alignment, int end) = 0;
  virtual void deallocate(void* address) = 0;
  virtual Stats stats() = 0;
  virtual std::vector<Chunk> chunks() = 0;
  virtual int64_t largest_free() = 0;
  virtual uint64_t next_region_bytes() = 0;

  // An offset, kRefused, or kStopped if the real code would not come back from this request; from
  // then on the allocator is not to be used.
  int64_t request(uint64_t size, uint64_t alignment, int end) {
    if (stopped || doubles_for_ever(size, alignment, end)) return stop();
    driver.begin_request();
    void* address = allocate(size, alignment, end);
    if (driver.stuck()) return stop();
    return address == nullptr ? kRefused : driver.offset(address);
  }

  const Config config;
  FakeDriver driver;
  bool stopped = false;

 private:
  int64_t stop() {
    stopped = true;
    return kStopped;
  }

  // Extend doubles the next region's size until it is large enough; after too many doublings that
  // size is 0 (mod 2^64) and stays 0.
  bool doubles_for_ever(uint64_t size, uint64_t alignment, int end) {
    if (size == 0 || next_region_bytes() != 0) return false;
    const uint64_t rounded = align_up(size, kMinAllocationSize);
    const uint64_t left = config.limit - static_cast<uint64_t>(stats().pool_bytes);
    if (rounded > left / kMinAllocationSize * kMinAllocationSize) return false;
    for (const Chunk& chunk : chunks())
      if (!chunk.in_use && fits(chunk, rounded, std::max(alignment, kMinAllocationSize), end))
        return false;
    return true;
  }

  bool fits(const Chunk& chunk, uint64_t rounded, uint64_t alignment, int end) const {
    if (config.spatial && chunk.tag != kGap && chunk.tag != (end ? kUpper : kLower)) return false;
    const uint64_t low = chunk.offset, high = low + chunk.size;
    if (high - low < rounded) return false;
    return end && config.spatial ? (high - rounded) / alignment * alignment >= low
                                 : align_up(low, alignment) + rounded <= high;
  }
};

// Does the library behave as its layout was read? Returns what is wrong, or nothing.
inline std::string self_check(Bfc& bfc) {
  const uint64_t limit = bfc.config.limit;
  const uint64_t pool = limit / kMinAllocationSize * kMinAllocationSize;
  if (bfc.next_region_bytes() != align_up(limit, kMinAllocationSize)) return "next region size";
  if (bfc.stats().bytes_limit != static_cast<int64_t>(limit)) return "bytes_limit";
  if (!bfc.chunks().empty()) return "regions";
  if (bfc.request(1, 1, 0) != 0) return "first address";
  const Stats stats = bfc.stats();
  if (stats.num_allocs != 1 || stats.bytes_in_use != 256 || stats.largest_alloc_size != 256 ||
      stats.pool_bytes != static_cast<int64_t>(pool) || stats.peak_pool_bytes != stats.pool_bytes)
    return "statistics";
  const std::vector<Chunk> chunks = bfc.chunks();
  if (chunks.size() != 2) return "number of chunks";
  const Chunk &used = chunks[0], &free = chunks[1];
  if (used.offset != 0 || used.size != 256 || used.requested != 1 || !used.in_use ||
      used.bin != -1 || free.offset != 256 || free.size != static_cast<int64_t>(pool - 256) ||
      free.in_use || used.tag != kLower || free.tag != kLower)
    return "chunks";
  if (bfc.largest_free() != free.size) return "largest free chunk";
  bfc.deallocate(reinterpret_cast<void*>(bfc.driver.base()));
  return bfc.chunks().size() == 1 ? "" : "coalescing";
}

inline Config check_config() {
  const uint64_t limit = (1 << 20) + 12345;
  return {limit, {4 * limit, 4 * limit, 4 * limit, 0, kMinAllocationSize}, 0.0, 0, 0, {}, {}};
}

template <class Row>
int64_t copy_rows(const std::vector<Row>& rows, int64_t capacity, Row* out) {
  const int64_t count = rows.size();
  std::copy_n(rows.begin(), std::min(count, capacity), out);
  return count;
}

}  // namespace alloclab

class Library;
std::unique_ptr<Library> open_library(const char* path, std::string& why);
std::unique_ptr<alloclab::Bfc> create(Library&, const alloclab::Config&);
extern "C" {

// The opened library, for as long as the process lives, or null and why.
Library* bfc_open(const char* path, char* why, int64_t why_bytes) {
  std::string error;
  std::unique_ptr<Library> library = open_library(path, error);
  if (library) {
    error = alloclab::self_check(*create(*library, alloclab::check_config()));
    if (!error.empty()) error = "its data is not laid out as expected: " + error;
  }
  std::strncpy(why, error.c_str(), why_bytes - 1);
  return error.empty() ? library.release() : nullptr;
}

alloclab::Bfc* bfc_new(Library* library, const alloclab::Config* config) {
  try {
    return create(*library, *config).release();
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void bfc_delete(alloclab::Bfc* bfc) { delete bfc; }

int64_t bfc_alloc(alloclab::Bfc* bfc, uint64_t size, uint64_t alignment, int32_t end) {
  return bfc->request(size, alignment, end);
}

void bfc_free(alloclab::Bfc* bfc, int64_t offset) {
  bfc->deallocate(reinterpret_cast<void*>(bfc->driver.base() + offset));
}

// Replays a stream, one row per event; `ids` are below `num_ids`, and `states` (bytes in use,
// largest free, pool bytes after the event) may be null. Returns seconds.
double bfc_replay(alloclab::Bfc* bfc, int64_t count, const uint8_t* is_alloc, const int64_t* ids,
                  const int64_t* sizes, const int64_t* alignments, const uint8_t* ends,
                  int64_t num_ids, int64_t* offsets, int64_t (*states)[3]) {
  std::vector<int64_t> live(num_ids, alloclab::kRefused);
  const auto start = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < count; ++i) {
    int64_t& address = live[ids[i]];
    if (is_alloc[i]) {
      offsets[i] = address = bfc->request(sizes[i], alignments[i], ends[i]);
    } else {
      if (address >= 0) bfc_free(bfc, address);
      address = alloclab::kRefused;
      offsets[i] = alloclab::kFreed;
    }
    if (bfc->stopped) {
      std::fill(offsets + i, offsets + count, alloclab::kStopped);
      break;
    }
    if (states != nullptr) {
      const alloclab::Stats stats = bfc->stats();
      states[i][0] = stats.bytes_in_use;
      states[i][1] = bfc->largest_free();
      states[i][2] = stats.pool_bytes;
    }
  }
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

void bfc_stats(alloclab::Bfc* bfc, alloclab::Stats* out) { *out = bfc->stats(); }

int64_t bfc_largest_free(alloclab::Bfc* bfc) { return bfc->largest_free(); }

uint64_t bfc_next_region_bytes(alloclab::Bfc* bfc) { return bfc->next_region_bytes(); }

// These two return how many rows there are and write at most `capacity`.
int64_t bfc_chunks(alloclab::Bfc* bfc, int64_t capacity, alloclab::Chunk* out) {
  return alloclab::copy_rows(bfc->chunks(), capacity, out);
}

int64_t bfc_driver_calls(alloclab::Bfc* bfc, int64_t capacity, alloclab::DriverCall* out) {
  return alloclab::copy_rows(bfc->driver.calls(), capacity, out);
}

}  // extern "C"
