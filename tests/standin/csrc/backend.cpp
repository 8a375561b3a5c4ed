// The device as torch asks for it: guards for devices, streams and events, hooks and generators.
#include "backend.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/DeviceCapability.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <memory>
#include <optional>

#include "memory.h"
#include "streams.h"

namespace standin {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;

c10::Device device_at(int index) { return {kType, static_cast<c10::DeviceIndex>(index)}; }

c10::Stream stream_at(int device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, device_at(device), id);
}

int index_of(c10::Device device) { return device.has_index() ? device.index() : current_device(); }

struct Event {
  std::optional<Place> place;
  bool tells_time = false;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }

  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return device_at(current_device()); }
  void setDevice(c10::Device device) const override { set_current_device(index_of(device)); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { setDevice(device); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    const int index = index_of(device);
    return stream_at(index, current_stream(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return stream_at(index_of(device), 0);
  }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const int index = index_of(device);
    return stream_at(index, next_pool_stream(index));
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
    return getNewStream(device, 0);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const c10::Stream before = getStream(stream.device());
    set_current_stream(stream.device_index(), stream.id());
    return before;
  }
  bool queryStream(const c10::Stream& stream) const override {
    return ask(end_of(stream.device_index(), stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    reach(end_of(stream.device_index(), stream.id()));
  }
  void synchronizeDevice(const c10::DeviceIndex device) const override { reach_all(device); }

  void record(
      void** event, const c10::Stream& stream, const c10::DeviceIndex device,
      const c10::EventFlag flag) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(), "an event of device ", device,
        " cannot be recorded on a stream of device ", stream.device_index());
    if (*event == nullptr) {
      *event = new Event{{}, flag == c10::EventFlag::BACKEND_DEFAULT};
    }
    auto* recorded = static_cast<Event*>(*event);
    recorded->place = end_of(stream.device_index(), stream.id());
    if (recorded->tells_time) {
      recorded->place = note_time(stream.device_index(), stream.id());
    }
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (const auto place = place_of(event)) {
      wait_on_stream(stream.device_index(), stream.id(), *place);
    }
  }
  bool queryEvent(void* event) const override {
    const auto place = place_of(event);
    return !place || ask(*place);
  }
  void synchronizeEvent(void* event) const override {
    if (const auto place = place_of(event)) {
      reach(*place);
    }
  }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex) const override {
    const auto from = place_of(begin);
    const auto to = place_of(end);
    TORCH_CHECK(from && to, "both events must be recorded before the time between them is asked");
    return (reached_at(*to) - reached_at(*from)) / 1000;
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<Event*>(event);
  }

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    device_allocator().recordStream(data, stream);
  }

 private:
  static std::optional<Place> place_of(void* event) {
    return event == nullptr ? std::nullopt : static_cast<Event*>(event)->place;
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// The numbers of a CPU's generator, from a seed and a state of the device's own.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(int device)
      : GeneratorImpl(device_at(device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        numbers_(at::detail::createCPUGenerator()) {}

  at::Generator numbers() const { return numbers_; }

  void set_current_seed(uint64_t seed) override { numbers_.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { numbers_.set_offset(offset); }
  uint64_t get_offset() const override { return numbers_.get_offset(); }
  uint64_t current_seed() const override { return numbers_.current_seed(); }
  uint64_t seed() override { return numbers_.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    numbers_.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return numbers_.unsafeGetGeneratorImpl()->get_state();
  }

 private:
  Generator* clone_impl() const override {
    auto* copy = new Generator(device_.index());
    copy->numbers_ = numbers_.clone();
    return copy;
  }

  at::Generator numbers_;
};

}  // namespace

const at::Generator& default_generator(int device) {
  static auto* generators = new std::vector<at::Generator>{
      at::make_generator<Generator>(0), at::make_generator<Generator>(1)};
  return generators->at(device);
}

namespace {

class HostAllocator final : public at::HostAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override { return pinned_allocator().allocate(bytes); }
  c10::DeleterFnPtr raw_deleter() const override { return pinned_allocator().raw_deleter(); }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }
  bool record_event(void* data, void*, c10::Stream stream) override {
    use_pinned(data, end_of(stream.device_index(), stream.id()));
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};

HostAllocator& host_allocator() {
  static HostAllocator allocator;
  return allocator;
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex device) const override { set_current_device(device); }
  c10::DeviceIndex getCurrentDevice() const override {
    return static_cast<c10::DeviceIndex>(current_device());
  }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override {
    const auto before = getCurrentDevice();
    set_current_device(device);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override {
    return device < 0 ? getCurrentDevice() : exchangeDevice(device);
  }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex device) const override {
    return default_generator(device < 0 ? current_device() : device);
  }
  at::Generator getNewGenerator(c10::DeviceIndex device) const override {
    return at::make_generator<Generator>(device < 0 ? current_device() : device);
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    const c10::DeviceGuard guard(storage.device());
    c10::DataPtr larger = device_allocator().allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      device_allocator().copy_data(larger.get(), storage.data(), kept);
    }
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(larger));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

const bool is_registered = [] {
  at::setHostAllocator(kType, &host_allocator(), 0);
  at::RegisterPrivateUse1HooksInterface(new Hooks);
  return true;
}();

}  // namespace

at::Generator numbers_of(const std::optional<at::Generator>& generator, int device) {
  const at::Generator& drawn = generator ? *generator : default_generator(device);
  return static_cast<Generator*>(drawn.unsafeGetGeneratorImpl())->numbers();
}

}  // namespace standin
