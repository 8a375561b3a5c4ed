// Operators: those of the CPU, on the device's memory.
//
// An operator that writes into tensors that exist (`out=`, which is how most are called in the end;
// fills and copies) is put on the current stream and runs when the stream gets there, on plain
// addresses: nothing keeps its memory alive or in order but streams, events and the allocator.
// All others run on the host's thread, once the stream is drained.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "backend.h"
#include "memory.h"
#include "operators.h"
#include "streams.h"

namespace standin {
namespace {

using torch::jit::Stack;

constexpr auto kDevice = c10::DispatchKey::PrivateUse1;
constexpr auto kHost = c10::DispatchKey::CPU;

enum class OnWait : int64_t { kSilent, kWarn, kRaise };
std::atomic<OnWait> on_wait{OnWait::kSilent};

// The host waits for the device: a stall that `set_sync_debug_mode` can report.
void wait_for(int device, const char* what) {
  const OnWait mode = on_wait.load();
  TORCH_CHECK(mode != OnWait::kRaise, "called a synchronizing operation: ", what);
  if (mode == OnWait::kWarn) {
    TORCH_WARN("called a synchronizing operation: ", what);
  }
  reach(end_of(device, current_stream(device)));
}

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.is_privateuseone(); }

// No dispatch mode, no gradient and no cast sees what a kernel does inside.
class InsideKernel {
 public:
  InsideKernel()
      : keys_(
            c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
            c10::autograd_dispatch_keyset | c10::autocast_dispatch_keyset |
                c10::python_ks | c10::DispatchKeySet(c10::DispatchKey::ADInplaceOrView)) {}

 private:
  c10::impl::ForceDispatchKeyGuard keys_;
  at::NoGradGuard no_grad_;
};

// Tensors of the CPU on the device's memory. Two on one storage share one here too.
class Aliases {
 public:
  at::Tensor of(const at::Tensor& tensor) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    auto alias = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(storage_of(tensor)), c10::DispatchKeySet(kHost), tensor.dtype());
    alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
    alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
    alias._set_conj(tensor.is_conj());
    alias._set_neg(tensor.is_neg());
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) {
      alias.unsafeGetTensorImpl()->set_wrapped_number(true);
    }
    return alias;
  }

  // The tensor on whose storage another one lies, if any.
  std::optional<at::Tensor> owner_of(const at::Tensor& alias) const {
    for (const auto& [impl, known] : storages_) {
      if (known.alias.unsafeGetStorageImpl() == alias.storage().unsafeGetStorageImpl()) {
        return known.tensor;
      }
    }
    return std::nullopt;
  }

 private:
  struct Known {
    c10::Storage alias;
    at::Tensor tensor;
  };

  c10::Storage storage_of(const at::Tensor& tensor) {
    c10::StorageImpl* impl = tensor.storage().unsafeGetStorageImpl();
    auto found = storages_.find(impl);
    if (found == storages_.end()) {
      c10::Storage alias(
          c10::Storage::use_byte_size_t(), impl->nbytes(),
          c10::DataPtr(impl->mutable_data(), c10::Device(c10::DeviceType::CPU)), nullptr, false);
      found = storages_.emplace(impl, Known{std::move(alias), tensor}).first;
    }
    return found->second.alias;
  }

  std::unordered_map<c10::StorageImpl*, Known> storages_;
};

at::Tensor view_of(const at::Tensor& owner, const at::Tensor& alias) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(owner.storage()), owner.key_set(), alias.dtype());
  view.unsafeGetTensorImpl()->set_storage_offset(alias.storage_offset());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(alias.sizes(), alias.strides());
  view._set_conj(alias.is_conj());
  view._set_neg(alias.is_neg());
  return view;
}

at::Tensor empty_like_on(const at::Tensor& host, c10::Device device) {
  const c10::DeviceGuard guard(device);
  return at::Tensor(at::detail::empty_strided_generic(
      host.sizes(), host.strides(), &device_allocator(), c10::DispatchKeySet(kDevice),
      host.scalar_type()));
}

// One call of an operator that the device has no kernel of its own for.
class Call {
 public:
  Call(const c10::OperatorHandle& op, Stack* stack)
      : op_(op), stack_(stack), first_(stack->size() - op.schema().arguments().size()) {
    const auto& arguments = op.schema().arguments();
    for (size_t index = 0; index < arguments.size(); index++) {
      const auto* alias = arguments[index].alias_info();
      convert(index, alias != nullptr && alias->isWrite());
    }
    if (!device_) {
      device_ = c10::Device(c10::DeviceType::PrivateUse1, current_device());
    }
  }

  void run() {
    if (has_view()) {
      run_on_host();
    } else if (is_late()) {
      put_on_stream();
      return;
    } else if (op_.hasTag(at::Tag::dynamic_output_shape) ||
               op_.hasTag(at::Tag::data_dependent_output)) {
      wait_for(device(), op_.schema().name().c_str());
      run_on_host();
    } else {
      drain(device(), current_stream(device()));
      run_on_host();
    }
    for (const auto& [original, host] : grown_) {
      if (original.sizes() != host.sizes()) {
        original.resize_(host.sizes());
      }
      aliases_.of(original).copy_(host);
    }
    give_results();
  }

 private:
  int device() const { return device_->index(); }

  c10::IValue& argument(size_t index) { return (*stack_)[first_ + index]; }

  at::Tensor host_of(const at::Tensor& tensor, bool is_written) {
    if (!is_ours(tensor)) {
      return tensor;
    }
    if (!has_tensor_) {
      device_ = tensor.device();
      has_tensor_ = true;
    }
    at::Tensor host;
    if (is_written && tensor.numel() == 0) {
      // It may grow.
      host = at::detail::empty_strided_generic(
          tensor.sizes(), tensor.strides(), c10::GetAllocator(c10::DeviceType::CPU),
          c10::DispatchKeySet(kHost), tensor.scalar_type());
      grown_.emplace_back(tensor, host);
    } else {
      host = aliases_.of(tensor);
    }
    originals_.emplace(host.unsafeGetTensorImpl(), tensor);
    return host;
  }

  void convert(size_t index, bool is_written) {
    c10::IValue& value = argument(index);
    if (value.isTensor()) {
      value = host_of(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> hosts;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        hosts.push_back(host_of(tensor, is_written));
      }
      value = std::move(hosts);
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> hosts;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        hosts.push_back(tensor ? std::optional(host_of(*tensor, is_written)) : std::nullopt);
      }
      value = std::move(hosts);
    } else if (value.isDevice()) {
      if (!has_tensor_) {
        device_ = value.toDevice();
      }
      value = c10::Device(c10::DeviceType::CPU);
    } else if (value.isGenerator()) {
      generator_ = value.toGenerator();
      value = c10::IValue();
    }
  }

  bool has_view() const {
    for (const auto& result : op_.schema().returns()) {
      if (result.alias_info() != nullptr && !result.alias_info()->isWrite()) {
        return true;
      }
    }
    return false;
  }

  // Whether the stream may run it later: all it gives are tensors that were there before.
  bool is_late() const {
    const auto& schema = op_.schema();
    bool writes = schema.name() == "aten::fill_" || schema.name() == "aten::zero_";
    for (const auto& each : schema.arguments()) {
      writes = writes || each.is_out();
    }
    return writes && grown_.empty() && !op_.hasTag(at::Tag::nondeterministic_seeded);
  }

  void put_on_stream() {
    auto arguments = std::make_shared<Stack>();
    for (size_t index = 0; index < op_.schema().arguments().size(); index++) {
      c10::IValue value = argument(index);
      // What lies on the host is read now.
      if (value.isTensor() && value.toTensor().defined() &&
          originals_.count(value.toTensor().unsafeGetTensorImpl()) == 0 &&
          !value.toTensor().unsafeGetTensorImpl()->is_wrapped_number()) {
        const InsideKernel inside;
        value = value.toTensor().clone();
      }
      arguments->push_back(std::move(value));
    }
    std::vector<c10::IValue> results;
    for (const auto& result : op_.schema().returns()) {
      for (size_t index = 0; index < op_.schema().arguments().size(); index++) {
        const auto* alias = op_.schema().arguments()[index].alias_info();
        if (alias != nullptr && *alias == *result.alias_info()) {
          results.push_back(original_of(argument(index).toTensor()));
        }
      }
    }
    enqueue(device(), current_stream(device()), [op = op_, arguments] {
      const InsideKernel inside;
      op.redispatchBoxed(c10::DispatchKeySet(kHost), arguments.get());
    });
    stack_->resize(first_);
    stack_->insert(stack_->end(), results.begin(), results.end());
  }

  void run_on_host() {
    const InsideKernel inside;
    if (!op_.hasTag(at::Tag::nondeterministic_seeded)) {
      op_.redispatchBoxed(c10::DispatchKeySet(kHost), stack_);
      return;
    }
    // Some kernels draw from the host's generator whatever they are given: it lends its place.
    at::Generator host = at::detail::getDefaultCPUGenerator();
    at::Generator ours = numbers_of(generator_, device());
    const auto before = host.get_state();
    host.set_state(ours.get_state());
    try {
      op_.redispatchBoxed(c10::DispatchKeySet(kHost), stack_);
    } catch (...) {
      host.set_state(before);
      throw;
    }
    ours.set_state(host.get_state());
    host.set_state(before);
  }

  at::Tensor original_of(const at::Tensor& host) const {
    const auto found = originals_.find(host.unsafeGetTensorImpl());
    return found == originals_.end() ? host : found->second;
  }

  at::Tensor result_of(const at::Tensor& host) {
    if (!host.defined() || !host.device().is_cpu()) {
      return host;
    }
    const auto found = originals_.find(host.unsafeGetTensorImpl());
    if (found != originals_.end()) {
      return found->second;
    }
    if (host.has_storage()) {
      if (const auto owner = aliases_.owner_of(host)) {
        return view_of(*owner, host);
      }
    }
    at::Tensor result = empty_like_on(host, *device_);
    const InsideKernel inside;
    on_host(result).copy_(host);
    return result;
  }

  void give_results() {
    for (size_t at = first_; at < stack_->size(); at++) {
      c10::IValue& value = (*stack_)[at];
      if (value.isTensor()) {
        value = result_of(value.toTensor());
      } else if (value.isTensorList()) {
        c10::List<at::Tensor> results;
        for (const at::Tensor& host : value.toTensorVector()) {
          results.push_back(result_of(host));
        }
        value = std::move(results);
      }
    }
  }

  const c10::OperatorHandle& op_;
  Stack* stack_;
  const size_t first_;
  std::optional<c10::Device> device_;
  bool has_tensor_ = false;
  std::optional<at::Generator> generator_;
  Aliases aliases_;
  std::unordered_map<c10::TensorImpl*, at::Tensor> originals_;
  std::vector<std::pair<at::Tensor, at::Tensor>> grown_;
};

void fall_back(const c10::OperatorHandle& op, Stack* stack) { Call(op, stack).run(); }

at::Tensor empty(
    c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
    std::optional<at::Device> device, std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "only tensors of the CPU can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::Tensor(at::detail::empty_generic(
      size, &device_allocator(), c10::DispatchKeySet(kDevice), c10::dtype_or_default(dtype), format));
}

at::Tensor empty_strided(
    c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
    std::optional<at::Layout> layout, std::optional<at::Device> device, std::optional<bool> pin) {
  TORCH_CHECK(c10::layout_or_default(layout) == at::kStrided, "only strided tensors");
  TORCH_CHECK(!c10::pinned_memory_or_default(pin), "only tensors of the CPU can be pinned");
  const c10::DeviceGuard guard(c10::device_or_default(device));
  return at::Tensor(at::detail::empty_strided_generic(
      size, stride, &device_allocator(), c10::DispatchKeySet(kDevice), c10::dtype_or_default(dtype)));
}

at::Tensor as_strided(
    const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride,
    std::optional<int64_t> offset) {
  return at::native::as_strided_tensorimpl(self, size, stride, offset);
}

at::Tensor view(const at::Tensor& self, c10::IntArrayRef size) {
  return at::native::view(self, size);
}

at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::_reshape_alias(self, size, stride);
}

void make_room(c10::TensorImpl* tensor, size_t bytes) {
  if (bytes > tensor->storage().nbytes()) {
    at::detail::getPrivateUse1Hooks().resizePrivateUse1Bytes(tensor->storage(), bytes);
  }
}

const at::Tensor& resize(
    const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    make_room(
        tensor, at::detail::computeStorageNbytesContiguous(
                    size, self.dtype().itemsize(), self.storage_offset()));
    tensor->set_sizes_contiguous(size);
  }
  if (format) {
    tensor->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
    c10::IntArrayRef stride) {
  c10::TensorImpl* tensor = self.unsafeGetTensorImpl();
  tensor->set_storage_keep_dtype(std::move(source));
  tensor->set_storage_offset(offset);
  if (stride.data() == nullptr) {
    tensor->set_sizes_contiguous(size);
  } else {
    tensor->set_sizes_and_strides(size, stride);
  }
  make_room(
      tensor, at::detail::computeStorageNbytes(
                  tensor->sizes(), tensor->strides(), self.dtype().itemsize(), offset));
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage source) {
  const auto items = static_cast<int64_t>(source.nbytes() / self.dtype().itemsize());
  return set_storage(self, std::move(source), 0, {items}, {});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(
      self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Scalar local_scalar(const at::Tensor& self) {
  wait_for(self.device().index(), "reading a value");
  const InsideKernel inside;
  return at::_local_scalar_dense(on_host(self));
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  device_allocator().recordStream(self.storage().data_ptr(), stream);
}

// Bytes in a row, which a copy engine can move by itself.
bool is_plain(const at::Tensor& from, const at::Tensor& to) {
  return from.scalar_type() == to.scalar_type() && from.sizes() == to.sizes() &&
      from.strides() == to.strides() && from.is_non_overlapping_and_dense() &&
      from.is_conj() == to.is_conj() && from.is_neg() == to.is_neg();
}

void copy_to_device(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = to.device().index();
  const int64_t stream = current_stream(device);
  const at::Tensor target = on_host(to);
  if (!non_blocking) {
    wait_for(device, "a copy from the host");
    target.copy_(from);
    return;
  }
  if (is_pinned(from.storage().data()) && is_plain(from, to)) {
    const void* source = from.const_data_ptr();
    void* data = target.mutable_data_ptr();
    const size_t bytes = from.nbytes();
    const Place place = enqueue(device, stream, [=] { std::memcpy(data, source, bytes); });
    use_pinned(from.storage().data(), place);
    return;
  }
  // A driver takes what is not pinned into memory of its own first.
  const at::Tensor taken = from.clone();
  enqueue(device, stream, [target, taken] {
    const InsideKernel inside;
    target.copy_(taken);
  });
}

void copy_to_host(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const int device = from.device().index();
  const at::Tensor source = on_host(from);
  if (non_blocking && is_pinned(to.storage().data()) && is_plain(from, to)) {
    const void* data = source.const_data_ptr();
    void* target = to.mutable_data_ptr();
    const size_t bytes = from.nbytes();
    const Place place = enqueue(
        device, current_stream(device), [=] { std::memcpy(target, data, bytes); });
    use_pinned(to.storage().data(), place);
    return;
  }
  if (non_blocking) {
    reach(end_of(device, current_stream(device)));
  } else {
    wait_for(device, "a copy to the host");
  }
  to.copy_(source);
}

void copy_on_device(const at::Tensor& from, const at::Tensor& to) {
  Aliases aliases;
  const at::Tensor source = aliases.of(from);
  const at::Tensor target = aliases.of(to);
  const int device = from.device().index();
  const int other = to.device().index();
  if (other != device) {  // in the order of both
    wait_on_stream(device, current_stream(device), end_of(other, current_stream(other)));
  }
  const Place place = enqueue(device, current_stream(device), [source, target] {
    const InsideKernel inside;
    target.copy_(source);
  });
  if (other != device) {
    wait_on_stream(other, current_stream(other), place);
  }
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  if (to.numel() == 0) {
    return to;
  }
  const InsideKernel inside;
  const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
  if (is_ours(from) && is_ours(to)) {
    copy_on_device(from, to);
  } else if (is_ours(to)) {
    copy_to_device(from, to, non_blocking);
  } else {
    copy_to_host(from, to, non_blocking);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  to.resize_(self.sizes());
  return copy_from(self, to, false);
}

// Convolutions ask a device of this kind for its own.
at::Tensor convolution(
    const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups) {
  const int device = input.device().index();
  drain(device, current_stream(device));
  at::Tensor host;
  {
    const InsideKernel inside;
    Aliases aliases;
    host = at::convolution(
        aliases.of(input), aliases.of(weight),
        bias && bias->defined() ? std::optional(aliases.of(*bias)) : std::nullopt, stride, padding,
        dilation, transposed, output_padding, groups);
  }
  const at::Tensor result = empty_like_on(host, input.device());
  const InsideKernel inside;
  on_host(result).copy_(host);
  return result;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(
    const at::Tensor& gradient, const at::Tensor& input, const at::Tensor& weight,
    c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed,
    c10::IntArrayRef output_padding, int64_t groups, std::array<bool, 3> wanted) {
  const int device = input.device().index();
  drain(device, current_stream(device));
  const int64_t channels = gradient.size(1);
  std::tuple<at::Tensor, at::Tensor, at::Tensor> hosts;
  {
    const InsideKernel inside;
    Aliases aliases;
    hosts = at::convolution_backward(
        aliases.of(gradient), aliases.of(input), aliases.of(weight), c10::IntArrayRef{channels},
        stride, padding, dilation, transposed, output_padding, groups, wanted);
  }
  const auto on_device = [&](const at::Tensor& host) {
    if (!host.defined()) {
      return host;
    }
    at::Tensor result = empty_like_on(host, input.device());
    const InsideKernel inside;
    on_host(result).copy_(host);
    return result;
  };
  return {
      on_device(std::get<0>(hosts)), on_device(std::get<1>(hosts)), on_device(std::get<2>(hosts))};
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fall_back>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &as_strided);
  m.impl("view", &view);
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("resize_", &resize);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Storage", &set_whole_storage);
  m.impl("set_.source_Tensor", &set_tensor);
  m.impl("_local_scalar_dense", &local_scalar);
  m.impl("record_stream", &record_stream);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
  // The CPU has kernels of its own for these, but for other devices torch would compose them; and
  // the two losses need more room for a while than their `out=` has.
  for (const char* name :
       {"_stack", "_stack.out", "addr", "addr.out", "all.dims", "all.dims_out", "any.dims",
        "any.dims_out", "linalg__powsum", "mish_backward", "native_channel_shuffle",
        "native_group_norm", "native_layer_norm", "silu_backward", "mse_loss",
        "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fall_back>());
  }
}

// What the tests set and read.
TORCH_LIBRARY(standin, m) {
  m.def("set_late(bool default_streams, bool other_streams) -> ()", &set_late);
  m.def("num_waits() -> int", &num_waits);
  m.def("num_items() -> int", &num_items);
  m.def("default_generator(int device) -> Generator?", [](int64_t device) {
    return std::optional<at::Generator>(default_generator(static_cast<int>(device)));
  });
  m.def("set_capacity(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    set_capacity(static_cast<int>(device), bytes);
  });
  m.def("set_occupied(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
    set_occupied(static_cast<int>(device), bytes);
  });
  m.def("capacity(int device) -> int", [](int64_t device) {
    return capacity(static_cast<int>(device));
  });
  m.def("memory_fraction(int device) -> float", [](int64_t device) {
    return memory_fraction(static_cast<int>(device));
  });
  m.def("set_memory_fraction(int device, float fraction) -> ()", [](int64_t device, double share) {
    set_memory_fraction(static_cast<int>(device), share);
  });
  m.def("set_sync_debug_mode(int mode) -> ()", [](int64_t mode) {
    on_wait = static_cast<OnWait>(mode);
  });
  m.def("sync_debug_mode() -> int", [] { return static_cast<int64_t>(on_wait.load()); });
}

}  // namespace

at::Tensor on_host(const at::Tensor& tensor) { return Aliases().of(tensor); }

}  // namespace standin
