// When the CUDA caching allocator finds no free block, it asks its callbacks before it grows, waits or fails: this one
// lets go of the tensors that only wait for their copy to the host (csrc/pending.cpp).
//
// Called under the allocator's lock, which is recursive, so freeing is allowed; Python is not.

#include <c10/util/Registry.h>

#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>

// What c10/cuda/CUDACachingAllocator.h and cuda_runtime_api.h declare. Including them takes the whole of CUDA's headers,
// which machines with PyTorch's own CUDA packages do not have.
using cudaStream_t = struct CUstream_st*;
using cudaEvent_t = struct CUevent_st*;
extern "C" int cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned int);
extern "C" int cudaStreamIsCapturing(cudaStream_t, int* status);

namespace c10 {

class __attribute__((visibility("default"))) FreeMemoryCallback {
 public:
  virtual ~FreeMemoryCallback() = default;
  virtual bool Execute() = 0;
};

C10_DECLARE_REGISTRY(FreeCudaMemoryCallbacksRegistry, FreeMemoryCallback);

namespace {

std::mutex guard;
std::set<cudaStream_t> compute_streams;
std::atomic<int64_t (*)()> drain{nullptr};
std::atomic<int64_t> drained{0};

class LetGoOfPending : public FreeMemoryCallback {
 public:
  bool Execute() override {
    const auto function = drain.load();
    const int64_t count = function == nullptr ? 0 : function();
    drained += count;
    return count > 0;
  }
};

C10_REGISTER_CLASS(FreeCudaMemoryCallbacksRegistry, "slimpipe_pending", LetGoOfPending)

}  // namespace
}  // namespace c10

extern "C" {

// `drain`: slimpipe_pending_drain of csrc/pending.cpp, which lies in another library.
void slimpipe_pressure_enable(int64_t (*drain)()) { c10::drain = drain; }

// A stream that computes: drained memory may go back to its pool.
void slimpipe_pressure_stream(int64_t stream) {
  const std::lock_guard<std::mutex> lock(c10::guard);
  c10::compute_streams.insert(reinterpret_cast<cudaStream_t>(stream));
}

// For slimpipe_pending_set_wait.
bool slimpipe_pressure_wait(int64_t event) {
  const std::lock_guard<std::mutex> lock(c10::guard);
  for (const auto stream : c10::compute_streams) {
    int status = 0;  // cudaStreamCaptureStatusNone; success is 0 as well
    if (cudaStreamIsCapturing(stream, &status) != 0 || status != 0) return false;
  }
  for (const auto stream : c10::compute_streams) {
    if (cudaStreamWaitEvent(stream, reinterpret_cast<cudaEvent_t>(event), 0) != 0) return false;
  }
  return true;
}

// Tensors that were let go under pressure so far.
int64_t slimpipe_pressure_drained() { return c10::drained; }

}  // extern "C"
