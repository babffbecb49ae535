// The state of the fake driver, and the rules that its calls check.
#pragma once

#include <stdlib.h>
#include <sys/types.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace fake_cuda {

using Result = int;
using Pointer = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kInvalidDevice = 101;
constexpr Result kAlreadyRegistered = 712, kNotSupported = 801, kNotReady = 600;
constexpr unsigned char kPoison = 0xA5;
constexpr int kDriverVersion = 13000;
constexpr size_t kDeviceBytes = 4ull << 30;

// Ends the process with a sentence.
__attribute__((format(printf, 1, 2))) [[noreturn]] void misuse(const char *pattern, ...);

struct EventState {
    std::mutex mutex;
    std::condition_variable changed;
    uint64_t recorded = 0, completed = 0;  // how many times
    std::chrono::steady_clock::time_point at;
};

struct Allocation {
    size_t n_bytes;
    int in_use = 0;  // the number of pending operations
    bool writable = true;
};

struct Stream;

// Everything that can leak, protected by one lock.
struct World {
    std::mutex mutex;
    bool initialised = false;
    pid_t pid = 0;
    int context_uses = 0;
    std::set<Stream *> streams;
    std::map<void *, std::shared_ptr<EventState>> events;
    std::map<char *, Allocation> device;  // by address, which is a host address
    std::map<char *, Allocation> pinned_own, pinned_registered;
    size_t device_bytes = 0;
    std::map<std::string, int> calls;
    std::map<std::string, std::pair<int, Result>> fail_at;
    std::map<std::string, Result> fail_always;
    int delay_us = 0, free_delay_us = 0;
    bool read_only_register = true;
    std::vector<std::pair<int, int64_t>> log;
    int64_t most_queued = 0;
};

World &world();

extern char context_object;  // its address is the primary context
extern thread_local std::vector<void *> context_stack;

struct Stream {
    explicit Stream(int p) : priority(p), worker([this] { run(); }) {}

    void add(std::function<void()> op) {
        const std::lock_guard<std::mutex> lock(mutex);
        ops.push_back(std::move(op));
        changed.notify_all();
    }
    void drain() {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [&] { return ops.empty() && !busy; });
    }
    void end() {
        drain();
        {
            const std::lock_guard<std::mutex> lock(mutex);
            closing = true;
            changed.notify_all();
        }
        worker.join();
    }
    void run();

    const int priority;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> ops;
    bool busy = false, closing = false;
    int64_t queued = 0;  // bytes; under the world's lock
    std::thread worker;
};

// Checks a call: fault injection must let it through, and the driver must be initialised.
Result enter(const char *call);

// Does the same for calls that work on the current context.
Result enter_context(const char *call);

Stream *checked(void *stream, const char *call);

std::shared_ptr<EventState> checked_event(void *event, const char *call);

// The allocation that contains [at, at + n), or null.  The caller has locked the world.
Allocation *holder(std::map<char *, Allocation> &in, char *at, size_t n);

Result copy(const char *call, void *to, const void *from, size_t n, void *stream_handle, bool to_device);

bool is_writable(const void *at);

}  // namespace fake_cuda

#define ENTER(call) \
    if (const Result injected = enter(call); injected != kSuccess) return injected
#define ENTER_CONTEXT(call) \
    if (const Result injected = enter_context(call); injected != kSuccess) return injected
