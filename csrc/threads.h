// Threads of the core's own.
#pragma once

#include <pthread.h>

#include <csignal>
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
        }
    }
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    if (threads.empty()) throw Error(Cause::memory, code, "no thread could be started: " + failure);
    return threads;
}

}  // namespace tdgpu
