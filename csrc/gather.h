// What is done for every batch of so many rows: all of a plan but the rows and the place.
#pragma once

#include "load.h"

namespace tdgpu {

class Gather {
public:
    // A plan of gathered pieces, with sources and without rows; its chunks' destinations are counted from 0. Throws
    // Error(invalid) unless it fits `row_count` rows.
    Gather(Plan plan, uint32_t row_count);

    uint32_t row_count() const { return row_count_; }

    // The plan for rows (`row_count` of them) whose chunks' destinations are counted from an address: one for all, or
    // one for each. Throws Error(invalid) for a row that is not there, or another number of addresses.
    Plan plan(const int64_t* rows, const uint64_t* addresses, uint32_t address_count) const;

private:
    Plan plan_;
    const uint32_t row_count_;
    uint64_t source_rows_ = UINT64_MAX;  // of the shortest source
};

}  // namespace tdgpu
