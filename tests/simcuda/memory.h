// Which memory there is: device memory, pinned memory, registered memory.
//
// Device memory has two mappings of the same pages. The address that the driver hands out cannot be read or written by the
// host (a stray access crashes, as it would with a GPU); the simulation itself goes through the second, private mapping.
#pragma once

#include "state.h"

namespace tdsim {

constexpr unsigned char kDevicePoison = 0xCB;
constexpr unsigned char kPinnedPoison = 0xA5;
constexpr unsigned char kInFlightPoison = 0xD6;  // a device-to-host copy's destination until the copy has run

enum class Kind { kPinned, kRegistered, kDevice };

struct Allocation {
  uintptr_t begin;
  size_t bytes;   // what was asked for: accesses beyond it are out of bounds
  size_t mapped;  // whole pages
  Kind kind;
  Context *context;
  char *shadow;  // device memory: the simulation's own mapping; otherwise nullptr
};

struct Range {
  uintptr_t begin;
  size_t bytes;
  bool overlaps(const Range &other) const { return begin < other.begin + other.bytes && other.begin < begin + bytes; }
};

// All of these: State::mutex held.
CUresult allocate_device(Context &context, size_t bytes, CUdeviceptr *address);
CUresult allocate_pinned(Context &context, size_t bytes, void **address);
CUresult register_pinned(Context &context, void *address, size_t bytes);
void release(const Allocation &allocation);

const Allocation *find_allocation(uintptr_t address);  // the one that holds this byte, or nullptr
const Allocation *find_allocation_at(uintptr_t begin, Kind kind);

// The allocation of `kind` that holds the whole range, or nullptr.
const Allocation *find_range(const Range &range, Kind kind);
bool is_pinned(const Range &range);

// Where the simulation reads and writes the byte that the driver calls `address`.
char *accessible(uintptr_t address);

}  // namespace tdsim
