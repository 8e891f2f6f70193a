// Copying rows that are in memory, in any order.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tdgpu {

// How many of `count` rows, of which there is one at least, follow each other from the first on.
size_t run_length(const int64_t* rows, size_t count);

// Whether rows should be written past the caches where so many bytes are gathered together.
bool streams_pay(uint64_t row_bytes, uint64_t together);

// Copies rows, one behind the other, to `to`.
void copy_rows(const char* base, uint64_t row_bytes, const int64_t* rows, size_t count, char* to, bool streams);

// What was written past the caches is seen by others, a device included, only after this.
void end_streaming();

}  // namespace tdgpu
