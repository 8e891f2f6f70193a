// Runs a process under ptrace: stops it at every system call, logs those that concern the files below a directory, makes
// chosen ones fail, and kills the process at a chosen stop.
//
// ptrace sees what the kernel is asked for, whoever asks: Python, the native core, libc. Everything happens in the
// calling thread, since only the thread that traces may wait for the traced ones.
#include <fcntl.h>
#include <signal.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#define TRACER_EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// A system call that can touch a file. The numbers say which argument is what; -1: it has none.
struct Spec {
    long number;
    const char *name;
    int fd;      // a descriptor
    int dir;     // the directory that `path` is relative to; -1: the working directory
    int path;
    int dir2;
    int path2;
    int data;    // the buffer, or the vector of buffers, that is written; its length is the next argument
    bool vector;
};

constexpr Spec by_fd(long number, const char *name, int fd = 0) {
    return {number, name, fd, -1, -1, -1, -1, -1, false};
}
constexpr Spec writes(long number, const char *name, bool vector) {
    return {number, name, 0, -1, -1, -1, -1, 1, vector};
}
constexpr Spec by_path(long number, const char *name, int dir, int path, int dir2 = -1, int path2 = -1) {
    return {number, name, -1, dir, path, dir2, path2, -1, false};
}

const Spec kSpecs[] = {
    writes(SYS_write, "write", false),
    writes(SYS_pwrite64, "pwrite", false),
    writes(SYS_writev, "writev", true),
    writes(SYS_pwritev, "pwritev", true),
    writes(SYS_pwritev2, "pwritev2", true),
    by_fd(SYS_fallocate, "fallocate"),
    by_fd(SYS_ftruncate, "ftruncate"),
    by_fd(SYS_fsync, "fsync"),
    by_fd(SYS_fdatasync, "fdatasync"),
    by_fd(SYS_sync_file_range, "sync_file_range"),
    by_fd(SYS_syncfs, "syncfs"),
    by_fd(SYS_fchmod, "fchmod"),
    by_fd(SYS_fchown, "fchown"),
    by_fd(SYS_flock, "flock"),
    by_fd(SYS_sendfile, "sendfile"),
    by_fd(SYS_splice, "splice", 2),
    by_fd(SYS_copy_file_range, "copy_file_range", 2),
    by_fd(SYS_mmap, "mmap", 4),
    by_path(SYS_openat, "open", 0, 1),
    by_path(SYS_openat2, "openat2", 0, 1),
    by_path(SYS_mkdirat, "mkdir", 0, 1),
    by_path(SYS_unlinkat, "unlink", 0, 1),
    by_path(SYS_renameat2, "rename", 0, 1, 2, 3),
    by_path(SYS_linkat, "link", 0, 1, 2, 3),
    by_path(SYS_symlinkat, "symlink", 1, 2),
    by_path(SYS_fchmodat, "chmod", 0, 1),
    by_path(SYS_fchownat, "chown", 0, 1),
    by_path(SYS_truncate, "truncate", -1, 0),
#ifdef SYS_renameat
    by_path(SYS_renameat, "rename", 0, 1, 2, 3),
#endif
#ifdef SYS_open  // the older calls, which newer architectures do not have
    by_path(SYS_open, "old open", -1, 0),  // its flags are another argument than those of openat
    by_path(SYS_creat, "creat", -1, 0),
    by_path(SYS_mkdir, "mkdir", -1, 0),
    by_path(SYS_unlink, "unlink", -1, 0),
    by_path(SYS_rmdir, "rmdir", -1, 0),
    by_path(SYS_rename, "rename", -1, 0, -1, 1),
    by_path(SYS_link, "link", -1, 0, -1, 1),
    by_path(SYS_symlink, "symlink", -1, 1),
    by_path(SYS_chmod, "chmod", -1, 0),
    by_path(SYS_chown, "chown", -1, 0),
#endif
};

const Spec *find_spec(long number) {
    for (const Spec &spec : kSpecs)
        if (spec.number == number) return &spec;
    return nullptr;
}

constexpr size_t kMostData = size_t(256) << 20;

struct Call {
    const Spec *spec = nullptr;  // null: it concerns no file below the root
    int64_t index = 0;
    int64_t entry = 0;
    uint64_t args[6] = {};
    long offset = -1;  // where `write` and `writev` begin
    bool fails = false;
    std::string path, path2, data;
};

struct Thread {
    int order = 0;
    bool started = false;  // its first SIGSTOP, which the kernel sends to every traced thread, has been seen
    Call call;
};

std::string link_target(const std::string &link) {
    char target[PATH_MAX];
    const ssize_t length = readlink(link.c_str(), target, sizeof target);
    return length > 0 ? std::string(target, size_t(length)) : std::string();
}

std::string of_process(pid_t thread, const std::string &what) { return "/proc/" + std::to_string(thread) + "/" + what; }

std::string read_memory(pid_t thread, uint64_t address, size_t bytes) {
    std::string result(bytes, '\0');
    const iovec local{result.data(), bytes}, remote{reinterpret_cast<void *>(address), bytes};
    const ssize_t read = process_vm_readv(thread, &local, 1, &remote, 1, 0);
    result.resize(read > 0 ? size_t(read) : 0);
    return result;
}

std::string read_string(pid_t thread, uint64_t address) {
    std::string result;
    while (result.size() < PATH_MAX) {
        // Up to the end of a page at a time: the next one may not be there.
        const size_t bytes = 4096 - (address + result.size()) % 4096;
        const std::string part = read_memory(thread, address + result.size(), bytes);
        const size_t end = part.find('\0');
        result += part.substr(0, end);
        if (part.empty() || end != std::string::npos) break;
    }
    return result;
}

std::string resolve(pid_t thread, int directory, const std::string &path) {
    if (!path.empty() && path[0] == '/') return path;
    const std::string base =
        link_target(of_process(thread, directory == AT_FDCWD ? "cwd" : "fd/" + std::to_string(directory)));
    return path.empty() ? base : base + "/" + path;
}

long position(pid_t thread, int fd) {
    char text[256] = {};
    const int file = open(of_process(thread, "fdinfo/" + std::to_string(fd)).c_str(), O_RDONLY | O_CLOEXEC);
    if (file < 0) return -1;
    const ssize_t length = read(file, text, sizeof text - 1);
    close(file);
    const char *found = length > 0 ? strstr(text, "pos:") : nullptr;
    return found ? strtol(found + 4, nullptr, 10) : -1;
}

std::string written(pid_t thread, const Call &call) {
    const uint64_t address = call.args[call.spec->data];
    const size_t length = size_t(call.args[call.spec->data + 1]);
    if (!call.spec->vector) return read_memory(thread, address, length < kMostData ? length : kMostData);
    std::string result;
    for (size_t i = 0; i < length && i < IOV_MAX; i++) {
        const std::string raw = read_memory(thread, address + i * sizeof(iovec), sizeof(iovec));
        iovec part{};
        if (raw.size() == sizeof part) memcpy(&part, raw.data(), sizeof part);
        result += read_memory(thread, reinterpret_cast<uint64_t>(part.iov_base), part.iov_len);
    }
    return result;
}

std::string hex(const std::string &bytes) {
    static const char digits[] = "0123456789abcdef";
    std::string result;
    for (const unsigned char byte : bytes) {
        result += digits[byte >> 4];
        result += digits[byte & 15];
    }
    return result;
}

// At its entry: the call does nothing.
void skip_call(pid_t thread) {
#if defined(__x86_64__)
    ptrace(PTRACE_POKEUSER, thread, offsetof(user_regs_struct, orig_rax), -1L);
#elif defined(__aarch64__)  // from the kernel's documentation of NT_ARM_SYSTEM_CALL
    int none = -1;
    iovec value{&none, sizeof none};
    ptrace(PTRACE_SETREGSET, thread, 0x404, &value);
#else
#error "say here how a system call is skipped on this architecture"
#endif
}

// At its exit: it returns this.
void set_result(pid_t thread, long result) {
#if defined(__x86_64__)
    ptrace(PTRACE_POKEUSER, thread, offsetof(user_regs_struct, rax), result);
#else
    user_regs_struct registers{};
    iovec value{&registers, sizeof registers};
    ptrace(PTRACE_GETREGSET, thread, 1 /* NT_PRSTATUS */, &value);
    registers.regs[0] = static_cast<unsigned long>(result);
    ptrace(PTRACE_SETREGSET, thread, 1, &value);
#endif
}

double now() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return double(time.tv_sec) + double(time.tv_nsec) * 1e-9;
}

}  // namespace

struct Plan {
    const char *root;   // calls on files below it, and on itself, are numbered from 1
    int64_t kill_at;    // the stop at which the process is killed, from 1; 0: never
    int64_t fail_from;  // the numbered calls from this one to `fail_to` fail, if `failing` has their name; 0: none
    int64_t fail_to;
    const char *failing;  // "|pwrite|fsync|"
    int32_t error;        // with this errno
    int32_t log;          // whether to keep a log of the numbered calls
    double seconds;       // after which the process is killed
};

struct Result {
    int64_t points;  // stops that passed
    int64_t calls;   // calls that were numbered
    int32_t outcome;  // 0: ended by itself, 1: killed where planned, 2: killed because it took too long, -1: not traced
    int32_t status;   // as waitpid gives it; for -1, an errno
    int64_t number;   // the system call at which it was killed
    int32_t at_entry;
    int32_t thread;   // in the order of their appearance, from 0
};

namespace {

std::string the_log;

class Tracer {
  public:
    Tracer(pid_t pid, const Plan &plan, Result *result)
        : pid_(pid), plan_(plan), root_(plan.root), result_(result), deadline_(now() + plan.seconds) {
        the_log.clear();
    }

    void run() {
        for (;;) {
            int status = 0;
            const pid_t thread = waitpid(-pid_, &status, __WALL | WNOHANG);
            if (thread < 0) return;  // all are gone
            if (thread == 0) {
                if (now() > deadline_) kill_all(2);
                rest();
            } else if (WIFSTOPPED(status)) {
                stopped(thread, status);
            } else {
                threads_.erase(thread);
                if (thread == pid_) result_->status = status;
            }
        }
    }

  private:
    // Until a traced thread changes its state. Not much longer than that even where the signal got lost.
    static void rest() {
        sigset_t child;
        sigemptyset(&child);
        sigaddset(&child, SIGCHLD);
        const timespec most{0, 20'000'000};
        sigtimedwait(&child, nullptr, &most);
    }

    void kill_all(int outcome) {
        if (result_->outcome == 0) result_->outcome = outcome;
        kill(-pid_, SIGKILL);
    }

    void stopped(pid_t id, int status) {
        if (threads_.count(id) == 0) threads_[id].order = appeared_++;
        Thread &thread = threads_[id];
        int signal = WSTOPSIG(status);
        if (signal == (SIGTRAP | 0x80)) {
            system_call(id, thread);
            signal = 0;
        } else if (status >> 16) {
            signal = 0;  // news of a clone, fork or exec
        } else if (signal == SIGSTOP && !thread.started) {
            signal = 0;
        }
        thread.started = true;
        ptrace(PTRACE_SYSCALL, id, nullptr, signal);
    }

    void system_call(pid_t id, Thread &thread) {
        if (result_->outcome) return;
        __ptrace_syscall_info info{};
        if (ptrace(PTRACE_GET_SYSCALL_INFO, id, sizeof info, &info) <= 0) return;
        const int64_t point = ++result_->points;
        const bool entry = info.op == PTRACE_SYSCALL_INFO_ENTRY;
        if (entry) {
            number_ = int64_t(info.entry.nr);
            thread.call = Call();
            if (!root_.empty()) begin(id, thread.call, info, point);
        }
        // Also of a call at whose end the process is killed: it has taken place.
        if (!entry && thread.call.spec) end(id, thread, info, point);
        if (point == plan_.kill_at) {
            result_->number = number_;
            result_->at_entry = entry;
            result_->thread = thread.order;
            kill_all(1);
        }
    }

    void begin(pid_t id, Call &call, const __ptrace_syscall_info &info, int64_t point) {
        const Spec *spec = find_spec(long(info.entry.nr));
        if (!spec) return;
        for (int i = 0; i < 6; i++) call.args[i] = info.entry.args[i];
        const auto path_at = [&](int dir, int path) {
            return resolve(id, dir < 0 ? AT_FDCWD : int(call.args[dir]), read_string(id, call.args[path]));
        };
        if (spec->fd >= 0) {
            const int fd = int(call.args[spec->fd]);
            if (fd < 0) return;
            call.path = link_target(of_process(id, "fd/" + std::to_string(fd)));
        } else {
            call.path = path_at(spec->dir, spec->path);
            if (spec->path2 >= 0) call.path2 = path_at(spec->dir2, spec->path2);
        }
        if (!below_root(call.path) && !below_root(call.path2)) return;
        call.spec = spec;
        call.index = ++result_->calls;
        call.entry = point;
        if (plan_.log && spec->data >= 0) {
            call.data = written(id, call);
            call.offset = position(id, int(call.args[0]));
        }
        const bool chosen = call.index >= plan_.fail_from && call.index <= plan_.fail_to;
        if (chosen && strstr(plan_.failing, ("|" + std::string(spec->name) + "|").c_str())) {
            call.fails = true;
            skip_call(id);
        }
    }

    void end(pid_t id, const Thread &thread, const __ptrace_syscall_info &info, int64_t point) {
        const Call &call = thread.call;
        long value = long(info.exit.rval);
        if (call.fails) {
            value = -plan_.error;
            set_result(id, value);
        }
        if (!plan_.log) return;
        const auto add = [&](const std::string &text) { the_log += text + "\t"; };
        for (const int64_t n : {call.index, call.entry, point, int64_t(thread.order)}) add(std::to_string(n));
        add(call.spec->name);
        add(std::to_string(value));
        add(std::to_string(call.offset));
        for (const uint64_t argument : call.args) add(std::to_string(int64_t(argument)));
        add(hex(call.path));
        add(hex(call.path2));
        the_log += hex(call.data) + "\n";
    }

    bool below_root(const std::string &path) const {
        return path.compare(0, root_.size(), root_) == 0 && (path.size() == root_.size() || path[root_.size()] == '/');
    }

    const pid_t pid_;
    const Plan plan_;
    const std::string root_;
    Result *const result_;
    const double deadline_;
    std::map<pid_t, Thread> threads_;
    int appeared_ = 0;
    int64_t number_ = 0;
};

}  // namespace

// In the child, before what is to be traced: stops until the tracer has taken over. Returns 0, or an errno.
TRACER_EXPORT int tracer_begin() {
    // A process group of its own, so that the tracer waits for the child's threads and for nobody else's.
    if (setpgid(0, 0) || ptrace(PTRACE_TRACEME, 0, nullptr, nullptr)) return errno;
    raise(SIGSTOP);
    return 0;
}

// Runs a child that has called tracer_begin() to its end. What it started ends with it.
TRACER_EXPORT void tracer_run(pid_t pid, const Plan *plan, Result *result) {
    *result = Result();
    sigset_t child, before;
    sigemptyset(&child);
    sigaddset(&child, SIGCHLD);
    pthread_sigmask(SIG_BLOCK, &child, &before);
    setpgid(pid, pid);  // whoever comes first, so that waitpid below knows the group
    int status = 0;
    const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_TRACECLONE | PTRACE_O_TRACEFORK | PTRACE_O_TRACEVFORK |
                         PTRACE_O_TRACEEXEC | PTRACE_O_EXITKILL;
    pid_t waited;
    do {
        waited = waitpid(pid, &status, __WALL);
    } while (waited < 0 && errno == EINTR);
    if (waited != pid || !WIFSTOPPED(status) || ptrace(PTRACE_SETOPTIONS, pid, nullptr, options)) {
        result->outcome = -1;
        result->status = WIFEXITED(status) ? WEXITSTATUS(status) : errno;
        kill(pid, SIGKILL);
        while (waitpid(pid, &status, __WALL) < 0 && errno == EINTR) {
        }
    } else {
        Tracer tracer(pid, *plan, result);
        ptrace(PTRACE_SYSCALL, pid, nullptr, 0);
        tracer.run();
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

// The log of the last run: a line for each numbered call, in the order in which they ended.
TRACER_EXPORT const char *tracer_log(size_t *bytes) {
    *bytes = the_log.size();
    return the_log.data();
}
