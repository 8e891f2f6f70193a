#include "stage.h"

#include <chrono>

#include "patience.h"

namespace tdgpu {

std::shared_ptr<Load> Stage::post(Plan plan) {
    plan.check(0, ring_.size() / 2);
    auto load = std::make_shared<Load>(std::move(plan), &ring_);
    readers_.post(load);
    return load;
}

bool Stage::wait_ready(const Load& load, uint32_t chunk, int64_t milliseconds, size_t& offset) const {
    using Clock = std::chrono::steady_clock;
    const auto deadline = Clock::now() + std::chrono::milliseconds(milliseconds);
    for (Patience patience; !ring_.is_ready(load.span(chunk).sequence); patience.wait()) {
        if (Clock::now() >= deadline) return false;
    }
    offset = load.span(chunk).offset;
    return true;
}

}  // namespace tdgpu
