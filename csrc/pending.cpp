// Tensors whose copy to the host runs still: held here, so that their memory can be given up under the allocator's lock.
//
// slimpipe/swap/release.py drops each at its planned operator. When the GPU's allocator runs short before that,
// csrc/cuda/pressure.cpp has them all drained. No Python may run then, and dropping a tensor that Python has seen runs
// Python (it takes the interpreter's lock, whose owner may be waiting for the allocator's). So a drained tensor loses
// only its memory; the empty tensor is dropped when Python asks for it next.

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace {

struct Held {
  at::Tensor tensor;
  int64_t event;
  int64_t alone;
};

struct Drained {
  at::Tensor empty;
  int64_t version;
};

std::mutex guard;
std::map<int64_t, Held> held;
std::map<int64_t, Drained> drained;
int64_t next_id = 1;
// Makes every compute stream wait for a cudaEvent_t; false where it must not (a graph is being captured).
using WaitFor = bool (*)(int64_t event);
WaitFor wait_for = nullptr;

// `event`: a cudaEvent_t as an integer, 0 on the CPU. `alone`: references that the storage counts when none but this
// tensor refers to it. Returns a number for `take_pending`.
int64_t hold_pending(const at::Tensor& tensor, int64_t event, int64_t alone) {
  const std::lock_guard<std::mutex> lock(guard);
  held.emplace(next_id, Held{tensor, event, alone});
  return next_id++;
}

// The tensor, no longer held; nothing where it was drained.
std::optional<at::Tensor> take_pending(int64_t id) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = held.find(id);
  if (found == held.end()) return std::nullopt;
  auto tensor = std::move(found->second.tensor);
  held.erase(found);
  return tensor;
}

// The version a drained tensor had when it was drained, -1 where the number means none. Forgets it.
int64_t drained_version(int64_t id) {
  std::optional<Drained> found;
  {
    const std::lock_guard<std::mutex> lock(guard);
    const auto place = drained.find(id);
    if (place == drained.end()) return -1;
    found = std::move(place->second);
    drained.erase(place);
  }
  return found->version;
}

// Gives up the memory of every held tensor that no one else refers to and whose event the compute streams now wait for
// (on the CPU: of all with event 0). Returns how many.
int64_t drain_pending() {
  std::vector<at::DataPtr> memory;
  {
    const std::lock_guard<std::mutex> lock(guard);
    for (auto item = held.begin(); item != held.end();) {
      auto& [tensor, event, alone] = item->second;
      const bool shared = static_cast<int64_t>(tensor.storage().use_count()) > alone;
      if (shared || (event != 0 && (wait_for == nullptr || !wait_for(event)))) {
        ++item;
        continue;
      }
      const auto version = static_cast<int64_t>(tensor._version());
      memory.push_back(tensor.storage().unsafeGetStorageImpl()->set_data_ptr(at::DataPtr(nullptr, tensor.device())));
      drained.emplace(item->first, Drained{std::move(tensor), version});
      item = held.erase(item);
    }
  }
  // Freed outside of the lock: who holds it must never wait for the allocator's.
  return static_cast<int64_t>(memory.size());
}

}  // namespace

extern "C" {

int64_t slimpipe_pending_drain() { return drain_pending(); }

void slimpipe_pending_set_wait(WaitFor wait) { wait_for = wait; }

}  // extern "C"

TORCH_LIBRARY_FRAGMENT(slimpipe, m) {
  m.def("hold_pending(Tensor tensor, int event, int alone) -> int", &hold_pending);
  m.def("take_pending(int id) -> Tensor?", &take_pending);
  m.def("drained_version(int id) -> int", &drained_version);
  m.def("drain_pending() -> int", &drain_pending);
}
