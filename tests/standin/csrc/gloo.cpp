// Collectives of the device: gloo's, on its memory. The host waits for each.
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "operators.h"
#include "streams.h"

namespace standin {
namespace {

using Tensors = std::vector<at::Tensor>;
using Pending = c10::intrusive_ptr<c10d::Work>;

class Done final : public c10d::Work {
 public:
  explicit Done(Tensors results)
      : future_(c10::make_intrusive<c10::ivalue::Future>(
            c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(std::move(results)));
  }

  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return future_->value().toTensorVector(); }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

Tensors hosts_of(const Tensors& tensors) {
  Tensors hosts;
  for (const at::Tensor& tensor : tensors) {
    const int device = tensor.device().index();
    drain(device, current_stream(device));
    hosts.push_back(on_host(tensor));
  }
  return hosts;
}

class Gloo final : public c10d::Backend {
 public:
  explicit Gloo(c10::intrusive_ptr<c10d::Backend> gloo)
      : Backend(gloo->getRank(), gloo->getSize()), gloo_(std::move(gloo)) {}

  const std::string getBackendName() const override { return "standin"; }

  Pending broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    Tensors hosts = hosts_of(tensors);
    gloo_->broadcast(hosts, options)->wait();
    return done(tensors);
  }

  Pending allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    Tensors hosts = hosts_of(tensors);
    c10d::AllreduceOptions summed = options;
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;  // gloo has none
    if (is_mean) {
      summed.reduceOp = c10d::ReduceOp::SUM;
    }
    gloo_->allreduce(hosts, summed)->wait();
    if (is_mean) {
      hosts[0].div_(getSize());
    }
    return done(tensors);
  }

  Pending allreduce_coalesced(
      Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    Tensors hosts = hosts_of(tensors);
    gloo_->allreduce_coalesced(hosts, options)->wait();
    return done(tensors);
  }

  Pending allgather(
      std::vector<Tensors>& outputs, Tensors& inputs,
      const c10d::AllgatherOptions& options) override {
    Tensors from = hosts_of(inputs);
    std::vector<Tensors> to;
    for (const Tensors& each : outputs) {
      to.push_back(hosts_of(each));
    }
    gloo_->allgather(to, from, options)->wait();
    return done(outputs.front());
  }

  Pending _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    at::Tensor from = hosts_of({input}).front();
    at::Tensor to = hosts_of({output}).front();
    gloo_->_allgather_base(to, from, options)->wait();
    return done({output});
  }

  Pending _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& options) override {
    at::Tensor from = hosts_of({input}).front();
    at::Tensor to = hosts_of({output}).front();
    c10d::ReduceScatterOptions summed = options;
    const bool is_mean = options.reduceOp == c10d::ReduceOp::AVG;
    if (is_mean) {
      summed.reduceOp = c10d::ReduceOp::SUM;
    }
    gloo_->_reduce_scatter_base(to, from, summed)->wait();
    if (is_mean) {
      to.div_(getSize());
    }
    return done({output});
  }

  Pending barrier(const c10d::BarrierOptions&) override {
    gloo_->barrier()->wait();
    return done({});
  }

 private:
  static Pending done(Tensors results) { return c10::make_intrusive<Done>(std::move(results)); }

  c10::intrusive_ptr<c10d::Backend> gloo_;
};

// From now on the group talks for tensors of the device too.
void attach(const std::string& group) {
  const auto joined = c10d::resolve_process_group(group);
  const auto backend = c10::make_intrusive<Gloo>(joined->getBackend(c10::DeviceType::CPU));
  backend->setGroupUid(group);
  joined->setBackend(
      c10::DeviceType::PrivateUse1, c10d::ProcessGroup::BackendType::CUSTOM, backend);
}

TORCH_LIBRARY_FRAGMENT(standin, m) {
  m.def("attach(str group) -> ()", [](const std::string& group) { attach(group); });
}

}  // namespace
}  // namespace standin
