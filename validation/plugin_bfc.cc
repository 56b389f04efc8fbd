// The real tsl::BFCAllocator inside JAX's CUDA plugin (xla_cuda_plugin.so of jax-cuda12-pjrt),
// above a fake driver. No GPU is needed: the plugin is opened, not started.
//
// The class is not exported, so its functions are found in the plugin's symbol table, and its data
// is declared here. Which layout a plugin has is told by functions that came with it.
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "bfc_harness.h"

namespace {

#define BFC_ "_ZN3tsl12BFCAllocator"
const char kConstructor[] = BFC_ "C1ESt10unique_ptrINS_12SubAllocatorESt14default_deleteIS2_EEm"
    "RKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEERKNS0_7OptionsE";
const char kDestructor[] = BFC_ "D1Ev";
const char kAllocateRaw[] = BFC_ "11AllocateRawEmmRKNS_20AllocationAttributesE";
const char kDeallocateRaw[] = BFC_ "13DeallocateRawEPv";
const char kGetStats[] = BFC_ "8GetStatsEv";
const char kLargestFreeChunk[] = BFC_ "16LargestFreeChunkEv";         // until 0.10
const char kReturnToGap[] = BFC_ "24ReturnBoundaryChunkToGapEm";      // from 0.11 on: spatial
const char kExtendAtEnd[] = BFC_ "6ExtendEmmNS_13AllocationEndE";     // from 0.12 on: rules per end
const char kGetPjrtApi[] = "GetPjrtApi";                              // the one exported function
#undef BFC_

// Where a plugin's BFCAllocator has what is read here, in bytes from its start. Checked on opening.
struct Layout {
  size_t next_region_bytes;  // curr_region_allocation_bytes_
  size_t regions, chunks;    // std::vector, of elements this large:
  size_t region_bytes, chunk_bytes;
  bool has_spatial;         // chunks have tags, statistics have peak_allocated_bytes
  bool dies_of_second_gap;  // if it takes another region while there is a gap
};
constexpr Layout kLayout010 = {0x380, 0x420, 0x438, 0x30, 0x40, false, false};
constexpr Layout kLayout011 = {0x398, 0x438, 0x450, 0x30, 0x68, true, true};
constexpr Layout kLayout012 = {0x3c8, 0x470, 0x488, 0x38, 0x68, true, false};
constexpr size_t kObjectBytes = 0x1000;  // more than the largest of them

struct Options {  // of 0.12; earlier ones end at `initial_region_bytes` or at `spatial`
  bool allow_growth, allow_retry_on_failure, garbage_collection;
  double fragmentation_fraction;
  bool spatial;
  uint64_t initial_region_bytes;
  alloclab::EndRules lower, upper;
};
static_assert(offsetof(Options, spatial) == 0x10 && sizeof(Options) == 0x38);

struct AllocationAttributes {
  bool retry_on_failure, allocation_will_be_logged;
  void* freed_by_func;
  uint8_t end;  // from 0.11 on
};

struct Chunk {
  uint64_t size, requested_size;
  int64_t allocation_id;
  void* address;
  uint64_t previous, next;
  int32_t bin;
  uint64_t freed_at_count;
  uint8_t tag;  // from 0.11 on
};
static_assert(offsetof(Chunk, tag) == 0x40);

struct Region {
  void* address;
  uint64_t size;
  void* end;
  const uint64_t* handles;
};

// Has the virtual functions of tsl::SubAllocator in its order; the last one is new in 0.12.
class SubAllocator {
 public:
  explicit SubAllocator(alloclab::FakeDriver& driver) : driver_(driver) {}
  virtual ~SubAllocator() = default;
  virtual void* Alloc(size_t, size_t bytes, size_t* received) {
    return driver_.alloc(bytes, received);
  }
  virtual void Free(void* region, size_t bytes) { driver_.free(region, bytes); }
  virtual bool SupportsCoalescing() const { return false; }  // as JAX's for GPU memory
  virtual int GetMemoryType() const { return 1; }            // device memory
  virtual size_t GetAllocationGranularity() const { return driver_.granularity(); }

 private:
  alloclab::FakeDriver& driver_;
};

// The values of an ELF file's symbols, of the names given that it has.
class Symbols {
 public:
  Symbols(const char* path, const std::vector<const char*>& names) {
    const int file = open(path, O_RDONLY);
    struct stat info;
    if (file >= 0 && fstat(file, &info) == 0 && info.st_size > 0) {
      void* mapped = mmap(nullptr, info.st_size, PROT_READ, MAP_PRIVATE, file, 0);
      if (mapped != MAP_FAILED) {
        read(static_cast<const char*>(mapped), info.st_size, names);
        munmap(mapped, info.st_size);
      }
    }
    if (file >= 0) close(file);
  }
  bool has(const std::string& name) const { return values_.count(name) != 0; }
  uint64_t operator[](const std::string& name) const { return values_.at(name); }

 private:
  void read(const char* elf, size_t bytes, const std::vector<const char*>& names) {
    const auto& header = *reinterpret_cast<const Elf64_Ehdr*>(elf);
    if (bytes < sizeof header || std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 ||
        header.e_ident[EI_CLASS] != ELFCLASS64 ||
        header.e_shoff + header.e_shnum * sizeof(Elf64_Shdr) > bytes)
      return;
    const auto* sections = reinterpret_cast<const Elf64_Shdr*>(elf + header.e_shoff);
    for (int i = 0; i < header.e_shnum; ++i) {
      if (sections[i].sh_type != SHT_SYMTAB) continue;
      const char* strings = elf + sections[sections[i].sh_link].sh_offset;
      const auto* symbol = reinterpret_cast<const Elf64_Sym*>(elf + sections[i].sh_offset);
      for (uint64_t left = sections[i].sh_size / sizeof *symbol; left > 0; --left, ++symbol)
        for (const char* name : names)
          if (symbol->st_value != 0 && std::strcmp(strings + symbol->st_name, name) == 0)
            values_[name] = symbol->st_value;
    }
  }

  std::map<std::string, uint64_t> values_;
};

}  // namespace

class Library {
 public:
  Library(const Symbols& symbols, char* bias) {
    const auto find = [&](auto& function, const char* name) {
      using Function = std::remove_reference_t<decltype(function)>;
      function = symbols.has(name) ? reinterpret_cast<Function>(bias + symbols[name]) : nullptr;
    };
    find(construct, kConstructor);
    find(destroy, kDestructor);
    find(allocate_raw, kAllocateRaw);
    find(deallocate_raw, kDeallocateRaw);
    find(get_stats, kGetStats);
    find(largest_free_chunk, kLargestFreeChunk);
    layout = symbols.has(kExtendAtEnd)   ? kLayout012
             : symbols.has(kReturnToGap) ? kLayout011
                                         : kLayout010;
  }

  Layout layout;
  void (*construct)(void*, std::unique_ptr<SubAllocator>*, size_t, const std::string*,
                    const Options*);
  void (*destroy)(void*);
  void* (*allocate_raw)(void*, size_t, size_t, const AllocationAttributes*);
  void (*deallocate_raw)(void*, void*);
  void* (*get_stats)(void*, void*);  // returns a std::optional at its first argument
  int64_t (*largest_free_chunk)(void*);
};

namespace {

class PluginBfc final : public alloclab::Bfc {
 public:
  PluginBfc(const Library& library, const alloclab::Config& config)
      : Bfc(config), library_(library) {
    Options options = {};
    options.allow_growth = config.growth;
    options.fragmentation_fraction = config.fragmentation_fraction;
    options.spatial = config.spatial;
    options.lower = config.lower;
    options.upper = config.upper;
    auto below = std::make_unique<SubAllocator>(driver);
    const std::string name = "GPU_0_bfc";
    library_.construct(object_, &below, config.limit, &name, &options);
    if (config.spatial && library_.layout.dies_of_second_gap)
      driver.is_deadly = [this] {
        const std::vector<alloclab::Chunk> all = chunks();
        return std::any_of(all.begin(), all.end(),
                           [](const auto& chunk) { return chunk.tag == alloclab::kGap; });
      };
  }
  ~PluginBfc() override { library_.destroy(object_); }

  void* allocate(size_t size, size_t alignment, int end) override {
    const AllocationAttributes attributes = {false, false, nullptr, static_cast<uint8_t>(end)};
    return library_.allocate_raw(object_, alignment, size, &attributes);
  }
  void deallocate(void* address) override { library_.deallocate_raw(object_, address); }

  alloclab::Stats stats() override {
    int64_t words[0x20];  // the statistics in order; an optional is a value and a word for "set"
    library_.get_stats(words, object_);
    const auto optional = [](const int64_t* at) { return (at[1] & 0xff) ? at[0] : -1; };
    const int64_t* rest = words + (library_.layout.has_spatial ? 9 : 8);
    return {words[0], words[1],           words[2], words[3],           optional(words + 4),
            words[6], words[7],           optional(rest), rest[2],      optional(rest + 3),
            optional(rest + 5)};
  }

  std::vector<alloclab::Chunk> chunks() override {
    std::vector<alloclab::Chunk> rows;
    const Layout& layout = library_.layout;
    const Elements regions = elements(layout.regions, layout.region_bytes);
    const Elements chunks = elements(layout.chunks, layout.chunk_bytes);
    for (uint64_t i = 0; i < regions.count; ++i) {
      const auto& region =
          *reinterpret_cast<const Region*>(regions.begin + i * layout.region_bytes);
      // What follows the last chunk is the handle ~0, which is no element.
      for (uint64_t handle = region.handles[0]; handle < chunks.count;) {
        const auto& chunk =
            *reinterpret_cast<const Chunk*>(chunks.begin + handle * layout.chunk_bytes);
        const bool in_use = chunk.allocation_id != -1;
        rows.push_back({static_cast<int64_t>(i), driver.offset(chunk.address),
                        static_cast<int64_t>(chunk.size),
                        in_use ? static_cast<int64_t>(chunk.requested_size) : 0, in_use, chunk.bin,
                        tag_of(chunk)});
        handle = chunk.next;
      }
    }
    return rows;
  }

  int64_t largest_free() override {
    return library_.largest_free_chunk ? library_.largest_free_chunk(object_)
                                       : stats().largest_free_block_bytes;
  }
  uint64_t next_region_bytes() override {
    return *reinterpret_cast<const uint64_t*>(object_ + library_.layout.next_region_bytes);
  }

 private:
  struct Elements {
    const char* begin;
    uint64_t count;
  };
  // Those of a std::vector; none if it cannot be one, so that a wrong layout is found by looking.
  Elements elements(size_t at, size_t bytes) const {
    uintptr_t words[3];  // begin, end, end of the room
    std::memcpy(words, object_ + at, sizeof words);
    const bool is_vector = words[0] <= words[1] && words[1] <= words[2] &&
                           (words[1] - words[0]) % bytes == 0 &&
                           (words[2] - words[0]) % bytes == 0;
    return {reinterpret_cast<const char*>(words[0]),
            is_vector ? (words[1] - words[0]) / bytes : 0};
  }

  int64_t tag_of(const Chunk& chunk) const {
    return library_.layout.has_spatial ? int64_t{chunk.tag} : alloclab::kLower;
  }

  const Library& library_;
  alignas(64) char object_[kObjectBytes] = {};
};

}  // namespace

std::unique_ptr<Library> open_library(const char* path, std::string& why) {
  const std::vector<const char*> needed = {kConstructor, kDestructor, kAllocateRaw,
                                           kDeallocateRaw, kGetStats, kGetPjrtApi};
  std::vector<const char*> names = needed;
  names.insert(names.end(), {kLargestFreeChunk, kReturnToGap, kExtendAtEnd});
  const Symbols symbols(path, names);
  for (const char* name : needed)
    if (!symbols.has(name)) {
      why = std::string("it has no symbol ") + name;
      return nullptr;
    }
  void* handle = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (handle == nullptr) {
    why = dlerror();
    return nullptr;
  }
  char* bias = static_cast<char*>(dlsym(handle, kGetPjrtApi)) - symbols[kGetPjrtApi];
  return std::make_unique<Library>(symbols, bias);
}

std::unique_ptr<alloclab::Bfc> create(Library& library, const alloclab::Config& config) {
  return std::make_unique<PluginBfc>(library, config);
}
