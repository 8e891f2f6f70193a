// The controls of the simulated driver, for tests. C ABI: Python calls them through ctypes, C++ tests through dlsym.
#pragma once

#include "driver.h"

extern "C" {

// Sets one setting (see struct Config in state.h for all of them). Returns 0, or -1 for a name that does not exist.
TDSIM_EXPORT int tdsim_set(const char *name, long value);

// The nth call of `function` from now on (1 = the next one; 0 = every one) returns `code` and does nothing else.
// With `sticky`, the context current at that call stays broken: every later call in it returns `code`.
TDSIM_EXPORT void tdsim_fail(const char *function, long nth, int code, int sticky);

// The nth call of `function` from now on (0 = every one) returns CUDA_SUCCESS without doing anything: a seeded bug.
TDSIM_EXPORT void tdsim_skip(const char *function, long nth);

// A counter by name; 0 if nothing was counted.
//   calls:<function>, copies, h2d_bytes, d2h_bytes, pageable_copies, host_sync, implicit_sync:<function>,
//   enqueue_blocked, skipped, failed: since the last reset;
//   contexts:<device> (primary contexts retained since the process began), contexts (their sum);
//   pinned_bytes, device_bytes, device_bytes:<device>, streams, events, pending (operations): now.
TDSIM_EXPORT long tdsim_stat(const char *name);

// What was found wrong since the last reset, one finding per line. Valid until the calling thread calls it again.
TDSIM_EXPORT const char *tdsim_violations();

// Waits (bounded) until the queues are idle, then clears faults, counters, violations, broken contexts and settings.
// Memory, streams and events stay: they belong to whoever made them.
TDSIM_EXPORT void tdsim_reset();

// Pinned bytes held now, allocated and registered.
TDSIM_EXPORT long tdsim_pinned();

// Enqueues a fill with the poison pattern, as if a kernel scribbled over the block. An allocator that hands out a block
// again calls it, so that bytes of its last life never pass for bytes that arrived. Ignores faults; nothing if poison=0.
TDSIM_EXPORT CUresult tdsim_poison(CUdeviceptr address, size_t bytes, CUstream stream);
}
