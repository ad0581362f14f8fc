// Counts PyTorch's operators as they are called, and writes their sequence down as integers.
//
// A RecordFunction callback, on the thread that starts it and on the autograd threads that work for it. Python reads the
// counters straight from memory (ctypes): a call through the dispatcher would be an operator itself.
// slimpipe/swap/observer.py uses this. Kernels that are launched without an operator (Triton, pybind) are not seen.

#include <ATen/record_function.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace torch::autograd {
// torch/csrc/autograd/graph_task.h declares it, together with half of autograd.
TORCH_API int get_current_graph_task_id();
}  // namespace torch::autograd

namespace {

struct State {
  int64_t count;   // operators since `begin`
  int64_t last;    // number of the last operator's name
  int64_t paused;  // not counting while this is not 0
};

State state{0, 0, 1};
// Operators of one step: (number of the name) * 2 + (1 inside a backward). Numbers go by first appearance.
std::vector<int32_t> sequence;
// By the text: some operators carry a copy of their name with each call.
struct Hash {
  using is_transparent = void;
  size_t operator()(std::string_view text) const { return std::hash<std::string_view>{}(text); }
};
std::unordered_map<std::string, int32_t, Hash, std::equal_to<>> numbers;
std::mutex guard;
bool active = false;
at::CallbackHandle handle = 0;

std::unique_ptr<at::ObserverContext> called(const at::RecordFunction& function) {
  if (state.paused) return nullptr;
  const bool backward = torch::autograd::get_current_graph_task_id() != -1;
  const std::lock_guard<std::mutex> lock(guard);
  const std::string_view name = function.name();
  auto found = numbers.find(name);
  if (found == numbers.end()) found = numbers.emplace(name, static_cast<int32_t>(numbers.size())).first;
  state.last = found->second;
  sequence.push_back(found->second * 2 + (backward ? 1 : 0));
  ++state.count;
  return nullptr;
}

}  // namespace

extern "C" {

// Begins a count at 0 on the calling thread. 0 where another count is under way, else 1.
int slimpipe_operators_begin() {
  const std::lock_guard<std::mutex> lock(guard);
  if (active) return 0;
  active = true;
  sequence.clear();
  state = {0, 0, 0};
  handle = at::addThreadLocalCallback(at::RecordFunctionCallback(called).scopes({at::RecordScope::FUNCTION}));
  return 1;
}

// Ends the count, on the thread that began it. The sequence stays until the next one begins.
void slimpipe_operators_end() {
  if (!active) return;
  at::removeCallback(handle);
  const std::lock_guard<std::mutex> lock(guard);
  state.paused = 1;
  active = false;
}

int64_t* slimpipe_operators_state() { return &state.count; }

const int32_t* slimpipe_operators_sequence() { return sequence.data(); }

}  // extern "C"
