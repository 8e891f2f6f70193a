// A file that shrinks is never a crash, and nobody else's SIGBUS is touched: whoever's handler was there before, or
// comes after, is called for what is not ours.
#include "sigbus.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>

#include "check_rows.h"

using namespace tdgpu;
using check::has_ended_with;

namespace {

volatile char sink;
volatile sig_atomic_t handled = 0;
const char* volatile expected_address = nullptr;
struct sigaction replaced_action;

void count(int) {
    handled = handled + 1;
}

void exit_with_seven(int, siginfo_t* info, void*) {
    _exit(info->si_addr == expected_address ? 7 : 8);
}

// As Python's faulthandler: puts back what was there, and raises the signal again.
void put_back_and_raise(int signal) {
    handled = handled + 1;
    sigaction(signal, &replaced_action, nullptr);
    raise(signal);
}

struct sigaction install(void (*handler)(int), int flags) {
    struct sigaction action = {}, previous;
    action.sa_handler = handler;
    action.sa_flags = flags;
    assert(sigaction(SIGBUS, &action, &previous) == 0);
    return previous;
}

void install_exit_with_seven() {
    struct sigaction action = {};
    action.sa_sigaction = exit_with_seven;
    action.sa_flags = SA_SIGINFO;
    assert(sigaction(SIGBUS, &action, nullptr) == 0);
}

// A gather that meets the end of its file.
void gather_lost_row() {
    const check::RandomFile file(100'000);
    const RowSource source(file.path, 0, 0, 100, 1000);
    assert(truncate(file.path.c_str(), 10'000) == 0);
    const int64_t row = 999;
    char to[100];
    assert(source.gather(&row, 1, to).cause == Cause::truncated);
}

// Somebody else's.
void meet_sigbus() {
    const check::RandomFile file(10'000);
    const int descriptor = open(file.path.c_str(), O_RDWR);
    auto* mapped = static_cast<char*>(mmap(nullptr, 10'000, PROT_READ, MAP_SHARED, descriptor, 0));
    assert(mapped != MAP_FAILED && ftruncate(descriptor, 0) == 0);
    unlink(file.path.c_str());
    expected_address = mapped + 5000;
    sink = mapped[5000];
}

// How a child ends that does this, before anything else of this process made a source.
int status_of(void (*body)()) {
    const pid_t child = fork();
    assert(child >= 0);
    if (child == 0) {
        const struct rlimit no_core = {0, 0};
        setrlimit(RLIMIT_CORE, &no_core);
        body();
        _exit(0);
    }
    int status;
    assert(waitpid(child, &status, 0) == child);
    return status;
}

bool is_killed(int status) {
    return WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS;
}

void sigbus_of_others_goes_where_it_went() {
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        meet_sigbus();
    })));
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        raise(SIGBUS);
    })));
    // A fault cannot be ignored, but what was sent can.
    assert(is_killed(status_of([] {
        install(SIG_IGN, 0);
        gather_lost_row();
        meet_sigbus();
    })));
    assert(has_ended_with(status_of([] {
                              install(SIG_IGN, 0);
                              gather_lost_row();
                              raise(SIGBUS);
                              gather_lost_row();
                              _exit(5);
                          }),
                          5));
    assert(has_ended_with(status_of([] {
                              install_exit_with_seven();
                              gather_lost_row();
                              meet_sigbus();
                          }),
                          7));
    assert(has_ended_with(status_of([] {
                              install(count, 0);
                              gather_lost_row();
                              assert(handled == 0);
                              raise(SIGBUS);
                              raise(SIGBUS);
                              gather_lost_row();
                              _exit(handled);
                          }),
                          2));
    assert(is_killed(status_of([] {  // the handler wanted to be called once
        install(count, int(SA_RESETHAND));
        gather_lost_row();
        raise(SIGBUS);
        assert(handled == 1);
        raise(SIGBUS);
    })));
}

void handlers_before_and_after_ours_are_called() {
    // Before ours: not for a lost row; and it ends what is not ours.
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        replaced_action = install(put_back_and_raise, SA_NODEFER);
        gather_lost_row();
        if (handled != 0) _exit(1);
        meet_sigbus();
    })));
    // After ours: it hands a lost row on to us, and what is not ours, too.
    assert(has_ended_with(status_of([] {
                              install(SIG_DFL, 0);
                              const check::RandomFile file(100'000);
                              const RowSource source(file.path, 0, 0, 100, 1000);
                              const int64_t row = 999;
                              char to[100];
                              assert(!source.gather(&row, 1, to).any());
                              replaced_action = install(put_back_and_raise, SA_NODEFER);
                              assert(truncate(file.path.c_str(), 10'000) == 0);
                              assert(source.gather(&row, 1, to).cause == Cause::truncated);
                              unlink(file.path.c_str());
                              _exit(10 + handled);
                          }),
                          11));
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        replaced_action = install(put_back_and_raise, SA_NODEFER);
        meet_sigbus();
    })));
    // After ours, and it never hands anything on, as the one of torch's data loader workers: new sources, new threads
    // and forked children are before it again.
    assert(has_ended_with(status_of([] {
                              install(SIG_DFL, 0);
                              gather_lost_row();
                              install_exit_with_seven();
                              gather_lost_row();
                              meet_sigbus();
                          }),
                          7));
    assert(has_ended_with(status_of([] {
                              install(SIG_DFL, 0);
                              const check::RandomFile file(100'000);
                              const RowSource source(file.path, 0, 0, 100, 1000);
                              const int64_t row = 999;
                              char to[100];
                              assert(!source.gather(&row, 1, to).any());
                              const pid_t child = fork();
                              if (child == 0) {
                                  install_exit_with_seven();
                                  assert(truncate(file.path.c_str(), 10'000) == 0);
                                  assert(source.gather(&row, 1, to).cause == Cause::truncated);
                                  meet_sigbus();
                              }
                              int status;
                              assert(waitpid(child, &status, 0) == child && has_ended_with(status, 7));
                              assert(source.gather(&row, 1, to).cause == Cause::truncated);
                              unlink(file.path.c_str());
                              _exit(6);
                          }),
                          6));
    // Two that hand on to each other end all the same.
    assert(is_killed(status_of([] {
        install(SIG_DFL, 0);
        gather_lost_row();
        replaced_action = install([](int signal) { replaced_action.sa_sigaction(signal, nullptr, nullptr); }, 0);
        static const struct sigaction ours = replaced_action;
        replaced_action = install(
            [](int signal) {
                siginfo_t info = {};
                info.si_code = SI_USER;
                ours.sa_sigaction(signal, &info, nullptr);
            },
            0);
        gather_lost_row();
        raise(SIGBUS);
    })));
}

}  // namespace

int main() {
    sigbus_of_others_goes_where_it_went();
    handlers_before_and_after_ours_are_called();
    puts("sigbus: ok");
}
