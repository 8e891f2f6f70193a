// Threads of the core's own.
#pragma once

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "error.h"

namespace tdgpu {

// Starts up to `count` threads, each running `body(number)` under the name "<name>-<number>", with all signals blocked:
// those are for the program's own threads, and one that caught a signal would interrupt nothing but itself. Limits on
// threads are met with fewer; none at all is an Error(memory).
template <class Body>
std::vector<std::thread> start_threads(unsigned count, const char* name, Body body) {
    std::vector<std::thread> threads;
    threads.reserve(count);
    sigset_t all, previous;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &previous);
    std::string failure;
    int code = 0;
    for (unsigned i = 0; i < count && failure.empty(); i++) {
        try {
            threads.emplace_back([=] {
                char text[16];
                snprintf(text, sizeof text, "%s-%u", name, i);
                pthread_setname_np(pthread_self(), text);
                body(i);
            });
        } catch (const std::system_error& error) {
            failure = error.what();
            code = error.code().value();
        } catch (const std::bad_alloc&) {
            failure = "no memory";
        }
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    if (threads.empty()) throw Error(Cause::memory, code, "no thread could be started: " + failure);
    return threads;
}

// Calls `body(first, last)` for shares of [0, count) that cover all of it, in up to `threads` threads of which the
// calling one is the first; it does all by itself where no other can be started. `body` throws nothing.
template <class Body>
void in_shares(uint32_t count, uint32_t share, unsigned threads, Body body) {
    std::atomic<uint64_t> next{0};
    const auto work = [&](unsigned) {
        for (;;) {
            const uint64_t first = next.fetch_add(share);
            if (first >= count) return;
            body(uint32_t(first), uint32_t(std::min<uint64_t>(count, first + share)));
        }
    };
    std::vector<std::thread> others;
    const unsigned most = unsigned((uint64_t(count) + share - 1) / share);
    if (std::min(threads, most) > 1) {
        try {
            others = start_threads(std::min(threads, most) - 1, "tdgpu-share", work);
        } catch (const Error&) {
        }
    }
    work(0);
    for (std::thread& thread : others) thread.join();
}

}  // namespace tdgpu
