#include "gather.h"

#include <algorithm>

#include "error.h"

namespace tdgpu {

Gather::Gather(Plan plan, uint32_t row_count) : plan_(std::move(plan)), row_count_(row_count) {
    for (const Piece& piece : plan_.pieces) {
        if (!piece.is_gathered()) throw Error(Cause::invalid, 0, "a gather of what are no rows");
    }
    if (row_count == 0) throw Error(Cause::invalid, 0, "a gather of no rows");
    for (const auto& source : plan_.sources) source_rows_ = std::min(source_rows_, source->rows());
    // Everything but the rows is checked once, with rows and a place that pass.
    Plan tried = plan_;
    tried.rows.assign(row_count, 0);
    for (Chunk& chunk : tried.chunks) chunk.destination++;
    tried.check(0, UINT64_MAX);
}

Plan Gather::plan(const int64_t* rows, const uint64_t* addresses, uint32_t address_count) const {
    if (address_count != 1 && address_count != plan_.chunks.size())
        throw Error(Cause::invalid, 0, "not as many addresses as chunks");
    Plan made = plan_;
    made.rows.assign(rows, rows + row_count_);
    const auto [lowest, highest] = std::minmax_element(rows, rows + row_count_);
    if (*lowest < 0 || uint64_t(*highest) >= source_rows_)
        throw Error(Cause::invalid, 0, "a row that is not there is to be gathered");
    for (size_t i = 0; i < made.chunks.size(); i++) made.chunks[i].destination += addresses[address_count == 1 ? 0 : i];
    return made;
}

}  // namespace tdgpu
