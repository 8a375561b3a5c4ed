// torch's CPU allocator with a budget: memory runs out inside torch, before the operation, in
// whatever thread asks, as on a device.
//
// Everything is called through ctypes, so that only c10's headers are needed and compiling takes
// a second.
#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

constexpr int64_t kUnlimited = -1;
// As wide as the alignment that torch's kernels expect, so that tensors stay aligned behind it.
constexpr size_t kHeaderBytes = 64;

std::atomic<int64_t> used_bytes{0};
std::atomic<int64_t> peak_bytes{0};
std::atomic<int64_t> limit_bytes{kUnlimited};
std::atomic<int64_t> num_allocations{0};
std::atomic<int64_t> num_refusals{0};
std::atomic<int64_t> allocations_until_fault{0};  // 0: no fault is due

void release(void* data) {
  if (data == nullptr) {
    return;
  }
  char* block = static_cast<char*>(data) - kHeaderBytes;
  used_bytes -= *reinterpret_cast<int64_t*>(block);
  std::free(block);
}

[[noreturn]] void refuse(int64_t wanted_bytes, int64_t in_use_bytes) {
  num_refusals++;
  TORCH_CHECK_WITH(
      OutOfMemoryError, false, "CAPPED out of memory. Tried to allocate ", wanted_bytes,
      " bytes. The budget has a capacity of ", limit_bytes.load(), " bytes, of which ",
      in_use_bytes, " bytes are in use.");
}

bool fault_is_due() {
  int64_t left = allocations_until_fault.load();
  while (left > 0 && !allocations_until_fault.compare_exchange_weak(left, left - 1)) {
  }
  return left == 1;
}

class CappedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t wanted) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (wanted == 0) {
      return {nullptr, nullptr, &release, cpu};
    }
    const auto bytes = static_cast<int64_t>(wanted);
    num_allocations++;
    if (fault_is_due()) {
      refuse(bytes, used_bytes.load());
    }
    const int64_t before = used_bytes.fetch_add(bytes);
    const int64_t limit = limit_bytes.load();
    if (limit != kUnlimited && before + bytes > limit) {
      used_bytes -= bytes;
      refuse(bytes, before);
    }
    void* block = nullptr;
    if (posix_memalign(&block, kHeaderBytes, wanted + kHeaderBytes) != 0) {
      used_bytes -= bytes;
      refuse(bytes, before);
    }
    *static_cast<int64_t*>(block) = bytes;
    int64_t peak = peak_bytes.load();
    while (before + bytes > peak && !peak_bytes.compare_exchange_weak(peak, before + bytes)) {
    }
    void* data = static_cast<char*>(block) + kHeaderBytes;
    return {data, data, &release, cpu};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &release; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
};

CappedAllocator allocator;

}  // namespace

extern "C" {
void capped_install() { c10::SetCPUAllocator(&allocator, /*priority=*/255); }
void capped_set_limit(int64_t bytes) { limit_bytes = bytes; }
void capped_fail_at(int64_t allocation) { allocations_until_fault = allocation; }
void capped_reset_peak() { peak_bytes = used_bytes.load(); }
int64_t capped_used_bytes() { return used_bytes.load(); }
int64_t capped_peak_bytes() { return peak_bytes.load(); }
int64_t capped_allocations() { return num_allocations.load(); }
int64_t capped_refusals() { return num_refusals.load(); }
int64_t capped_until_fault() { return allocations_until_fault.load(); }
}
