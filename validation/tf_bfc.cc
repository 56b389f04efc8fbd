// The real tsl::BFCAllocator, as exported by the tensorflow-cpu wheel, above a fake driver.
#include "bfc_harness.h"
#include "xla/tsl/framework/allocator.h"
#include "xla/tsl/framework/bfc_allocator.h"

namespace tsl {

// The header befriends a class of this name: it sees what the public interface does not tell.
class GPUBFCAllocatorPrivateMethodsTest {
 public:
  static uint64_t next_region_bytes(const BFCAllocator& bfc) {
    return bfc.curr_region_allocation_bytes_;
  }

  static int64_t largest_free(BFCAllocator& bfc) {
    absl::MutexLock lock(bfc.mutex_);
    return bfc.LargestFreeChunk();
  }

  static std::vector<alloclab::Chunk> chunks(BFCAllocator& bfc,
                                             const alloclab::FakeDriver& driver) {
    absl::MutexLock lock(bfc.mutex_);
    std::vector<alloclab::Chunk> rows;
    int64_t region = 0;
    for (const auto& each : bfc.region_manager_.regions()) {
      auto handle = bfc.region_manager_.get_handle(each.ptr());
      while (handle != BFCAllocator::kInvalidChunkHandle) {
        const auto* chunk = bfc.ChunkFromHandle(handle);
        rows.push_back({region, driver.offset(chunk->ptr), static_cast<int64_t>(chunk->size),
                        chunk->in_use() ? static_cast<int64_t>(chunk->requested_size) : 0,
                        chunk->in_use(), chunk->bin_num, alloclab::kLower});
        handle = chunk->next;
      }
      ++region;
    }
    return rows;
  }
};

}  // namespace tsl

namespace {

using Inside = tsl::GPUBFCAllocatorPrivateMethodsTest;

class SubAllocator final : public tsl::SubAllocator {
 public:
  explicit SubAllocator(alloclab::FakeDriver& driver)
      : tsl::SubAllocator({}, {}), driver_(driver) {}
  void* Alloc(size_t, size_t bytes, size_t* received) override {
    return driver_.alloc(bytes, received);
  }
  void Free(void* region, size_t bytes) override { driver_.free(region, bytes); }
  bool SupportsCoalescing() const override { return false; }  // as JAX's for GPU memory

 private:
  alloclab::FakeDriver& driver_;
};

class TfBfc final : public alloclab::Bfc {
 public:
  explicit TfBfc(const alloclab::Config& config) : Bfc(config) {
    tsl::BFCAllocator::Options options;
    options.allow_growth = config.growth;
    options.allow_retry_on_failure = false;
    options.garbage_collection = false;
    options.fragmentation_fraction = config.fragmentation_fraction;
    bfc_ = std::make_unique<tsl::BFCAllocator>(std::make_unique<SubAllocator>(driver),
                                               config.limit, "GPU_0_bfc", options);
    attributes_.retry_on_failure = false;
  }

  void* allocate(size_t size, size_t alignment, int) override {
    return bfc_->AllocateRaw(alignment, size, attributes_);
  }
  void deallocate(void* address) override { bfc_->DeallocateRaw(address); }
  alloclab::Stats stats() override {
    const tsl::AllocatorStats stats = *bfc_->GetStats();
    return {stats.num_allocs,
            stats.bytes_in_use,
            stats.peak_bytes_in_use,
            stats.largest_alloc_size,
            stats.bytes_limit.value_or(-1),
            stats.bytes_reserved,
            stats.peak_bytes_reserved,
            stats.bytes_reservable_limit.value_or(-1),
            stats.largest_free_block_bytes,
            stats.pool_bytes.value_or(-1),
            stats.peak_pool_bytes.value_or(-1)};
  }
  std::vector<alloclab::Chunk> chunks() override { return Inside::chunks(*bfc_, driver); }
  int64_t largest_free() override { return Inside::largest_free(*bfc_); }
  uint64_t next_region_bytes() override { return Inside::next_region_bytes(*bfc_); }

 private:
  std::unique_ptr<tsl::BFCAllocator> bfc_;
  tsl::AllocationAttributes attributes_;
};

}  // namespace

class Library {};  // it is linked

std::unique_ptr<Library> open_library(const char*, std::string&) {
  return std::make_unique<Library>();
}

std::unique_ptr<alloclab::Bfc> create(Library&, const alloclab::Config& config) {
  return std::make_unique<TfBfc>(config);
}
