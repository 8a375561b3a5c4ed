// Rules, as torch documents them and its statistics show them:
//
// - Requests are rounded up to 512 bytes. Up to 1 MiB they are small, each pool for itself.
// - Small ones come from segments of 2 MiB, those below 10 MiB from segments of 20 MiB, larger ones
//   have a segment of their own, rounded up to 2 MiB.
// - The smallest free block of the same stream that is large enough serves a request. Of what is
//   left a free block is made: of 512 bytes or more in the small pool, of more than 1 MiB in the
//   large one.
// - Free neighbours become one block.
// - A block that other streams use is free once what they held at its release is done.
// - Where the device refuses a segment, whole free segments are given back, after waiting for
//   all blocks that are in use on other streams, and it is asked once more: a retry. Then it is out
//   of memory.
#include "memory.h"

#include <c10/core/Allocator.h>
#include <c10/util/Exception.h>
#include <sys/mman.h>

#include <array>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <tuple>
#include <unordered_map>
#include <vector>

namespace standin {
namespace {

using c10::CachingAllocator::format_size;
using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;
using c10::CachingDeviceAllocator::DeviceStats;

constexpr size_t kMiB = 1 << 20;
constexpr size_t kGranule = 512;
constexpr size_t kMostSmall = kMiB;
constexpr size_t kSmallSegment = 2 * kMiB;
constexpr size_t kLargeSegment = 20 * kMiB;
constexpr size_t kOwnSegmentFrom = 10 * kMiB;
constexpr size_t kSegmentGranule = 2 * kMiB;
constexpr size_t kDefaultCapacity = size_t{16} << 30;

size_t round_up(size_t bytes, size_t granule) { return (bytes + granule - 1) / granule * granule; }

size_t segment_bytes(size_t bytes) {
  if (bytes <= kMostSmall) {
    return kSmallSegment;
  }
  return bytes < kOwnSegmentFrom ? kLargeSegment : round_up(bytes, kSegmentGranule);
}

// Address space for segments. Of what is given back the pages go and the addresses stay, for the
// next one as large: what wrongly touches it reads zeros and does not end the process.
class AddressSpace {
 public:
  char* take(size_t bytes) {
    auto& known = given_back_[bytes];
    if (!known.empty()) {
      char* start = known.back();
      known.pop_back();
      return start;
    }
    void* start = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(start != MAP_FAILED, "the host has no addresses for ", format_size(bytes));
    return static_cast<char*>(start);
  }

  void give_back(char* start, size_t bytes) {
    madvise(start, bytes, MADV_DONTNEED);
    given_back_[bytes].push_back(start);
  }

 private:
  std::map<size_t, std::vector<char*>> given_back_;
};

struct Block {
  char* data;
  size_t bytes;
  int64_t stream;
  bool is_small;
  Block* before = nullptr;  // in the same segment
  Block* after = nullptr;
  bool is_allocated = false;
  size_t requested = 0;
  std::set<int64_t> other_streams;
  std::vector<Place> uses;  // of other streams, since the block was given back

  bool is_split() const { return before != nullptr || after != nullptr; }
  bool is_free() const { return !is_allocated && uses.empty(); }
};

struct BestFit {
  bool operator()(const Block* a, const Block* b) const {
    return std::tie(a->stream, a->bytes, a->data) < std::tie(b->stream, b->bytes, b->data);
  }
};

void reset_peaks(StatArray& stats) {
  for (Stat& stat : stats) {
    stat.reset_peak();
  }
}

class DeviceMemory {
 public:
  explicit DeviceMemory(int device) : device_(device) {}

  char* allocate(size_t wanted, int64_t stream) {
    const std::lock_guard guard(mutex_);
    finish_uses();
    const size_t bytes = std::max(round_up(wanted, kGranule), kGranule);
    const bool is_small = bytes <= kMostSmall;
    Block* block = best_fit(bytes, stream, is_small);
    if (block == nullptr) {
      block = new_segment(bytes, stream, is_small);
    }
    if (block == nullptr) {
      release_cached();
      stats_.num_alloc_retries++;
      block = new_segment(bytes, stream, is_small);
    }
    if (block == nullptr) {
      refuse(wanted);
    }
    split(block, bytes);
    block->is_allocated = true;
    block->requested = wanted;
    blocks_[block->data].reset(block);
    increase(is_small, stats_.allocation, 1);
    increase(is_small, stats_.allocated_bytes, block->bytes);
    increase(is_small, stats_.active, 1);
    increase(is_small, stats_.active_bytes, block->bytes);
    increase(is_small, stats_.requested_bytes, wanted);
    return block->data;
  }

  bool give_back(char* data) {
    const std::lock_guard guard(mutex_);
    const auto found = blocks_.find(data);
    if (found == blocks_.end()) {
      return false;
    }
    Block* block = found->second.release();
    blocks_.erase(found);
    block->is_allocated = false;
    decrease(block->is_small, stats_.allocation, 1);
    decrease(block->is_small, stats_.allocated_bytes, block->bytes);
    for (const int64_t stream : block->other_streams) {
      block->uses.push_back(end_of(device_, stream));
    }
    block->other_streams.clear();
    if (block->uses.empty()) {
      make_free(block);
    } else {
      pending_.push_back(block);
    }
    return true;
  }

  void record_stream(char* data, int64_t stream) {
    const std::lock_guard guard(mutex_);
    const auto found = blocks_.find(data);
    TORCH_CHECK(found != blocks_.end(), "record_stream: this memory is not of the device");
    if (found->second->stream != stream) {
      found->second->other_streams.insert(stream);
    }
  }

  void empty_cache() {
    const std::lock_guard guard(mutex_);
    release_cached();
  }

  DeviceStats stats() {
    const std::lock_guard guard(mutex_);
    return stats_;
  }

  void reset_accumulated() {
    const std::lock_guard guard(mutex_);
    for (StatArray* stats : all_stats()) {
      for (Stat& stat : *stats) {
        stat.reset_accumulated();
      }
    }
    stats_.num_alloc_retries = stats_.num_ooms = stats_.num_sync_all_streams = 0;
    stats_.num_device_alloc = stats_.num_device_free = 0;
  }

  void reset_peak() {
    const std::lock_guard guard(mutex_);
    for (StatArray* stats : all_stats()) {
      reset_peaks(*stats);
    }
  }

  std::pair<size_t, size_t> info() {
    const std::lock_guard guard(mutex_);
    return {free_bytes(), capacity_};
  }

  void set_capacity(size_t bytes) {
    const std::lock_guard guard(mutex_);
    capacity_ = bytes;
  }

  void set_occupied(size_t bytes) {
    const std::lock_guard guard(mutex_);
    occupied_ = bytes;
  }

  void set_fraction(double fraction) {
    const std::lock_guard guard(mutex_);
    fraction_ = fraction;
  }

  double fraction() {
    const std::lock_guard guard(mutex_);
    return fraction_;
  }

 private:
  std::array<StatArray*, 9> all_stats() {
    return {&stats_.allocation,      &stats_.segment,        &stats_.active,
            &stats_.inactive_split,  &stats_.allocated_bytes, &stats_.reserved_bytes,
            &stats_.active_bytes,    &stats_.inactive_split_bytes,
            &stats_.requested_bytes};
  }

  static std::array<Stat*, 2> counted(bool is_small, StatArray& stats) {
    const auto pool = is_small ? StatType::SMALL_POOL : StatType::LARGE_POOL;
    return {&stats[static_cast<size_t>(StatType::AGGREGATE)], &stats[static_cast<size_t>(pool)]};
  }

  static void increase(bool is_small, StatArray& stats, size_t amount) {
    for (Stat* stat : counted(is_small, stats)) {
      stat->increase(amount);
    }
  }

  static void decrease(bool is_small, StatArray& stats, size_t amount) {
    for (Stat* stat : counted(is_small, stats)) {
      stat->decrease(amount);
    }
  }

  size_t reserved() const {
    return stats_.reserved_bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
  }

  size_t free_bytes() const {
    const size_t taken = reserved() + occupied_;
    return taken < capacity_ ? capacity_ - taken : 0;
  }

  // Blocks that are split and free count apart: they cannot be given back to the device.
  void count_free_split(const Block* block, bool appears) {
    if (block->is_split()) {
      (appears ? increase : decrease)(block->is_small, stats_.inactive_split, 1);
      (appears ? increase : decrease)(block->is_small, stats_.inactive_split_bytes, block->bytes);
    }
  }

  Block* best_fit(size_t bytes, int64_t stream, bool is_small) {
    auto& pool = free_[is_small];
    Block wanted{nullptr, bytes, stream, is_small};
    const auto found = pool.lower_bound(&wanted);
    if (found == pool.end() || (*found)->stream != stream) {
      return nullptr;
    }
    Block* block = *found;
    count_free_split(block, false);
    pool.erase(found);
    return block;
  }

  Block* new_segment(size_t wanted, int64_t stream, bool is_small) {
    const size_t bytes = segment_bytes(wanted);
    const auto allowed = static_cast<size_t>(fraction_ * static_cast<double>(capacity_));
    if (reserved() + bytes > allowed || bytes > free_bytes()) {
      return nullptr;
    }
    increase(is_small, stats_.segment, 1);
    increase(is_small, stats_.reserved_bytes, bytes);
    stats_.num_device_alloc++;
    return new Block{addresses_.take(bytes), bytes, stream, is_small};
  }

  // Cuts off what the request does not need. The block is of no pool now.
  void split(Block* block, size_t bytes) {
    const size_t rest = block->bytes - bytes;
    const bool is_worth_it = block->is_small ? rest >= kGranule : rest > kMostSmall;
    if (!is_worth_it) {
      return;
    }
    auto* other = new Block{block->data + bytes, rest, block->stream, block->is_small};
    other->before = block;
    other->after = block->after;
    if (other->after != nullptr) {
      other->after->before = other;
    }
    block->after = other;
    block->bytes = bytes;
    free_[block->is_small].insert(other);
    count_free_split(other, true);
  }

  void make_free(Block* block) {
    decrease(block->is_small, stats_.active, 1);
    decrease(block->is_small, stats_.active_bytes, block->bytes);
    decrease(block->is_small, stats_.requested_bytes, block->requested);
    for (Block* neighbour : {block->before, block->after}) {
      if (neighbour != nullptr && neighbour->is_free()) {
        join(block, neighbour);
      }
    }
    free_[block->is_small].insert(block);
    count_free_split(block, true);
  }

  void join(Block* block, Block* neighbour) {
    count_free_split(neighbour, false);
    free_[block->is_small].erase(neighbour);
    if (neighbour == block->before) {
      block->data = neighbour->data;
      block->before = neighbour->before;
      if (block->before != nullptr) {
        block->before->after = block;
      }
    } else {
      block->after = neighbour->after;
      if (block->after != nullptr) {
        block->after->before = block;
      }
    }
    block->bytes += neighbour->bytes;
    delete neighbour;
  }

  // Frees the blocks whose other streams are done with them.
  void finish_uses() {
    std::vector<Block*> still_pending;
    for (Block* block : pending_) {
      std::erase_if(block->uses, is_reached);
      if (block->uses.empty()) {
        make_free(block);
      } else {
        still_pending.push_back(block);
      }
    }
    pending_ = std::move(still_pending);
  }

  void release_cached() {
    if (!pending_.empty()) {
      stats_.num_sync_all_streams++;
    }
    for (Block* block : pending_) {
      for (const Place& use : block->uses) {
        reach(use);
      }
    }
    finish_uses();
    for (auto& pool : free_) {
      for (auto each = pool.begin(); each != pool.end();) {
        Block* block = *each;
        if (block->is_split()) {
          ++each;
          continue;
        }
        reach_all(device_);  // as a driver does before it takes memory away
        decrease(block->is_small, stats_.segment, 1);
        decrease(block->is_small, stats_.reserved_bytes, block->bytes);
        stats_.num_device_free++;
        addresses_.give_back(block->data, block->bytes);
        each = pool.erase(each);
        delete block;
      }
    }
  }

  [[noreturn]] void refuse(size_t wanted) {
    stats_.num_ooms++;
    const auto allocated =
        stats_.allocated_bytes[static_cast<size_t>(StatType::AGGREGATE)].current;
    TORCH_CHECK_WITH(
        OutOfMemoryError, false, "standin out of memory. Tried to allocate ", format_size(wanted),
        ". Device ", device_, " has a total capacity of ", format_size(capacity_), " of which ",
        format_size(free_bytes()), " is free, and torch may use a share of ", fraction_,
        ". Tensors hold ", format_size(allocated), ", and ", format_size(reserved() - allocated),
        " is reserved but not allocated.");
  }

  const int device_;
  std::recursive_mutex mutex_;
  size_t capacity_ = kDefaultCapacity;
  size_t occupied_ = 0;
  double fraction_ = 1;
  DeviceStats stats_;
  AddressSpace addresses_;
  std::array<std::set<Block*, BestFit>, 2> free_;  // large and small
  std::unordered_map<char*, std::unique_ptr<Block>> blocks_;  // that are allocated
  std::vector<Block*> pending_;  // given back, and in use on other streams
};

DeviceMemory& memory_of(int device) {
  static std::array<DeviceMemory, kDevices>* memories =  // outlives what is freed at the very end
      new std::array<DeviceMemory, kDevices>{DeviceMemory(0), DeviceMemory(1)};
  return memories->at(device);
}

void give_back(void* data) {
  for (int device = 0; data != nullptr && device < kDevices; device++) {
    if (memory_of(device).give_back(static_cast<char*>(data))) {
      return;
    }
  }
}

class DeviceAllocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const int index = current_device();
    const c10::Device device(c10::DeviceType::PrivateUse1, static_cast<c10::DeviceIndex>(index));
    void* data = bytes == 0 ? nullptr : memory_of(index).allocate(bytes, current_stream(index));
    return {data, data, &give_back, device};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    enqueue(current_device(), current_stream(current_device()), [=] {
      std::memcpy(to, from, bytes);
    });
  }

  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    for (int device = 0; device < kDevices; device++) {
      memory_of(device).empty_cache();
    }
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    if (data.get() != nullptr) {
      memory_of(data.device().index())
          .record_stream(static_cast<char*>(data.get_context()), stream.id());
    }
  }

  DeviceStats getDeviceStats(c10::DeviceIndex device) override { return memory_of(device).stats(); }
  void resetAccumulatedStats(c10::DeviceIndex device) override {
    memory_of(device).reset_accumulated();
  }
  void resetPeakStats(c10::DeviceIndex device) override { memory_of(device).reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    return memory_of(device).info();
  }
};

// Host memory that copies may read and write late.
class PinnedMemory {
 public:
  void* allocate(size_t bytes) {
    const std::lock_guard guard(mutex_);
    finish_uses();
    void* data = nullptr;
    TORCH_CHECK(posix_memalign(&data, 64, std::max<size_t>(bytes, 1)) == 0, "no host memory left");
    blocks_[static_cast<char*>(data)] = {bytes, {}};
    return data;
  }

  void give_back(void* data) {
    const std::lock_guard guard(mutex_);
    auto block = blocks_.extract(static_cast<char*>(data));
    if (!block.empty()) {
      pending_.push_back(std::move(block));
      finish_uses();
    }
  }

  bool holds(const void* data) {
    const std::lock_guard guard(mutex_);
    return find(data) != blocks_.end();
  }

  void use(const void* data, const Place& place) {
    const std::lock_guard guard(mutex_);
    find(data)->second.uses.push_back(place);
  }

 private:
  struct Pinned {
    size_t bytes = 0;
    std::vector<Place> uses;
  };
  using Blocks = std::map<const char*, Pinned>;

  Blocks::iterator find(const void* data) {
    const auto* byte = static_cast<const char*>(data);
    auto next = blocks_.upper_bound(byte);
    if (next == blocks_.begin()) {
      return blocks_.end();
    }
    --next;
    return byte < next->first + std::max<size_t>(next->second.bytes, 1) ? next : blocks_.end();
  }

  void finish_uses() {
    std::erase_if(pending_, [](Blocks::node_type& block) {
      std::erase_if(block.mapped().uses, is_reached);
      if (!block.mapped().uses.empty()) {
        return false;
      }
      std::free(const_cast<char*>(block.key()));
      return true;
    });
  }

  std::mutex mutex_;
  Blocks blocks_;
  std::vector<Blocks::node_type> pending_;  // given back, with copies still to come
};

PinnedMemory& pinned_memory() {
  static auto* memory = new PinnedMemory;
  return *memory;
}

void give_pinned_back(void* data) { pinned_memory().give_back(data); }

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* data = pinned_memory().allocate(bytes);
    return {data, data, &give_pinned_back, c10::Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &give_pinned_back; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

}  // namespace

c10::DeviceAllocator& device_allocator() {
  static DeviceAllocator allocator;
  return allocator;
}

c10::Allocator& pinned_allocator() {
  static PinnedAllocator allocator;
  return allocator;
}

bool is_pinned(const void* data) { return pinned_memory().holds(data); }
void use_pinned(const void* data, const Place& place) { pinned_memory().use(data, place); }

void set_capacity(int device, int64_t bytes) { memory_of(device).set_capacity(bytes); }
void set_occupied(int device, int64_t bytes) { memory_of(device).set_occupied(bytes); }
int64_t capacity(int device) { return static_cast<int64_t>(memory_of(device).info().second); }
double memory_fraction(int device) { return memory_of(device).fraction(); }
void set_memory_fraction(int device, double fraction) { memory_of(device).set_fraction(fraction); }

REGISTER_ALLOCATOR(c10::DeviceType::PrivateUse1, &device_allocator());

}  // namespace standin
