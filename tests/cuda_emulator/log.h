// What the pretended device writes down: which operator, on which stream, by which thread, read and wrote which bytes.

#pragma once

#include <pthread.h>

#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

namespace {

struct Range {
  uintptr_t start;
  uintptr_t end;
};

struct Entry {
  std::string kind;
  std::string name;
  uint64_t thread;
  int64_t stream;
  int64_t event;
  std::vector<Range> reads;
  std::vector<Range> writes;
};

struct Log {
  std::mutex mutex;
  bool on = false;
  std::vector<Entry> entries;

  void add(Entry entry) {
    std::lock_guard<std::mutex> guard(mutex);
    if (on) entries.push_back(std::move(entry));
  }
};

Log& log() {
  static Log* instance = new Log();
  return *instance;
}

uint64_t this_thread() { return static_cast<uint64_t>(pthread_self()); }

thread_local int64_t current_stream = 0;

void note(const char* kind, int64_t stream, int64_t event = -1, std::string name = "", std::vector<Range> reads = {},
          std::vector<Range> writes = {}) {
  log().add({kind, std::move(name), this_thread(), stream, event, std::move(reads), std::move(writes)});
}

std::vector<Range> range_of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage() || tensor.numel() == 0) return {};
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  auto start = reinterpret_cast<uintptr_t>(tensor.data_ptr());
  return {{start, start + (last + 1) * tensor.element_size()}};
}

void extend(std::vector<Range>& ranges, const at::Tensor& tensor) {
  for (auto& range : range_of(tensor)) ranges.push_back(range);
}

}  // namespace
