// A CUDA device made of host memory, for builds of PyTorch that have no CUDA: `torch.device("cuda")` works, tensors on it
// are apart from the CPU's, streams and events exist, and what would run on them asynchronously is written down.
//
// Every operator runs at once, in the order of issue, by the CPU's kernel on the same memory. What would be wrong on a
// device that runs streams side by side is found afterwards, from the log (see races.py).

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>

#include <ATen/Context.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/histc.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>
#include <torch/library.h>

#include "attention_choice.h"
#include "log.h"

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::DeviceType;
using c10::Stream;
using torch::jit::Stack;

constexpr size_t kRound = 512;  // bytes; of the caching allocator

// ---------------------------------------------------------------------------------------------------------- memory

struct Block {
  size_t nbytes;     // as rounded
  size_t requested;  // as asked for
  int64_t stream;    // it was made on
};

struct Memory {
  std::mutex mutex;
  std::unordered_map<void*, Block> live;
  size_t allocated = 0;
  size_t peak = 0;
  size_t requested = 0;
  size_t requested_peak = 0;
  size_t capacity = 0;  // set by install()
  std::map<uintptr_t, size_t> pinned;
};

Memory& memory() {
  static Memory* instance = new Memory();
  return *instance;
}

void free_device(void* pointer) {
  if (!pointer) return;
  Block block;
  {
    std::lock_guard<std::mutex> guard(memory().mutex);
    block = memory().live.at(pointer);
    memory().live.erase(pointer);
    memory().allocated -= block.nbytes;
    memory().requested -= block.requested;
  }
  auto start = reinterpret_cast<uintptr_t>(pointer);
  note("free", block.stream, -1, "", {}, {{start, start + block.nbytes}});
  std::memset(pointer, 0xFF, block.nbytes);  // NaN in every floating dtype
  std::free(pointer);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(DeviceType::CUDA, 0);
    if (nbytes == 0) return {nullptr, nullptr, &free_device, device};
    size_t rounded = (nbytes + kRound - 1) / kRound * kRound;
    void* pointer = nullptr;
    {
      std::lock_guard<std::mutex> guard(memory().mutex);
      if (memory().allocated + rounded <= memory().capacity) pointer = std::aligned_alloc(kRound, rounded);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, pointer, "the pretended device is out of memory: ", rounded, " bytes more, of ",
                     memory().capacity);
    std::memset(pointer, 0xFF, rounded);
    {
      std::lock_guard<std::mutex> guard(memory().mutex);
      memory().live[pointer] = {rounded, nbytes, current_stream};
      memory().allocated += rounded;
      memory().peak = std::max(memory().peak, memory().allocated);
      memory().requested += nbytes;
      memory().requested_peak = std::max(memory().requested_peak, memory().requested);
    }
    auto start = reinterpret_cast<uintptr_t>(pointer);
    note("allocate", current_stream, -1, "", {}, {{start, start + rounded}});
    return {pointer, pointer, &free_device, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

DeviceAllocator device_allocator;

void pin(uintptr_t start, size_t nbytes) {
  {
    std::lock_guard<std::mutex> guard(memory().mutex);
    memory().pinned[start] = nbytes;
  }
  note("pin", current_stream, -1, "", {}, {{start, start + nbytes}});
}

bool unpin(uintptr_t start) {
  size_t nbytes;
  {
    std::lock_guard<std::mutex> guard(memory().mutex);
    auto found = memory().pinned.find(start);
    if (found == memory().pinned.end()) return false;
    nbytes = found->second;
    memory().pinned.erase(found);
  }
  note("unpin", current_stream, -1, "", {}, {{start, start + nbytes}});
  return true;
}

bool is_pinned(const void* pointer) {
  auto at = reinterpret_cast<uintptr_t>(pointer);
  std::lock_guard<std::mutex> guard(memory().mutex);
  auto found = memory().pinned.upper_bound(at);
  if (found == memory().pinned.begin()) return false;
  --found;
  return at < found->first + found->second;
}

void free_pinned(void* pointer) {
  if (!pointer) return;
  unpin(reinterpret_cast<uintptr_t>(pointer));
  std::free(pointer);
}

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t nbytes) override {
    Device device(DeviceType::CPU);
    if (nbytes == 0) return {nullptr, nullptr, &free_pinned, device};
    void* pointer = std::aligned_alloc(kRound, (nbytes + kRound - 1) / kRound * kRound);
    TORCH_CHECK(pointer, "out of host memory");
    pin(reinterpret_cast<uintptr_t>(pointer), nbytes);
    return {pointer, pointer, &free_pinned, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, std::size_t count) const override { std::memcpy(to, from, count); }
};

PinnedAllocator pinned_allocator;

// --------------------------------------------------------------------------------------------- streams and events

std::atomic<int64_t> streams{1};
std::atomic<int64_t> events{1};

struct Event {
  int64_t id;
  double at_ms;
};

double now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1e3 + now.tv_nsec * 1e-6;
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return getDevice(); }
  Device getDevice() const override { return Device(DeviceType::CUDA, 0); }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() <= 0, "the pretended machine has one device");
  }
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream of(int64_t id) const { return Stream(Stream::UNSAFE, getDevice(), id); }
  Stream getStream(Device) const override { return of(current_stream); }
  Stream getDefaultStream(Device) const override { return of(0); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return of(streams++); }
  Stream getNewStream(Device, int) const override { return of(streams++); }
  Stream exchangeStream(Stream stream) const override {
    auto before = of(current_stream);
    current_stream = stream.id();
    return before;
  }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void** event, const Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    if (!*event) *event = new Event();
    auto* recorded = static_cast<Event*>(*event);
    recorded->id = events++;
    recorded->at_ms = now_ms();
    note("record", stream.id(), recorded->id);
  }
  void block(void* event, const Stream& stream) const override {
    if (event) note("block", stream.id(), static_cast<Event*>(event)->id);
  }
  bool queryEvent(void* event) const override {
    if (event) note("synchronize", -1, static_cast<Event*>(event)->id);
    return true;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& stream) const override {
    note("synchronize stream", stream.id());
    return true;
  }
  void synchronizeStream(const Stream& stream) const override { note("synchronize stream", stream.id()); }
  void synchronizeEvent(void* event) const override {
    if (event) note("synchronize", -1, static_cast<Event*>(event)->id);
  }
  void synchronizeDevice(const DeviceIndex) const override { note("synchronize device", -1); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const Stream& stream) const override {
    if (!data.get()) return;
    std::lock_guard<std::mutex> guard(memory().mutex);
    auto found = memory().live.find(data.get());
    if (found == memory().live.end()) return;
    auto start = reinterpret_cast<uintptr_t>(data.get());
    log().add({"record stream", "", this_thread(), stream.id(), -1, {}, {{start, start + found->second.nbytes}}});
  }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return static_cast<Event*>(to)->at_ms - static_cast<Event*>(from)->at_ms;
  }
};

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  bool hasCUDA() const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* pointer) const override { return is_pinned(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  at::Allocator* getCUDADeviceAllocator() const override { return &device_allocator; }
  // Random numbers are the CPU's.
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  Device getDeviceFromPtr(void*) const override { return Device(DeviceType::CUDA, 0); }
  void deviceSynchronize(DeviceIndex) const override { note("synchronize device", -1); }
};

// PyTorch makes its hooks once, while it is imported: too early to register others. Neither class has members, so the
// object that is there becomes one of ours by its table of functions.
void take_over_hooks() {
  static auto* ours = new Hooks();
  auto& theirs = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  std::memcpy(static_cast<void*>(&theirs), static_cast<void*>(ours), sizeof(void*));
}

// ------------------------------------------------------------------------------------------------------- operators

// The same memory as a CPU tensor, which shares its size but not its fate.
at::Tensor on_cpu(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto options = tensor.options().device(at::kCPU).requires_grad(false);
  at::Tensor alias;
  if (tensor.numel() == 0) {
    alias = at::empty_strided(tensor.sizes(), tensor.strides(), options);
  } else {
    alias = at::from_blob(tensor.data_ptr(), tensor.sizes(), tensor.strides(), [](void*) {}, options);
  }
  if (tensor.is_conj()) alias = alias.conj();
  return alias;
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                           dtype.value_or(c10::get_default_dtype_as_scalartype()));
}

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device>, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                   dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

void resize_storage(const at::Storage& storage, size_t nbytes) {
  auto other = device_allocator.allocate(nbytes);
  if (auto kept = std::min(storage.nbytes(), nbytes)) std::memcpy(other.get(), storage.data(), kept);
  storage.set_data_ptr_noswap(std::move(other));
  storage.set_nbytes(nbytes);
}

at::Tensor to_device(const at::Tensor& result) {
  if (!result.defined() || result.is_cuda()) return result;
  auto moved = empty_strided(result.sizes(), result.strides(), result.scalar_type(), {}, {}, {});
  on_cpu(moved).copy_(result);
  // A loss that was reduced in place of its terms, by kernels that CPU and CUDA share, keeps their storage.
  if (result.dim() == 0 && result.storage().nbytes() > moved.storage().nbytes()) {
    resize_storage(moved.storage(), result.storage().nbytes());
  }
  return moved;
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& source, bool non_blocking) {
  if (self.numel() == 0) return self;
  std::vector<Range> reads, writes;
  extend(writes, self);
  extend(reads, source);
  bool both = self.is_cuda() && source.is_cuda();
  // Pageable memory is staged by the driver: such a copy is over for the host when the call returns.
  const auto& host = self.is_cuda() ? source : self;
  bool waits = !both && (!non_blocking || !is_pinned(host.data_ptr()));
  note("operator", current_stream, -1, non_blocking ? "copy_ (non-blocking)" : "copy_", reads, writes);
  {
    at::AutoDispatchBelowADInplaceOrView guard;
    on_cpu(self).copy_(on_cpu(source));
  }
  if (waits) note("synchronize stream", current_stream);
  return self;
}

at::Scalar item(const at::Tensor& self) {
  note("operator", current_stream, -1, "item", range_of(self));
  note("synchronize stream", current_stream);
  return on_cpu(self).item();
}

void record_stream(at::Tensor& self, Stream stream) {
  auto start = reinterpret_cast<uintptr_t>(self.storage().mutable_data());
  note("record stream", stream.id(), -1, "", {}, {{start, start + self.storage().nbytes()}});
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * self.element_size();
  if (self.storage().nbytes() < needed) resize_storage(self.storage(), needed);
  if (format && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  if (stride.data()) {
    impl->set_sizes_and_strides(size, stride, offset);
  } else {
    impl->set_storage_offset(offset);
    impl->set_sizes_contiguous(size);
  }
  return self;
}

at::Tensor& set_empty(at::Tensor& self) {
  return set_storage(self, at::Storage(at::Storage::use_byte_size_t(), 0, device_allocator.allocate(0), &device_allocator, true),
                     0, {0}, {});
}

// The CPU counts floats only, CUDA integers as well.
at::Tensor histc(const at::Tensor& self, int64_t bins, const at::Scalar& min, const at::Scalar& max) {
  bool whole = c10::isIntegralType(self.scalar_type(), true);
  auto counts = at::histc(on_cpu(whole ? self.to(at::kFloat) : self), bins, min, max);
  auto found = to_device(whole ? counts.to(self.scalar_type()) : counts);
  note("operator", current_stream, -1, "aten::histc", range_of(self), range_of(found));
  return found;
}

int64_t choose_attention(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                         const std::optional<at::Tensor>& mask, double dropout, bool is_causal, std::optional<double>,
                         bool enable_gqa) {
  return static_cast<int64_t>(attention_choice::choose({query, key, value, mask, dropout, is_causal, enable_gqa}));
}

// Every other operator: the CPU's kernel on the same memory.
void run_on_cpu(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  const auto begin = stack->size() - count;
  std::vector<Range> reads, writes;
  std::vector<at::IValue> given(stack->begin() + begin, stack->end());
  std::vector<std::pair<at::Tensor, at::Tensor>> changed;  // tensors that the operator writes to, and their CPU side
  const auto& called = schema.name();
  const bool indexes = called == "aten::index" || called == "aten::_index_put_impl_" || called == "aten::index_put_";

  auto convert = [&](const at::Tensor& tensor, bool written) {
    if (!tensor.defined()) return tensor;
    if (!tensor.is_cuda()) {
      TORCH_CHECK(tensor.dim() == 0 || indexes, "Expected all tensors to be on the same device, but ", schema.name(),
                  " got some on cpu and some on cuda:0");
      return tensor;
    }
    extend(written ? writes : reads, tensor);
    auto alias = on_cpu(tensor);
    if (written) changed.emplace_back(tensor, alias);
    return alias;
  };

  for (size_t i = 0; i < count; ++i) {
    auto& value = (*stack)[begin + i];
    const auto* alias = schema.arguments()[i].alias_info();
    bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = convert(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> converted;
      for (const at::Tensor& tensor : value.toTensorList()) converted.push_back(convert(tensor, written));
      value = converted;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> converted;
      for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorList()) {
        converted.push_back(tensor ? std::optional<at::Tensor>(convert(*tensor, written)) : std::nullopt);
      }
      value = converted;
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      value = Device(at::kCPU);
    } else if (value.isGenerator()) {
      value = at::IValue();
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);

  for (auto& [tensor, alias] : changed) {
    if (tensor.numel() == alias.numel() && tensor.sizes() == alias.sizes()) continue;
    resize_(tensor, alias.sizes(), std::nullopt);  // an out= that was too small
    on_cpu(tensor).copy_(alias);
  }
  const auto first = stack->size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    auto& value = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      // The argument of the same alias set.
      for (size_t j = 0; j < count; ++j) {
        const auto* from = schema.arguments()[j].alias_info();
        if (from && *from == *alias) value = given[j];
      }
    } else if (value.isTensor()) {
      value = to_device(value.toTensor());
      extend(writes, value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<at::Tensor> moved;
      for (const at::Tensor& tensor : value.toTensorList()) {
        moved.push_back(to_device(tensor));
        extend(writes, moved.get(moved.size() - 1));
      }
      value = moved;
    }
  }
  note("operator", current_stream, -1, schema.name(), std::move(reads), std::move(writes));
}

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("copy_", &copy_);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", static_cast<at::Tensor (*)(const at::Tensor&, at::IntArrayRef)>(&at::native::view));
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_", &set_empty);
  m.impl("resize_", &resize_);
  m.impl("_local_scalar_dense", &item);
  m.impl("record_stream", &record_stream);
  m.impl("histc", &histc);
  // On a build with CUDA these have kernels for it; without one they would be composed of others, or call kernels that
  // resize their result.
  for (const char* name : {"silu_backward", "mish_backward", "native_channel_shuffle", "addr", "native_group_norm",
                           "mse_loss", "smooth_l1_loss"}) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>());
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_cpu>()); }

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  take_over_hooks();
  c10::SetAllocator(DeviceType::CUDA, &device_allocator);
  at::globalContext().lazyInitDevice(DeviceType::CUDA);  // before, no pointer is ever found to be pinned
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&choose_attention);
  m.def("current_stream", [] { return current_stream; });
  m.def("set_stream", [](int64_t stream) { current_stream = stream; });
  m.def("resize_storage", [](const pybind11::object& storage, size_t nbytes) {
    resize_storage(torch::createStorage(storage.ptr()), nbytes);
  });
  m.def("on_cpu", &on_cpu);
  m.def("ran", [](const std::string& name, const std::vector<at::Tensor>& read, const std::vector<at::Tensor>& written) {
    std::vector<Range> reads, writes;
    for (auto& tensor : read) extend(reads, tensor);
    for (auto& tensor : written) extend(writes, tensor);
    note("operator", current_stream, -1, name, std::move(reads), std::move(writes));
  });
  m.def("synchronize", [] { note("synchronize device", -1); });
  m.def("pin", &pin);
  m.def("unpin", &unpin);
  m.def("is_pinned", [](uintptr_t pointer) { return is_pinned(reinterpret_cast<void*>(pointer)); });
  m.def("allocated_bytes", [] { return memory().allocated; });
  m.def("peak_bytes", [] { return memory().peak; });
  m.def("requested_bytes", [] { return memory().requested; });
  m.def("requested_peak_bytes", [] { return memory().requested_peak; });
  m.def("capacity_bytes", [] { return memory().capacity; });
  m.def("set_capacity", [](size_t nbytes) { memory().capacity = nbytes; });
  m.def("reset_peak", [] {
    memory().peak = memory().allocated;
    memory().requested_peak = memory().requested;
  });
  m.def("pinned", [] {
    std::lock_guard<std::mutex> guard(memory().mutex);
    return memory().pinned;
  });
  m.def("start_log", [] {
    std::lock_guard<std::mutex> guard(log().mutex);
    log().entries.clear();
    log().on = true;
  });
  m.def("note", [](const std::string& kind, int64_t other, std::vector<std::pair<uintptr_t, uintptr_t>> reads,
                   std::vector<std::pair<uintptr_t, uintptr_t>> writes, const std::string& name) {
    Entry entry{kind, name, this_thread(), -1, other, {}, {}};
    for (auto& range : reads) entry.reads.push_back({range.first, range.second});
    for (auto& range : writes) entry.writes.push_back({range.first, range.second});
    log().add(std::move(entry));
  });
  m.def("stop_log", [] {
    std::vector<Entry> entries;
    {
      std::lock_guard<std::mutex> guard(log().mutex);
      log().on = false;
      entries.swap(log().entries);
    }
    pybind11::list result;
    auto ranges = [](const std::vector<Range>& given) {
      pybind11::list list;
      for (auto& range : given) list.append(pybind11::make_tuple(range.start, range.end));
      return list;
    };
    for (auto& entry : entries) {
      result.append(pybind11::make_tuple(entry.kind, entry.name, entry.thread, entry.stream, entry.event,
                                         ranges(entry.reads), ranges(entry.writes)));
    }
    return result;
  });
}
