// The caching device allocator, with torch's rules: a freed block goes back to the pool of the stream it was allocated on at
// once, ready to be handed out again for later work of that stream. Work of other streams on it must have been announced with
// record_stream; then the block waits for events of those streams.
//
// Every block that is handed out is first filled with poison in stream order. So bytes of a block's last life never pass for
// bytes that were loaded, and a copy that did not wait for the allocating stream is overwritten.
#include "allocator.h"

#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "../simcuda/control.h"
#include "device.h"

namespace simgpu {
namespace {

struct Block {
  void *memory;
  size_t bytes;
  c10::Stream stream;               // allocated on
  std::set<c10::StreamId> used_on;  // record_stream
  std::vector<CUevent> events;      // what a freed block still waits for
};

struct PoolKey {
  c10::DeviceIndex device;
  c10::StreamId stream;
  size_t bytes;
  bool operator<(const PoolKey &other) const {
    return std::tie(device, stream, bytes) < std::tie(other.device, other.stream, other.bytes);
  }
};

class Allocator final : public c10::DeviceAllocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const auto device = current_device();
    const c10::Device where(kType, device);
    if (!bytes) return {nullptr, nullptr, &free_block, where};
    const auto stream = current_stream(device);
    UseContext use(device);
    std::lock_guard<std::mutex> guard(mutex_);
    Block *block = take(device, stream, (bytes + 511) & ~size_t(511));
    live_[block->memory] = block;
    allocated_[size_t(device)].increase(block->bytes);
    check(tdsim_poison(address_of(block->memory), block->bytes, handle_of(stream)), "poison");
    return {block->memory, block, &free_block, where};
  }

  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void *, const void *, size_t) const override { TORCH_CHECK(false, "simgpu: no copy between raw pointers"); }
  bool initialized() override { return true; }

  void emptyCache(c10::MempoolId_t) override {
    std::lock_guard<std::mutex> guard(mutex_);
    for (c10::DeviceIndex device = 0; device < device_count(); device++) release_cached(device);
  }

  void recordStream(const c10::DataPtr &pointer, c10::Stream stream) override {
    std::lock_guard<std::mutex> guard(mutex_);
    const auto it = live_.find(pointer.get());
    if (it != live_.end() && stream != it->second->stream) it->second->used_on.insert(stream.id());
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    stats.allocated_bytes[0] = stats.active_bytes[0] = stats.requested_bytes[0] = allocated_.at(size_t(device));
    stats.reserved_bytes[0] = reserved_.at(size_t(device));
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex_);
    allocated_.at(size_t(device)).reset_accumulated();
    reserved_.at(size_t(device)).reset_accumulated();
  }

  void resetPeakStats(c10::DeviceIndex device) override {
    std::lock_guard<std::mutex> guard(mutex_);
    allocated_.at(size_t(device)).reset_peak();
    reserved_.at(size_t(device)).reset_peak();
  }

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device) override {
    UseContext use(device);
    size_t free_bytes = 0, total_bytes = 0;
    check(cuMemGetInfo_v2(&free_bytes, &total_bytes), "cuMemGetInfo");
    return {free_bytes, total_bytes};
  }

 private:
  // A deleter: it must not throw, and it may run on any thread, at any time.
  static void free_block(void *context);

  Block *take(c10::DeviceIndex device, const c10::Stream &stream, size_t bytes) {
    reclaim();
    auto it = pool_.lower_bound({device, stream.id(), bytes});
    const bool fits = it != pool_.end() && it->first.device == device && it->first.stream == stream.id() &&
                      it->first.bytes <= 2 * bytes;
    if (fits) {
      it = std::prev(pool_.upper_bound(it->first));  // freed last: the most likely to be still in use by mistake
      Block *block = it->second;
      pool_.erase(it);
      return block;
    }
    CUdeviceptr address = 0;
    CUresult result = cuMemAlloc_v2(&address, bytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
      release_cached(device);
      result = cuMemAlloc_v2(&address, bytes);
    }
    TORCH_CHECK_WITH(OutOfMemoryError, result != CUDA_ERROR_OUT_OF_MEMORY, "simgpu: out of memory. Tried to allocate ",
                     bytes, " bytes on device ", int(device));
    check(result, "cuMemAlloc");
    reserved_[size_t(device)].increase(bytes);
    return new Block{reinterpret_cast<void *>(address), bytes, stream, {}, {}};
  }

  void give_back(Block *block) {
    std::lock_guard<std::mutex> guard(mutex_);
    live_.erase(block->memory);
    const auto device = block->stream.device_index();
    allocated_[size_t(device)].decrease(block->bytes);
    UseContext use(device);
    for (const c10::StreamId id : block->used_on) {
      CUevent event = nullptr;
      check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
      block->events.push_back(event);
      const c10::Stream stream(c10::Stream::UNSAFE, block->stream.device(), id);
      check(cuEventRecord(event, handle_of(stream)), "cuEventRecord");
    }
    block->used_on.clear();
    waiting_.push_back(block);
    reclaim();
  }

  // Moves freed blocks whose events have passed to the pool.
  void reclaim() {
    std::vector<Block *> still_waiting;
    for (Block *block : waiting_) {
      const auto device = block->stream.device_index();
      UseContext use(device);
      while (!block->events.empty() && cuEventQuery(block->events.back()) == CUDA_SUCCESS) {
        cuEventDestroy_v2(block->events.back());
        block->events.pop_back();
      }
      if (block->events.empty()) {
        pool_.insert({{device, block->stream.id(), block->bytes}, block});
      } else {
        still_waiting.push_back(block);
      }
    }
    waiting_.swap(still_waiting);
  }

  void release_cached(c10::DeviceIndex device) {
    reclaim();
    for (auto it = pool_.begin(); it != pool_.end();) {
      if (it->first.device != device) {
        ++it;
        continue;
      }
      UseContext use(device);
      Block *block = it->second;
      // The block may still be written by work that was enqueued before it was freed.
      check(cuStreamSynchronize(handle_of(block->stream)), "cuStreamSynchronize");
      check(cuMemFree_v2(address_of(block->memory)), "cuMemFree");
      reserved_[size_t(device)].decrease(block->bytes);
      delete block;
      it = pool_.erase(it);
    }
  }

  std::mutex mutex_;
  std::multimap<PoolKey, Block *> pool_;
  std::map<void *, Block *> live_;
  std::vector<Block *> waiting_;
  std::array<c10::CachingAllocator::Stat, 8> allocated_{}, reserved_{};
};

Allocator *const the_allocator = new Allocator;  // tensors may be freed at exit: never destroyed

void Allocator::free_block(void *context) {
  if (!context) return;
  try {
    the_allocator->give_back(static_cast<Block *>(context));
  } catch (const std::exception &) {
    // The driver is broken or shutting down. The block is not handed out again: nobody knows when it is safe.
  }
}

}  // namespace

c10::DeviceAllocator &device_allocator() { return *the_allocator; }

REGISTER_ALLOCATOR(kType, the_allocator)

}  // namespace simgpu
