// The C ABI that tdgpu/transfer/native.py speaks: plain functions, no exceptions, no ownership that is not named.
//
// Functions that can fail return a Cause (0: fine) and leave the words and the code with the calling thread, for
// tdgpu_last_error. Waits are bounded, so that the Python side can look for signals between them.
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "capi.h"
#include "codecs.h"
#include "engine.h"
#include "stage.h"
#include "writers.h"

#ifndef TDGPU_VERSION
#define TDGPU_VERSION ""
#endif
#ifndef TDGPU_SOURCE_ID
#define TDGPU_SOURCE_ID ""
#endif

using namespace tdgpu;

TDGPU_API const char* tdgpu_version() {
    return TDGPU_VERSION;
}
TDGPU_API const char* tdgpu_source_id() {
    return TDGPU_SOURCE_ID;
}

TDGPU_API int tdgpu_last_error(char* message, size_t size) {
    copy_text(last_message, message, size);
    return last_code;
}

// A test's stand-in for pread; null puts the real one back.
TDGPU_API void tdgpu_set_pread(PreadFunction function) {
    pread_function = function ? function : &::pread;
}

// Likewise for pwritev.
TDGPU_API void tdgpu_set_pwritev(PwritevFunction function) {
    pwritev_function = function ? function : &::pwritev;
}

// --- drivers ---

TDGPU_API int tdgpu_driver_open(const char* path, Driver** driver) {
    return guarded([&] { *driver = new Driver(path); });
}

TDGPU_API int tdgpu_driver_facts(Driver* driver, int* version, int* devices) {
    return guarded([&] {
        driver->check(driver->DriverGetVersion(version), "cuDriverGetVersion");
        driver->check(driver->DeviceGetCount(devices), "cuDeviceGetCount");
    });
}

TDGPU_API int tdgpu_driver_device_name(Driver* driver, int device, char* name, size_t size) {
    return guarded([&] {
        CUdevice handle = 0;
        driver->check(driver->DeviceGet(&handle, device), "cuDeviceGet");
        driver->check(driver->DeviceGetName(name, int(size), handle), "cuDeviceGetName");
    });
}

// --- engines ---

TDGPU_API int tdgpu_engine_create(Driver* driver, int device, uint64_t ring_bytes, uint32_t threads, Engine** engine) {
    return guarded([&] { *engine = new Engine(*driver, device, ring_bytes, threads); });
}

TDGPU_API void tdgpu_engine_facts(Engine* engine, uint64_t* ring_bytes, uint64_t* pinned_bytes, uint64_t* largest_chunk,
                                  uint32_t* threads, char* why_host, size_t size) {
    *threads = engine->thread_count();
    *ring_bytes = engine->ring_bytes();
    *pinned_bytes = engine->pinned_bytes();
    *largest_chunk = engine->largest_chunk();
    copy_text(engine->why_host(), why_host, size);
}

// The engine's memory stays: transfers may still name it.
TDGPU_API int tdgpu_engine_close(Engine* engine, int64_t milliseconds) {
    return guarded([&] { engine->close(milliseconds); });
}

// --- transfers to a device ---

TDGPU_API int tdgpu_engine_take_road(Engine* engine, int road, int64_t milliseconds, int* is_taken) {
    return guarded([&] { *is_taken = engine->take_road(Road(road), milliseconds); });
}

TDGPU_API int tdgpu_transfer_begin(Engine* engine, const PlanView* view, uint32_t events, uint64_t consumer_stream,
                                   Transfer** transfer) {
    return guarded([&] {
        *transfer = engine->begin(view->plan(), reinterpret_cast<CUstream>(consumer_stream), events).release();
    });
}

TDGPU_API int tdgpu_transfer_pump(Engine* engine, Transfer* transfer, int64_t milliseconds, int* is_enqueued) {
    return guarded([&] { *is_enqueued = engine->pump(*transfer, milliseconds); });
}

TDGPU_API int tdgpu_transfer_abort(Engine* engine, Transfer* transfer, int64_t milliseconds, int* is_over) {
    return guarded([&] { *is_over = engine->abort(*transfer, milliseconds); });
}

TDGPU_API int tdgpu_transfer_order(Engine* engine, Transfer* transfer, uint32_t event, uint64_t stream) {
    return guarded([&] { engine->order(*transfer, event, reinterpret_cast<CUstream>(stream)); });
}

TDGPU_API int tdgpu_transfer_wait(Engine* engine, Transfer* transfer, uint32_t event, int64_t milliseconds,
                                  int* has_passed) {
    return guarded([&] { *has_passed = engine->wait(*transfer, event, milliseconds); });
}

using SharedTimes = std::shared_ptr<CopyTimes>;

// After begin, before the first pump. `times` outlives the transfer.
TDGPU_API int tdgpu_transfer_time_copies(Engine* engine, Transfer* transfer, SharedTimes** times) {
    return guarded([&] { *times = new SharedTimes(engine->time_copies(*transfer)); });
}
// Negative as long as copies are under way.
TDGPU_API int tdgpu_times_seconds(SharedTimes* times, double* seconds) {
    return guarded([&] { *seconds = (*times)->seconds(); });
}
TDGPU_API void tdgpu_times_release(SharedTimes** times) {
    delete *times;
    *times = nullptr;
}

TDGPU_API Load* tdgpu_transfer_load(Transfer* transfer) {
    return &transfer->load();
}
// `transfer` is null afterwards, as with every release: a finalizer that is interrupted does it again.
TDGPU_API void tdgpu_transfer_release(Transfer** transfer) {
    delete *transfer;
    *transfer = nullptr;
}

// --- loads ---

TDGPU_API void tdgpu_load_cancel(Load* load) {
    load->cancel();
}

TDGPU_API int tdgpu_load_wait_filled(Load* load, int64_t milliseconds) {
    return load->wait_filled(milliseconds);
}

TDGPU_API void tdgpu_load_report(Load* load, LoadReport* report, char* message, size_t size) {
    *report = report_of(*load);
    copy_text(load->failure().message, message, size);
}

// --- reads into host memory, without a device ---

TDGPU_API int tdgpu_readers_create(uint32_t threads, Readers** readers) {
    return guarded([&] { *readers = new Readers(threads); });
}

// Joins the threads. Reads that are queued end without being read, and no more are taken. Not from two threads at once.
TDGPU_API void tdgpu_readers_stop(Readers* readers) {
    readers->stop();
}
// `readers` is null afterwards: the caller may be interrupted before it can note that itself.
TDGPU_API void tdgpu_readers_destroy(Readers** readers) {
    delete *readers;
    *readers = nullptr;
}

TDGPU_API int tdgpu_readers_post(Readers* readers, const PlanView* view, SharedLoad** read) {
    return guarded([&] {
        Plan plan = view->plan();
        plan.check(0, UINT64_MAX);
        auto load = std::make_shared<Load>(std::move(plan), nullptr);
        readers->post(load);
        *read = new SharedLoad(std::move(load));
    });
}

TDGPU_API Load* tdgpu_read_load(SharedLoad* read) {
    return read->get();
}
TDGPU_API void tdgpu_read_release(SharedLoad** read) {
    delete *read;
    *read = nullptr;
}

// --- loads whose copies the caller enqueues ---

TDGPU_API int tdgpu_stage_create(char* memory, uint64_t bytes, uint32_t threads, Stage** stage) {
    return guarded([&] { *stage = new Stage(memory, bytes, threads); });
}

TDGPU_API void tdgpu_stage_facts(Stage* stage, uint64_t* bytes, uint32_t* threads) {
    *bytes = stage->size();
    *threads = stage->thread_count();
}

TDGPU_API void tdgpu_stage_cancel(Stage* stage) {
    stage->cancel();
}

// Joins the threads. Reads that are queued end without being read.
TDGPU_API void tdgpu_stage_stop(Stage* stage) {
    stage->stop();
}

// `stage` is null afterwards.
TDGPU_API void tdgpu_stage_destroy(Stage** stage) {
    delete *stage;
    *stage = nullptr;
}

TDGPU_API int tdgpu_stage_post(Stage* stage, const PlanView* view, SharedLoad** read) {
    return guarded([&] { *read = new SharedLoad(stage->post(view->plan())); });
}

TDGPU_API int tdgpu_stage_wait_ready(Stage* stage, SharedLoad* read, uint32_t chunk, int64_t milliseconds,
                                     uint64_t* offset) {
    size_t found = 0;
    const bool is_ready = stage->wait_ready(**read, chunk, milliseconds, found);
    *offset = found;
    return is_ready;
}

TDGPU_API void tdgpu_stage_set_copied(Stage* stage, SharedLoad* read, uint32_t chunk) {
    stage->set_copied(**read, chunk);
}

// Chunks from `chunk` on will not be taken.
TDGPU_API void tdgpu_stage_strand(SharedLoad* read, uint32_t chunk) {
    (*read)->cancel();
    (*read)->strand(chunk);
}

// --- files that grow ---

using SharedFiles = std::shared_ptr<GrowingFiles>;

// `paths`: `count` names, each with a NUL at its end.
TDGPU_API int tdgpu_files_create(const char* paths, const uint64_t* row_bytes, uint32_t count, uint32_t most_open,
                                 uint32_t threads, SharedFiles** files) {
    return guarded([&] {
        std::vector<GrowingFiles::Leaf> leaves;
        leaves.reserve(count);
        for (uint32_t i = 0; i < count; i++) {
            leaves.push_back({paths, row_bytes[i]});
            paths += leaves.back().path.size() + 1;
        }
        *files = new SharedFiles(std::make_shared<GrowingFiles>(std::move(leaves), most_open, threads));
    });
}

// Each gives errno, or 0; `file` is then the one to blame.
TDGPU_API int tdgpu_files_open_all(SharedFiles* files, uint64_t rows, uint32_t* file, uint64_t* found) {
    const FileFailure failure = (*files)->open_all(rows, *found);
    *file = failure.file;
    return failure.error;
}
TDGPU_API int tdgpu_files_reserve(SharedFiles* files, uint64_t first, uint64_t last, uint32_t* file) {
    const FileFailure failure = (*files)->reserve(first, last);
    *file = failure.file;
    return failure.error;
}
TDGPU_API int tdgpu_files_sync(SharedFiles* files, uint32_t* file) {
    const FileFailure failure = (*files)->sync();
    *file = failure.file;
    return failure.error;
}
TDGPU_API int tdgpu_files_cut_back(SharedFiles* files, uint64_t rows, uint32_t* file) {
    const FileFailure failure = (*files)->cut_back(rows);
    *file = failure.file;
    return failure.error;
}

// Stores that are under way keep the files open. `files` is null afterwards.
TDGPU_API void tdgpu_files_release(SharedFiles** files) {
    delete *files;
    *files = nullptr;
}

// --- outlets ---

TDGPU_API int tdgpu_outlet_create(Driver* driver, int device, uint64_t ring_bytes, Outlet** outlet) {
    return guarded([&] { *outlet = new Outlet(*driver, device, ring_bytes); });
}
TDGPU_API int tdgpu_outlet_create_over(char* memory, uint64_t bytes, Outlet** outlet) {
    return guarded([&] { *outlet = new Outlet(memory, bytes); });
}
TDGPU_API void tdgpu_outlet_facts(Outlet* outlet, uint64_t* ring_bytes, uint64_t* pinned_bytes) {
    *ring_bytes = outlet->ring_bytes();
    *pinned_bytes = outlet->pinned_bytes();
}
TDGPU_API int tdgpu_outlet_claim(Outlet* outlet, uint64_t bytes, uint32_t* chunk, uint64_t* address) {
    return guarded([&] {
        const Outlet::Place place = outlet->claim(bytes);
        *chunk = place.chunk;
        *address = reinterpret_cast<uint64_t>(place.memory);
    });
}
TDGPU_API int tdgpu_outlet_follow(Outlet* outlet, uint64_t stream) {
    return guarded([&] { outlet->follow(reinterpret_cast<CUstream>(stream)); });
}
TDGPU_API int tdgpu_outlet_copy(Outlet* outlet, uint32_t chunk, uint64_t to, uint64_t source, uint64_t bytes) {
    return guarded([&] { outlet->copy(chunk, reinterpret_cast<char*>(to), source, bytes); });
}
TDGPU_API int tdgpu_outlet_order(Outlet* outlet, uint64_t stream) {
    return guarded([&] { outlet->order(reinterpret_cast<CUstream>(stream)); });
}
TDGPU_API int tdgpu_outlet_settle(Outlet* outlet) {
    return guarded([&] { outlet->settle(); });
}
TDGPU_API int tdgpu_outlet_wait_copied(Outlet* outlet, uint32_t chunk, int64_t milliseconds) {
    return outlet->wait_copied(chunk, milliseconds);
}
TDGPU_API int tdgpu_outlet_check(Outlet* outlet) {
    return guarded([&] { outlet->check(); });
}
TDGPU_API int tdgpu_outlet_wait_free(Outlet* outlet, uint32_t chunk, int64_t milliseconds) {
    return outlet->wait_free(chunk, milliseconds);
}
TDGPU_API void tdgpu_outlet_set_copied(Outlet* outlet, uint32_t chunk) {
    outlet->set_copied(chunk);
}
TDGPU_API uint32_t tdgpu_outlet_last_chunk(Outlet* outlet) {
    return outlet->last_chunk();
}
// Chunks after `chunk` that are not written will not be.
TDGPU_API void tdgpu_outlet_discard(Outlet* outlet, uint32_t chunk) {
    while (chunk != outlet->last_chunk()) outlet->set_written(++chunk);
}

// Only when all stores of its chunks are written or cancelled. `outlet` is null afterwards.
TDGPU_API int tdgpu_outlet_close(Outlet** outlet, int64_t milliseconds) {
    return guarded([&] {
        (*outlet)->close(milliseconds);
        delete *outlet;
        *outlet = nullptr;
    });
}

// --- stores ---

// What a store reports of itself. Part of the C ABI.
struct StoreReport {
    uint64_t bytes_written;
    uint64_t wanted, found;
    uint32_t file;
    int32_t error;
};

using SharedStore = std::shared_ptr<Store>;

TDGPU_API int tdgpu_writers_create(uint32_t threads, Writers** writers) {
    return guarded([&] { *writers = new Writers(threads); });
}
// Joins the threads; what is queued ends unwritten. The object stays.
TDGPU_API void tdgpu_writers_stop(Writers* writers) {
    writers->stop();
}

TDGPU_API int tdgpu_writers_post(Writers* writers, SharedFiles* files, const Part* parts, uint32_t part_count,
                                 const StoredChunk* chunks, uint32_t chunk_count, SharedStore** store) {
    return guarded([&] {
        auto made = std::make_shared<Store>(*files, std::vector<Part>(parts, parts + part_count),
                                            std::vector<StoredChunk>(chunks, chunks + chunk_count));
        auto shared = std::make_unique<SharedStore>(made);
        writers->post(std::move(made));
        *store = shared.release();
    });
}
TDGPU_API int tdgpu_store_wait(SharedStore* store, int64_t milliseconds) {
    return (*store)->wait(milliseconds);
}
TDGPU_API void tdgpu_store_cancel(SharedStore* store) {
    (*store)->cancel();
}
TDGPU_API void tdgpu_store_report(SharedStore* store, StoreReport* report) {
    const StoreFailure failure = (*store)->failure();
    *report = {(*store)->bytes_written(), failure.wanted, failure.found, failure.file, failure.error};
}
TDGPU_API void tdgpu_store_release(SharedStore* store) {
    delete store;
}

// --- codecs ---

TDGPU_API int tdgpu_load_codec(int codec, const char* path) {
    return guarded([&] { load_codec(Codec(codec), path); });
}

// The CRC-32 of consecutive parts, from theirs and their sizes. Needs the codec zlib.
TDGPU_API int tdgpu_combine_crc32(const uint32_t* crcs, const uint64_t* sizes, uint64_t count, uint32_t* combined) {
    return guarded([&] {
        if (!codecs.zlib.crc32_combine) throw Error(Cause::library, 0, "no zlib has been loaded");
        uint32_t crc = 0;
        for (uint64_t i = 0; i < count; i++) crc = codecs.zlib.crc32_combine(crc, crcs[i], int64_t(sizes[i]));
        *combined = crc;
    });
}
