// Tensors whose copy to the host runs still: held here, so that they can be let go under the allocator's lock.
//
// slimpipe/swap/release.py drops each at its planned operator. When the GPU's allocator runs short before that,
// csrc/cuda/pressure.cpp has them all dropped (`drain`), where no Python may run.

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
};

std::mutex guard;
std::map<int64_t, Held> held;
std::map<int64_t, int64_t> drained_versions;
int64_t next_id = 1;
// Makes every compute stream wait for a cudaEvent_t; false where it must not (a graph is being captured).
using WaitFor = bool (*)(int64_t event);
WaitFor wait_for = nullptr;

// `event`: a cudaEvent_t as an integer, 0 on the CPU. Returns a number for `take_pending`.
int64_t hold_pending(const at::Tensor& tensor, int64_t event) {
  const std::lock_guard<std::mutex> lock(guard);
  held.emplace(next_id, Held{tensor, event});
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

// The version a drained tensor had when it was let go, -1 where the number means none. Forgets it.
int64_t drained_version(int64_t id) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = drained_versions.find(id);
  if (found == drained_versions.end()) return -1;
  const int64_t version = found->second;
  drained_versions.erase(found);
  return version;
}

// Lets go of every held tensor whose event the compute streams now wait for (on the CPU: of all). Returns how many.
int64_t drain_pending() {
  std::vector<at::Tensor> let_go;
  {
    const std::lock_guard<std::mutex> lock(guard);
    for (auto item = held.begin(); item != held.end();) {
      if (item->second.event != 0 && (wait_for == nullptr || !wait_for(item->second.event))) {
        ++item;
        continue;
      }
      drained_versions.emplace(item->first, static_cast<int64_t>(item->second.tensor._version()));
      let_go.push_back(std::move(item->second.tensor));
      item = held.erase(item);
    }
  }
  // Freed outside of the lock: who holds it must never wait for the allocator's.
  return static_cast<int64_t>(let_go.size());
}

}  // namespace

extern "C" {

int64_t slimpipe_pending_drain() { return drain_pending(); }

void slimpipe_pending_set_wait(WaitFor wait) { wait_for = wait; }

}  // extern "C"

TORCH_LIBRARY_FRAGMENT(slimpipe, m) {
  m.def("hold_pending(Tensor tensor, int event) -> int", &hold_pending);
  m.def("take_pending(int id) -> Tensor?", &take_pending);
  m.def("drained_version(int id) -> int", &drained_version);
  m.def("drain_pending() -> int", &drain_pending);
}
