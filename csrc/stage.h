// Loads for a device that only a framework can reach: a ring of its memory and readers, while the framework enqueues
// the copies. The caller takes each chunk when it is ready, and says when its copy is over.
#pragma once

#include <memory>

#include "readers.h"

namespace tdgpu {

class Stage {
public:
    // `memory` is the caller's, and outlives the stage.
    Stage(char* memory, size_t bytes, unsigned threads) : ring_(memory, bytes), readers_(threads) {}
    ~Stage() {
        stop();
        ring_.release();
    }

    // Ends the readers. What was posted can still be asked about.
    void stop() { readers_.stop(); }

    // One load after the other: the next one may be posted once the chunks of the last are all taken, or stranded.
    std::shared_ptr<Load> post(Plan plan);

    // Whether `chunk` is ready, waiting up to `milliseconds`; then it begins at `offset` of the memory.
    bool wait_ready(const Load& load, uint32_t chunk, int64_t milliseconds, size_t& offset) const;

    // The copies of the load's chunks up to `chunk` are over. For what was stranded too, once no copy is under way.
    void set_copied(const Load& load, uint32_t chunk) { ring_.set_freed(load.span(chunk).sequence); }

    void cancel() { readers_.cancel(); }
    size_t size() const { return ring_.size(); }
    unsigned thread_count() const { return readers_.thread_count(); }

private:
    Ring ring_;
    Readers readers_;
};

}  // namespace tdgpu
