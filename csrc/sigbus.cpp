#include "sigbus.h"

#include <pthread.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdint>
#include <mutex>

namespace tdgpu {
namespace {

// The thread's guard. A thread_local of a library that is loaded late may allocate when it is first touched, which a
// handler must not; asking for a key's value never does.
pthread_key_t guard_key;

// What was in place when the handler was installed. More than one where others installed theirs over ours, and we ours
// over theirs again. They are never freed: a handler may be about to use them.
struct Installation {
    struct sigaction previous;
    const Installation* before;
};
std::atomic<const Installation*> newest{nullptr};
std::mutex install_mutex;
// A forked child is often a place where others install handlers anew, so that its threads look again.
std::atomic<unsigned> generation{1};

// Who is handing a signal on, and to whom.
std::atomic<pid_t> handing_on{0};
std::atomic<const Installation*> handed_to{nullptr};

bool is_sent(const siginfo_t* info) {
    return info->si_code <= 0 || info->si_code == BUS_MCEERR_AO;
}

void act_by_default(const siginfo_t* info) {
    struct sigaction action = {};
    action.sa_handler = SIG_DFL;
    sigaction(SIGBUS, &action, nullptr);
    // A fault comes again by itself when the access is repeated. What somebody sent does not.
    if (is_sent(info)) raise(SIGBUS);
}

void hand_on(int signal, siginfo_t* info, void* context) {
    const Installation* installation = newest.load(std::memory_order_acquire);
    // A handler that was installed over ours may well hand the signal back to us: then it is for those before it.
    const bool may_come_back = installation->before != nullptr;
    const pid_t self = pid_t(syscall(SYS_gettid));
    if (may_come_back) {
        if (handing_on.exchange(self) == self) installation = handed_to.load()->before;
        if (!installation) {
            act_by_default(info);
            return;
        }
        handed_to.store(installation);
    }
    const struct sigaction& previous = installation->previous;
    if (!(previous.sa_flags & SA_SIGINFO) && previous.sa_handler == SIG_IGN && is_sent(info)) {
        // Ignored.
    } else if (!(previous.sa_flags & SA_SIGINFO) &&
               (previous.sa_handler == SIG_DFL || previous.sa_handler == SIG_IGN)) {
        act_by_default(info);  // of a fault, too: the system does not let one be ignored
    } else {
        if (previous.sa_flags & SA_RESETHAND) {
            struct sigaction action = {};
            action.sa_handler = SIG_DFL;
            sigaction(SIGBUS, &action, nullptr);
        }
        if (previous.sa_flags & SA_SIGINFO)
            previous.sa_sigaction(signal, info, context);
        else
            previous.sa_handler(signal);
    }
    if (may_come_back) handing_on.store(0);
}

// Calls only what a signal handler may: system calls.
void handle(int signal, siginfo_t* info, void* context) {
    const int error = errno;
    auto* guard = static_cast<SigbusGuard*>(pthread_getspecific(guard_key));
    const bool is_replaced = guard && !is_sent(info) && guard->covers(info->si_addr) && guard->replace(info->si_addr);
    // A handler that was installed over ours (as Python's faulthandler, enabled late) puts ours back and raises the
    // signal anew, which no longer tells where the fault was. Once that handler has returned, the access is repeated,
    // and the fault comes to us.
    const bool comes_again = guard && info->si_code == SI_TKILL && info->si_pid == getpid();
    if (!is_replaced && !comes_again) hand_on(signal, info, context);
    errno = error;
}

bool is_ours(const struct sigaction& action) {
    return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == handle;
}

bool make_key() {
    if (pthread_key_create(&guard_key, nullptr) != 0) return false;
    // A lock that another thread holds at a fork would stay locked in the child.
    pthread_atfork([] { install_mutex.lock(); }, [] { install_mutex.unlock(); },
                   [] {
                       install_mutex.unlock();
                       generation.fetch_add(1);
                   });
    return true;
}

// Once per thread, and again in a forked child.
void prepare_thread() {
    thread_local unsigned prepared_for = 0;
    const unsigned now = generation.load(std::memory_order_relaxed);
    if (prepared_for == now) return;
    install_sigbus_handler();
    // A fault whose signal is blocked ends the process, whatever the handler; the core's threads block all signals.
    sigset_t sigbus;
    sigemptyset(&sigbus);
    sigaddset(&sigbus, SIGBUS);
    pthread_sigmask(SIG_UNBLOCK, &sigbus, nullptr);
    prepared_for = now;
}

}  // namespace

bool install_sigbus_handler() {
    static const bool has_key = make_key();
    if (!has_key) return false;
    std::lock_guard<std::mutex> lock(install_mutex);
    struct sigaction current;
    sigaction(SIGBUS, nullptr, &current);
    if (is_ours(current)) return true;
    newest.store(new Installation{current, newest.load()}, std::memory_order_release);
    // As the one before it wants to be called, so that it sees no difference. The alternative stack is for threads with
    // small ones, and does nothing to the others.
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_mask = current.sa_mask;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | (current.sa_flags & (SA_NODEFER | SA_RESTART));
    sigaction(SIGBUS, &action, nullptr);
    return true;
}

SigbusGuard::SigbusGuard(char* begin, size_t bytes, std::atomic<const char*>& lost)
    : begin_(begin), bytes_(bytes), lost_(lost) {
    prepare_thread();
    holds_ = pthread_setspecific(guard_key, this) == 0;
}

SigbusGuard::~SigbusGuard() {
    pthread_setspecific(guard_key, nullptr);
}

bool SigbusGuard::covers(const void* address) const {
    return uintptr_t(address) - uintptr_t(begin_) < bytes_;
}

bool SigbusGuard::replace(const void* address) {
    const char* nothing = nullptr;
    lost_.compare_exchange_strong(nothing, static_cast<const char*>(address));
    // All of it at once: one page would split the mapping, of which a process may have only so many. The system call
    // itself, as a sanitizer's mmap is nothing for a handler.
    return syscall(SYS_mmap, begin_, bytes_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1,
                   0L) == long(uintptr_t(begin_));
}

}  // namespace tdgpu
