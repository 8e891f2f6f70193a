// How much memory the pages of mapped files take that were touched, for all sources of rows together.
#pragma once

#include <atomic>
#include <cstdint>

namespace tdgpu {

// What one fault maps, at most, of pages that are in memory already: the system's fault_around_bytes, aligned alike.
constexpr uint64_t kWindow = 64 << 10;

// How much the touched pages of all mappings may take together.
constexpr uint64_t kResidentBudget = uint64_t(512) << 20;
// What a test puts in its place.
extern std::atomic<uint64_t> resident_budget;

namespace residency {

// Windows were touched for the first time; or the pages of such were dropped.
void add_touched(int64_t windows);
void remove_touched(int64_t windows);
// Nothing is touched now.
void begin_anew();
// Whether what is touched takes more than the budget.
bool is_used_up();

}  // namespace residency
}  // namespace tdgpu
