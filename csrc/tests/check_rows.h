// What the tests of rows share: rows to ask for, whether those that came are right, and how a child has ended.
#pragma once

#include <sys/wait.h>

#include <cstring>

#include "check.h"
#include "rows.h"

namespace check {

inline std::vector<int64_t> random_rows(size_t count, uint64_t rows, unsigned seed) {
    Random random(seed);
    std::vector<int64_t> picked(count);
    for (int64_t& row : picked) row = int64_t(random() % rows);
    return picked;
}

inline bool are_right(const char* got, const std::vector<int64_t>& picked, const char* first_row, size_t row_bytes) {
    for (size_t i = 0; i < picked.size(); i++)
        if (memcmp(got + i * row_bytes, first_row + size_t(picked[i]) * row_bytes, row_bytes) != 0) return false;
    return true;
}

inline void expect_right(const tdgpu::RowSource& source, const char* first_row, const std::vector<int64_t>& picked,
                         size_t odd) {
    const size_t row_bytes = source.row_bytes();
    std::vector<char> to(odd + picked.size() * row_bytes + 64, 0x55);
    const tdgpu::Damage damage = source.gather(picked.data(), picked.size(), to.data() + odd);
    assert(!damage.any());
    assert(are_right(to.data() + odd, picked, first_row, row_bytes));
    for (size_t i = 0; i < odd; i++) assert(to[i] == 0x55);  // and not a byte more
    for (size_t i = to.size() - 64; i < to.size(); i++) assert(to[i] == 0x55);
}

inline bool has_ended_with(int status, int code) {
    return WIFEXITED(status) && WEXITSTATUS(status) == code;
}

}  // namespace check
