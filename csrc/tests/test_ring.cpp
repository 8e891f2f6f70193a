// The ring hands out places such that no byte of it has two users at once, and waits for no more than it must.
#include "check.h"

using namespace tdgpu;

namespace {

Driver* driver;

// Claims random spans while a model frees them in order; a span may be filled once `fill_after` is freed.
void no_place_has_two_users(unsigned seed, size_t ring_bytes) {
    check::Random random(seed);
    Ring ring(*driver, ring_bytes);
    std::vector<Span> spans;
    std::vector<size_t> sizes;
    Sequence freed = 0;
    for (int i = 0; i < 5000; i++) {
        const size_t limit = random() % 3 ? 8 * Ring::kAlignment : ring.size() / 2;
        const size_t size = 1 + random() % limit;
        const Span span = ring.claim(size);
        assert(span.offset + size <= ring.size() && span.offset % Ring::kAlignment == 0);
        assert(span.sequence == Sequence(i + 1) && !reached(span.fill_after, span.sequence));
        for (size_t k = spans.size(); k-- > 0 && spans.size() - k <= 64;) {
            const bool overlaps = spans[k].offset < span.offset + size && span.offset < spans[k].offset + sizes[k];
            if (overlaps) assert(reached(span.fill_after, spans[k].sequence));
        }
        // The gate is shared with the chunk kReadyGates earlier.
        assert(reached(span.fill_after, span.sequence - Sequence(Ring::kReadyGates)));
        spans.push_back(span);
        sizes.push_back(size);
        if (random() % 2) ring.set_freed(freed = spans[random() % spans.size()].sequence);
    }
    ring.release();
}

void a_full_round_is_free_without_waiting() {
    Ring ring(*driver, Ring::kSmallest);
    const int spans = int(ring.size() / Ring::kAlignment);
    for (int i = 0; i < spans; i++) assert(ring.is_freed(ring.claim(Ring::kAlignment).fill_after));
    const Span next = ring.claim(1);
    assert(next.fill_after == 1 && !ring.is_freed(next.fill_after));
    ring.set_freed(1);
    assert(ring.is_freed(next.fill_after));
    ring.release();
}

void gates_compare_cyclically() {
    assert(reached(5, 5) && reached(6, 5) && !reached(5, 6));
    assert(reached(2, 0xFFFFFFF0u) && !reached(0xFFFFFFF0u, 2));
}

void too_large_a_chunk_is_refused() {
    Ring ring(*driver, Ring::kSmallest);
    assert(check::cause_of([&] { ring.claim(ring.size() + 1); }) == Cause::invalid);
    assert(check::cause_of([&] { ring.claim(0); }) == Cause::invalid);
    ring.release();
}

void limits_give_a_smaller_ring_and_then_a_pageable_one(const check::Simulation& sim) {
    const long held = sim.stat("pinned_bytes");
    sim.set("pinned_limit", held + (1 << 20));
    Ring half(*driver, 1 << 20);
    assert(half.is_pinned() && half.gates_are_pinned() && half.size() == 512 << 10);
    half.release();
    sim.set("pinned_limit", held);
    Ring none(*driver, 1 << 20);
    assert(!none.is_pinned() && !none.gates_are_pinned() && none.size() == 1 << 20 && none.pinned_bytes() == 0);
    none.at(none.claim(100))[99] = 1;
    none.release();
    sim.set("pinned_limit", -1);
    assert(sim.stat("pinned_bytes") == held);
}

}  // namespace

int main() {
    check::Simulation sim;
    driver = new Driver(sim.path);
    CUcontext context;
    assert(driver->DevicePrimaryCtxRetain(&context, 0) == 0 && driver->CtxSetCurrent(context) == 0);
    for (unsigned seed = 0; seed < 8; seed++) no_place_has_two_users(seed, (64 + seed * 52) << 10);
    a_full_round_is_free_without_waiting();
    gates_compare_cyclically();
    too_large_a_chunk_is_refused();
    limits_give_a_smaller_ring_and_then_a_pageable_one(sim);
    sim.expect_clean();
    puts("ring: ok");
}
