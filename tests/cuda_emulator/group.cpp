// Stands for NCCL among processes that pretend a CUDA device: collectives of device tensors, carried out by gloo on the
// same memory, at once and in the order of issue. In the log they are operators of the current stream.

#include <pybind11/chrono.h>

#include <functional>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

namespace {

using c10d::Backend;
using c10d::ReduceOp;
using c10d::Work;
using Tensors = std::vector<at::Tensor>;

// What the operator below does: it is called with the tensors' CPU sides.
thread_local std::function<void(Tensors&, Tensors&)> call;

void collective_on_cpu(at::TensorList reads, at::TensorList writes) {
  auto from = reads.vec(), to = writes.vec();
  call(from, to);
}

void collective(Tensors reads, Tensors writes, std::function<void(Tensors&, Tensors&)> what) {
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("pretended::collective", "")
                       .typed<void(at::TensorList, at::TensorList)>();
  for (auto* tensors : {&reads, &writes}) {
    for (auto& tensor : *tensors) {
      TORCH_CHECK(tensor.is_cuda() && tensor.is_contiguous(), "Tensors must be CUDA, dense and contiguous");
    }
  }
  at::AutoDispatchBelowADInplaceOrView guard;
  call = std::move(what);
  op.call(reads, writes);
  call = nullptr;
}

struct Done final : Work {
  explicit Done(Tensors results) : results_(std::move(results)) {}
  bool isCompleted() override { return true; }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  void synchronize() override {}
  Tensors result() override { return results_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override {
    auto future = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()),
                                                           std::vector<c10::Device>{{c10::kCUDA, 0}});
    future->markCompleted(at::IValue(results_));
    return future;
  }
  Tensors results_;
};

c10::intrusive_ptr<Work> done(Tensors results) { return c10::make_intrusive<Done>(std::move(results)); }

// DistributedDataParallel takes times of its backward.
struct Timer final : c10d::Timer {
  explicit Timer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    auto from = getTimestamp(start), to = getTimestamp(end);
    return from && to ? std::optional<int64_t>(*to - *from) : std::nullopt;
  }
};

// gloo knows no mean.
ReduceOp summed(const ReduceOp& op) { return op == ReduceOp::AVG ? ReduceOp(ReduceOp::SUM) : op; }

struct ProcessGroupNCCL final : Backend {
  struct Options final : Backend::Options {
    Options() : Backend::Options("nccl") {}
    bool is_high_priority_stream = false;
  };

  ProcessGroupNCCL(c10::intrusive_ptr<Backend> host, c10::intrusive_ptr<Options> options)
      : Backend(host->getRank(), host->getSize()), host_(std::move(host)), options_(std::move(options)) {}

  const std::string getBackendName() const override { return "nccl"; }
  c10::intrusive_ptr<Backend::Options> getBackendOptions() override { return options_; }
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return 0; }

  c10::intrusive_ptr<Work> broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    collective({}, tensors, [&](Tensors&, Tensors& to) { host_->broadcast(to, options)->wait(); });
    return done(tensors);
  }

  c10::intrusive_ptr<Work> allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    collective(tensors, tensors, [&](Tensors&, Tensors& to) {
      auto host = options;
      host.reduceOp = summed(options.reduceOp);
      host_->allreduce(to, host)->wait();
      divide(to, options.reduceOp);
    });
    return done(tensors);
  }

  c10::intrusive_ptr<Work> allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                     const c10d::AllgatherOptions& options) override {
    collective(inputs, outputs.at(0), [&](Tensors& from, Tensors& to) {
      std::vector<Tensors> lists{to};
      host_->allgather(lists, from, options)->wait();
    });
    return done(outputs[0]);
  }

  c10::intrusive_ptr<Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                           const c10d::AllgatherOptions& options) override {
    collective({input}, {output},
               [&](Tensors& from, Tensors& to) { host_->_allgather_base(to[0], from[0], options)->wait(); });
    return done({output});
  }

  c10::intrusive_ptr<Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                const c10d::ReduceScatterOptions& options) override {
    collective({input}, {output}, [&](Tensors& from, Tensors& to) {
      auto host = options;
      host.reduceOp = summed(options.reduceOp);
      host_->_reduce_scatter_base(to[0], from[0], host)->wait();
      divide(to, options.reduceOp);
    });
    return done({output});
  }

  c10::intrusive_ptr<Work> barrier(const c10d::BarrierOptions&) override {
    auto host = c10d::BarrierOptions();
    host_->barrier(host)->wait();
    return done({});
  }

 private:
  void divide(Tensors& tensors, const ReduceOp& op) const {
    if (op != ReduceOp::AVG) return;
    for (auto& tensor : tensors) tensor.div_(getSize());
  }

  c10::intrusive_ptr<Backend> host_;
  c10::intrusive_ptr<Options> options_;
};

c10::intrusive_ptr<ProcessGroupNCCL> joined(const pybind11::object& store, int rank, int size,
                                            c10::intrusive_ptr<ProcessGroupNCCL::Options> options) {
  auto gloo = pybind11::module_::import("torch.distributed").attr("ProcessGroupGloo");
  auto host = gloo(store, rank, size, pybind11::arg("timeout") = options->timeout);
  return c10::make_intrusive<ProcessGroupNCCL>(host.cast<c10::intrusive_ptr<Backend>>(), std::move(options));
}

}  // namespace

namespace c10d {
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, ::Timer)
}

TORCH_LIBRARY(pretended, m) { m.def("collective(Tensor[] reads, Tensor(a!)[] writes) -> ()"); }

TORCH_LIBRARY_IMPL(pretended, CPU, m) { m.impl("collective", &collective_on_cpu); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  pybind11::module_::import("torch.distributed");
  pybind11::class_<ProcessGroupNCCL, c10::intrusive_ptr<ProcessGroupNCCL>, Backend> group(m, "ProcessGroupNCCL");
  pybind11::class_<ProcessGroupNCCL::Options, c10::intrusive_ptr<ProcessGroupNCCL::Options>, Backend::Options>(group,
                                                                                                              "Options")
      .def(pybind11::init([](bool high) {
             auto options = c10::make_intrusive<ProcessGroupNCCL::Options>();
             options->is_high_priority_stream = high;
             return options;
           }),
           pybind11::arg("is_high_priority_stream") = false)
      .def_readwrite("is_high_priority_stream", &ProcessGroupNCCL::Options::is_high_priority_stream);
  group.def(pybind11::init(&joined));
}
