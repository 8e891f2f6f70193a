// Pinned host memory for torch. Nothing is cached: a block is freed as soon as the events recorded on it have passed, so that
// freeing memory which is still being copied is found by the driver.
#include "host_allocator.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "device.h"

namespace simgpu {
namespace {

struct Use {
  c10::DeviceIndex device;
  CUevent event;
};

struct PinnedBlock {
  void *memory;
  c10::DeviceIndex device;  // whose context it was made in
  std::vector<Use> uses;
};

class Pinned final : public at::HostAllocator {
 public:
  at::DataPtr allocate(size_t bytes) override {
    if (!bytes) return {nullptr, nullptr, &free_block, c10::Device(c10::DeviceType::CPU)};
    const auto device = current_device();
    UseContext use(device);
    std::lock_guard<std::mutex> guard(mutex_);
    reclaim();
    void *memory = nullptr;
    check(cuMemHostAlloc(&memory, bytes, 0), "cannot allocate pinned host memory");
    auto *block = new PinnedBlock{memory, device, {}};
    live_[memory] = block;
    return {memory, block, &free_block, c10::Device(c10::DeviceType::CPU)};
  }

  at::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void *to, const void *from, size_t bytes) const override { memcpy(to, from, bytes); }

  // The block stays until the stream's work so far is done. False if the pointer is not in one of our blocks.
  bool record_event(void *pointer, void *, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(mutex_);
    auto it = live_.upper_bound(pointer);
    if (it == live_.begin()) return false;
    PinnedBlock *block = (--it)->second;
    UseContext use(stream.device_index());
    CUevent event = nullptr;
    check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
    check(cuEventRecord(event, handle_of(stream)), "cuEventRecord");
    block->uses.push_back({stream.device_index(), event});
    return true;
  }

  void empty_cache() override {
    std::lock_guard<std::mutex> guard(mutex_);
    reclaim();
  }

  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}

 private:
  static void free_block(void *context);

  void give_back(PinnedBlock *block) {
    std::lock_guard<std::mutex> guard(mutex_);
    live_.erase(block->memory);
    freed_.push_back(block);
    reclaim();
  }

  static bool passed(const Use &use) {
    UseContext context(use.device);
    if (cuEventQuery(use.event) != CUDA_SUCCESS) return false;
    cuEventDestroy_v2(use.event);
    return true;
  }

  void reclaim() {
    auto released = [](PinnedBlock *block) {
      block->uses.erase(std::remove_if(block->uses.begin(), block->uses.end(), passed), block->uses.end());
      if (!block->uses.empty()) return false;
      UseContext use(block->device);
      cuMemFreeHost(block->memory);
      delete block;
      return true;
    };
    freed_.erase(std::remove_if(freed_.begin(), freed_.end(), released), freed_.end());
  }

  std::mutex mutex_;
  std::map<void *, PinnedBlock *> live_;
  std::vector<PinnedBlock *> freed_;
};

Pinned *const the_allocator = new Pinned;  // tensors may be freed at exit: never destroyed

void Pinned::free_block(void *context) {
  if (!context) return;
  try {
    the_allocator->give_back(static_cast<PinnedBlock *>(context));
  } catch (const std::exception &) {  // a deleter must not throw; the driver is broken or shutting down
  }
}

}  // namespace

at::HostAllocator &host_allocator() { return *the_allocator; }

REGISTER_HOST_ALLOCATOR(kType, the_allocator)

}  // namespace simgpu
