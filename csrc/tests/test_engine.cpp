// Loads through the simulated driver: right bytes on both roads, under limits, faults and interrupts; and the seeded
// bugs show, so the tests can fail.
#include <sys/resource.h>

#include <cstring>
#include <thread>

#include "check.h"

using namespace tdgpu;
using check::RandomFile;

namespace {

check::Simulation* sim;
Driver* driver;

unsigned long long device_memory(size_t size) {
    unsigned long long address = 0;
    assert(sim->alloc(&address, size) == 0);
    return address;
}

std::vector<char> fetched(unsigned long long address, size_t size, CUstream stream) {
    void* pinned = nullptr;
    assert(driver->MemHostAlloc(&pinned, size, 0) == 0);
    assert(sim->copy_back(pinned, address, size, stream) == 0 && sim->synchronize(stream) == 0);
    std::vector<char> bytes(static_cast<char*>(pinned), static_cast<char*>(pinned) + size);
    driver->MemFreeHost(pinned);
    return bytes;
}

struct Bench {
    CUcontext context = nullptr;
    CUstream consumer = nullptr;
    std::unique_ptr<Engine> engine;

    explicit Bench(size_t ring = 1 << 20, unsigned threads = 3) {
        engine = std::make_unique<Engine>(*driver, 0, ring, threads);
        assert(driver->DevicePrimaryCtxRetain(&context, 0) == 0 && driver->CtxSetCurrent(context) == 0);
        assert(driver->StreamCreateWithPriority(&consumer, kStreamNonBlocking, 0) == 0);
    }
    ~Bench() { engine->close(500); }

    std::unique_ptr<Transfer> start(Plan plan, Road road, uint32_t events = 0) {
        while (!engine->take_road(road, 5)) {
        }
        auto transfer = engine->begin(std::move(plan), consumer, events);
        while (!engine->pump(*transfer, 5)) {
        }
        return transfer;
    }
    void finish(Transfer& transfer, uint32_t event = 0) {
        while (!engine->wait(transfer, event, 5)) {
        }
    }
    // How many bytes differ when the consumer's stream looks at once.
    size_t wrong_bytes(const RandomFile& file, Road road, size_t chunk = 64 << 10, size_t piece = 24 << 10) {
        const auto address = device_memory(file.bytes.size());
        auto transfer = start(check::plan_of(file, address, chunk, piece), road);
        engine->order(*transfer, 0, consumer);
        const std::vector<char> got = fetched(address, file.bytes.size(), consumer);
        size_t wrong = 0;
        for (size_t i = 0; i < got.size(); i++) wrong += got[i] != file.bytes[i];
        finish(*transfer);
        return wrong;
    }
};

void bytes_arrive(Road road, size_t ring, size_t chunk, size_t piece, unsigned threads) {
    sim->set("delay_us", 300);
    Bench bench(ring, threads);
    for (unsigned i = 0; i < 3; i++) assert(bench.wrong_bytes(RandomFile(700'001 + i, i), road, chunk, piece) == 0);
    assert(bench.wrong_bytes(RandomFile(1), road, chunk, piece) == 0);
    sim->expect_clean();
    sim->reset();
}

ssize_t slow(int fd, void* to, size_t n, off_t at) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return ::pread(fd, to, n, at);
}

// Copies take 2 ms each, and the reads before them 20 ms, which are none of theirs.
void copies_are_timed_without_what_they_wait_for(Road road) {
    const RandomFile file(6 * 65536);
    Bench bench(1 << 20, 1);
    sim->set("delay_us", 2000);
    sim->set("fixed_delay", 1);
    pread_function = slow;
    const auto address = device_memory(file.bytes.size());
    while (!bench.engine->take_road(road, 5)) {
    }
    auto transfer = bench.engine->begin(check::plan_of(file, address, 65536, 65536), bench.consumer, 0);
    const auto times = bench.engine->time_copies(*transfer);
    assert(times->seconds() < 0);
    while (!bench.engine->pump(*transfer, 5)) {
        assert(times->seconds() < 0);
    }
    bench.finish(*transfer);
    transfer.reset();  // the times are there without it
    const double seconds = times->seconds();
    assert(seconds >= 6 * 0.002 && seconds < 6 * 0.02 && times->seconds() == seconds);
    pread_function = &::pread;
    sim->expect_clean();
    sim->reset();
}

void events_of_timed_copies_are_used_again() {
    Bench bench;
    const RandomFile file(300'000);
    const auto address = device_memory(file.bytes.size());
    long made = 0;
    for (int i = 0; i < 5; i++) {
        auto transfer = bench.engine->begin(check::plan_of(file, address, 65536, 65536), bench.consumer, 0);
        const auto times = bench.engine->time_copies(*transfer);
        while (!bench.engine->pump(*transfer, 5)) {
        }
        bench.finish(*transfer);
        if (i % 2) assert(times->seconds() >= 0);  // they come back also where nobody asked
        if (i == 0) made = sim->stat("calls:cuEventCreate");
    }
    assert(sim->stat("calls:cuEventCreate") == made);
    sim->expect_clean();
    sim->reset();
}

// An event that cannot be recorded takes the load back, and its times do not wait for what never comes.
void a_timed_load_that_is_taken_back(Road road) {
    const RandomFile file(300'000);
    Bench bench;
    while (!bench.engine->take_road(road, 5)) {
    }
    for (long nth = 1; nth <= 6; nth++) {
        const auto address = device_memory(file.bytes.size());
        auto transfer = bench.engine->begin(check::plan_of(file, address, 65536, 65536), bench.consumer, 0);
        const auto times = bench.engine->time_copies(*transfer);
        sim->fail("cuEventRecord", nth, 1, 0);
        assert(check::cause_of([&] {
                   while (!bench.engine->pump(*transfer, 5)) {
                   }
               }) == Cause::driver);
        assert(times->seconds() >= 0);
        assert(bench.wrong_bytes(file, road) == 0);
    }
    sim->expect_clean();
    sim->reset();
}

// A device that has broken down says so when it is asked; nobody waits for it.
void a_broken_device_tells_no_times() {
    const RandomFile file(300'000);
    Bench bench;
    const auto address = device_memory(file.bytes.size());
    auto transfer = bench.engine->begin(check::plan_of(file, address, 65536, 65536), bench.consumer, 0);
    const auto times = bench.engine->time_copies(*transfer);
    while (!bench.engine->pump(*transfer, 5)) {
    }
    bench.finish(*transfer);
    sim->fail("cuEventElapsedTime", 1, 700, 1);
    assert(times->seconds() == 0 && times->seconds() == 0);
    sim->reset();
}

void both_roads_take_turns() {
    sim->set("delay_us", 200);
    Bench bench;
    const RandomFile file(300'000);
    for (int i = 0; i < 6; i++) assert(bench.wrong_bytes(file, i % 2 ? Road::host : Road::gated) == 0);
    sim->expect_clean();
    sim->reset();
}

void a_full_queue_blocks_but_never_stops() {
    sim->set("queue_depth", 8);
    sim->set("delay_us", 100);
    Bench bench(256 << 10);
    assert(bench.wrong_bytes(RandomFile(2'000'000), Road::gated, 16 << 10, 16 << 10) == 0);
    assert(sim->stat("enqueue_blocked") > 0);
    sim->expect_clean();
    sim->reset();
}

void more_chunks_than_gates() {
    Bench bench(8 << 20);
    assert(bench.wrong_bytes(RandomFile(3000 * 512), Road::gated, 512, 512) == 0);
    sim->expect_clean();
    sim->reset();
}

void without_memory_operations_the_host_enqueues() {
    sim->set("memops", 0);
    sim->set("delay_us", 200);
    Bench bench;
    assert(!bench.engine->why_host().empty());
    const RandomFile file(900'000);
    assert(check::cause_of([&] {
               bench.start(check::plan_of(file, device_memory(900'000), 65536, 65536), Road::gated);
           }) == Cause::invalid);
    assert(bench.wrong_bytes(file, Road::host) == 0);
    sim->expect_clean();
    sim->reset();
}

void without_pinned_memory_the_host_enqueues() {
    sim->set("pinned_limit", sim->stat("pinned_bytes"));
    Bench bench;
    assert(bench.engine->pinned_bytes() == 0 && !bench.engine->why_host().empty());
    sim->set("pinned_limit", -1);
    assert(bench.wrong_bytes(RandomFile(900'000), Road::host) == 0);
    sim->expect_clean();
    sim->reset();
}

// The simulated driver leaves out what a bug in the engine would leave out.
[[maybe_unused]] void seeded_bugs_show() {
    size_t wrong = 0;
    std::string found;
    for (int attempt = 0; attempt < 3; attempt++) {
        sim->set("delay_us", 2000);
        Bench bench;
        sim->skip("cuStreamWaitEvent", 2);  // the first is the copy stream's, the second the consumer's
        wrong += bench.wrong_bytes(RandomFile(700'000), Road::gated);
        sim->reset();
    }
    assert(wrong > 0 && "a missing wait of the consumer must show");
    {
        sim->set("delay_us", 2000);
        Bench bench(128 << 10);
        sim->set("early_write", 1);  // places are freed before they are copied
        wrong = bench.wrong_bytes(RandomFile(2'000'000), Road::gated, 16 << 10, 16 << 10);
        found = sim->violations();
        sim->reset();
    }
    assert((wrong > 0 || !found.empty()) && "an early reuse must show");
}

ssize_t broken(int fd, void* to, size_t n, off_t at) {
    if (at >= 200'000 && at < 300'000) {
        errno = EIO;
        return -1;
    }
    return ::pread(fd, to, n, at);
}

void a_read_error_fills_with_ff_and_names_the_piece(Road road) {
    const RandomFile file(500'000);
    Bench bench;
    pread_function = broken;
    const auto address = device_memory(file.bytes.size());
    auto transfer = bench.start(check::plan_of(file, address, 65536, 10'000), road);
    bench.finish(*transfer);
    pread_function = &::pread;
    const Failure failure = transfer->load().failure();
    assert(failure.cause == Cause::read && failure.code == EIO && failure.piece >= 0);
    const auto got = fetched(address, file.bytes.size(), bench.consumer);
    for (size_t i = 0; i < got.size(); i++) {
        assert(got[i] == file.bytes[i] || (got[i] == char(0xFF) && i + 20'000 >= 200'000 && i < 320'000));
    }
    assert(bench.wrong_bytes(file, road) == 0);  // and the engine is as good as before
    sim->expect_clean();
    sim->reset();
}

void a_truncated_file_is_told_from_an_error() {
    const RandomFile file(100'000);
    Bench bench;
    Plan plan = check::plan_of(file, device_memory(200'000), 65536, 65536);
    plan.pieces.back().bytes = plan.chunks.back().bytes = 60'000;
    auto transfer = bench.start(std::move(plan), Road::gated);
    bench.finish(*transfer);
    const Failure failure = transfer->load().failure();
    assert(failure.cause == Cause::truncated && failure.wanted == 125'536 && failure.found == 100'000);
    sim->expect_clean();
    sim->reset();
}

void a_failing_copy_is_raised_and_the_next_load_works(Road road, const char* function, long nth) {
    const RandomFile file(2'000'000);
    sim->set("delay_us", 500);
    Bench bench(256 << 10);
    const auto address = device_memory(file.bytes.size());
    sim->fail(function, nth, 1, 0);
    const Cause cause = check::cause_of([&] { bench.start(check::plan_of(file, address, 32768, 8192), road); });
    assert(cause == Cause::driver);
    assert(bench.wrong_bytes(file, road) == 0);
    sim->expect_clean();
    sim->reset();
}

void an_interrupted_load_can_be_taken_back() {
    const RandomFile file(2'000'000);
    sim->set("delay_us", 500);
    sim->set("queue_depth", 8);
    Bench bench(128 << 10);
    auto transfer =
        bench.engine->begin(check::plan_of(file, device_memory(file.bytes.size()), 32768, 8192), bench.consumer, 0);
    bench.engine->pump(*transfer, 0);
    while (!bench.engine->abort(*transfer, 5)) {
    }
    assert(bench.wrong_bytes(file, Road::gated) == 0);
    sim->expect_clean();
    sim->reset();
}

void a_broken_context_ends_every_wait() {
    const RandomFile file(2'000'000);
    Bench bench(128 << 10);
    sim->set("delay_us", 1000);
    auto transfer = bench.start(check::plan_of(file, device_memory(file.bytes.size()), 16384, 16384), Road::gated);
    sim->fail("cuEventQuery", 1, 700, 1);
    bench.finish(*transfer);
    assert(transfer->load().failure().cause == Cause::driver);
    while (!transfer->load().wait_filled(5)) {
    }
    bench.engine->close(0);
    sim->reset();
}

void a_capturing_stream_is_refused() {
    const RandomFile file(1000);
    Bench bench;
    const auto address = device_memory(1000);
    sim->set("capturing", 1);
    assert(check::cause_of([&] { bench.start(check::plan_of(file, address, 1000, 1000), Road::gated); }) ==
           Cause::capturing);
    sim->set("capturing", 0);
    assert(bench.wrong_bytes(file, Road::gated) == 0);
    sim->expect_clean();
    sim->reset();
}

void inconsistent_plans_are_refused() {
    const RandomFile file(1000);
    Bench bench;
    const Plan good = check::plan_of(file, device_memory(1000), 500, 100);
    auto refused = [&](auto change) {
        Plan plan = good;
        change(plan);
        assert(check::cause_of([&] { bench.start(std::move(plan), Road::gated); }) == Cause::invalid);
    };
    refused([](Plan& plan) { plan.pieces[3].file = 1; });
    refused([](Plan& plan) { plan.pieces[3].bytes = 501; });
    refused([](Plan& plan) { plan.pieces[3].chunk_offset = ~0ull; });
    refused([](Plan& plan) { plan.pieces[3].offset = ~0ull; });
    refused([](Plan& plan) { plan.chunks[1].first_piece = 0; });
    refused([](Plan& plan) { plan.chunks[1].piece_count = 4'000'000'000u; });
    refused([](Plan& plan) { plan.chunks[0].bytes = 1 << 30; });
    refused([](Plan& plan) { plan.chunks[0].event = 1; });
    refused([](Plan& plan) { plan.chunks.pop_back(); });
    refused([](Plan& plan) { plan.chunks.clear(), plan.pieces.clear(); });
    assert(bench.wrong_bytes(file, Road::gated) == 0);
    sim->expect_clean();
    sim->reset();
}

void events_pass_in_order() {
    const RandomFile file(1'000'000);
    sim->set("delay_us", 500);
    Bench bench;
    const auto address = device_memory(file.bytes.size());
    Plan plan = check::plan_of(file, address, 50'000, 50'000);
    for (size_t c = 0; c < 19; c++) plan.chunks[c].event = uint32_t(c + 1);
    auto transfer = bench.start(std::move(plan), Road::gated, 19);
    for (uint32_t event : {3u, 0u, 12u}) {
        bench.engine->order(*transfer, event, bench.consumer);
        const auto got = fetched(address + event * 50'000, 50'000, bench.consumer);
        assert(memcmp(got.data(), file.bytes.data() + event * 50'000, 50'000) == 0);
    }
    bench.finish(*transfer, 19);
    sim->expect_clean();
    sim->reset();
}

void threads_load_at_the_same_time() {
    sim->set("delay_us", 100);
    Bench bench;
    std::mutex enqueuing;  // what the Python engine holds
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < 4; t++) {
        threads.emplace_back([&, t] {
            assert(driver->CtxSetCurrent(bench.context) == 0);
            CUstream stream = nullptr;
            assert(driver->StreamCreateWithPriority(&stream, kStreamNonBlocking, 0) == 0);
            for (unsigned i = 0; i < 4; i++) {
                const RandomFile file(200'000 + t * 1000 + i, t * 10 + i);
                const auto address = device_memory(file.bytes.size());
                std::unique_ptr<Transfer> transfer;
                {
                    std::lock_guard<std::mutex> lock(enqueuing);
                    transfer = bench.engine->begin(check::plan_of(file, address, 30'000, 7'000), stream, 0);
                    while (!bench.engine->pump(*transfer, 5)) {
                    }
                }
                bench.engine->order(*transfer, 0, stream);
                assert(fetched(address, file.bytes.size(), stream) == file.bytes);
            }
        });
    }
    for (std::thread& thread : threads) thread.join();
    sim->expect_clean();
    sim->reset();
}

void closing_with_work_under_way_ends() {
    const RandomFile file(4'000'000);
    sim->set("delay_us", 3000);
    Bench bench(128 << 10);
    auto transfer = bench.start(check::plan_of(file, device_memory(file.bytes.size()), 16384, 16384), Road::gated);
    bench.engine->close(50);
    assert(transfer->load().is_filled());
    sim->reset();
}

void files_are_opened_one_at_a_time() {
    // More leaves than the process may have files open.
    rlimit before;
    getrlimit(RLIMIT_NOFILE, &before);
    std::vector<std::unique_ptr<RandomFile>> files;
    Plan plan;
    std::vector<char> expected;
    for (unsigned i = 0; i < 300; i++) {
        files.push_back(std::make_unique<RandomFile>(100 + i, i));
        plan.files.push_back({files.back()->path, 0});
        plan.pieces.push_back({0, files.back()->bytes.size(), expected.size(), i, 0, 0, 0});
        expected.insert(expected.end(), files.back()->bytes.begin(), files.back()->bytes.end());
    }
    Bench bench;
    const auto address = device_memory(expected.size());
    plan.chunks.push_back({address, expected.size(), 0, 300, 0, 0});
    rlimit few = before;
    few.rlim_cur = 64;
    setrlimit(RLIMIT_NOFILE, &few);
    auto transfer = bench.start(std::move(plan), Road::gated);
    bench.finish(*transfer);
    setrlimit(RLIMIT_NOFILE, &before);
    assert(transfer->load().failure().cause == Cause::none);
    assert(fetched(address, expected.size(), bench.consumer) == expected);
    sim->expect_clean();
    sim->reset();
}

}  // namespace

int main() {
    sim = new check::Simulation;
    driver = new Driver(sim->path);
    for (Road road : {Road::gated, Road::host}) {
        bytes_arrive(road, 1 << 20, 64 << 10, 24 << 10, 3);
        bytes_arrive(road, 64 << 10, 32 << 10, 1000, 2);
        bytes_arrive(road, 256 << 10, 100'000, 100'000, 1);
        a_read_error_fills_with_ff_and_names_the_piece(road);
        copies_are_timed_without_what_they_wait_for(road);
        a_timed_load_that_is_taken_back(road);
        a_failing_copy_is_raised_and_the_next_load_works(road, "cuMemcpyHtoDAsync_v2", 5);
    }
    a_failing_copy_is_raised_and_the_next_load_works(Road::gated, "cuStreamBatchMemOp_v2", 7);
    a_failing_copy_is_raised_and_the_next_load_works(Road::gated, "cuStreamWaitValue32_v2", 1);
    a_failing_copy_is_raised_and_the_next_load_works(Road::gated, "cuStreamWaitEvent", 1);
    a_failing_copy_is_raised_and_the_next_load_works(Road::gated, "cuEventRecord", 1);
    a_failing_copy_is_raised_and_the_next_load_works(Road::gated, "cuEventRecord", 2);
    a_failing_copy_is_raised_and_the_next_load_works(Road::host, "cuEventQuery", 2);
    events_of_timed_copies_are_used_again();
    both_roads_take_turns();
    a_full_queue_blocks_but_never_stops();
    more_chunks_than_gates();
    without_memory_operations_the_host_enqueues();
    without_pinned_memory_the_host_enqueues();
#ifndef __SANITIZE_THREAD__  // which finds these, too, as the data races that they are
    seeded_bugs_show();
#endif
    a_truncated_file_is_told_from_an_error();
    an_interrupted_load_can_be_taken_back();
    a_capturing_stream_is_refused();
    inconsistent_plans_are_refused();
    events_pass_in_order();
    threads_load_at_the_same_time();
    files_are_opened_one_at_a_time();
    closing_with_work_under_way_ends();
    a_broken_context_ends_every_wait();
    a_broken_device_tells_no_times();
    puts("engine: ok");
    fflush(stdout);
    _exit(0);  // the simulated driver's threads are detached
}
