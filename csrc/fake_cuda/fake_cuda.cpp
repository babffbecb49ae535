// A strict libcuda.so.1 on host memory: it has the calls that the parameter manager uses, and enforces the driver's
// rules.  Streams are threads that do their work late.  The driver may tolerate misuse, or corrupt a result somewhere
// else; this library ends the process with a sentence instead.
//
//   context   a call on a thread without the current context aborts; so does a call after a fork
//   memory    device memory is poisoned; an operation checks bounds when it runs; freeing memory in use aborts
//   copies    host memory must be pinned; read-only registrations cannot be written
//   events    waiting for an event that was never recorded aborts (the driver would not wait at all)
#include "fake_cuda.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define CALL extern "C" __attribute__((visibility("default")))

namespace {

using Result = int;
using Pointer = unsigned long long;

constexpr Result kSuccess = 0, kInvalidValue = 1, kOutOfMemory = 2, kNoDevice = 100, kInvalidDevice = 101;
constexpr Result kAlreadyRegistered = 712, kNotSupported = 801, kNotReady = 600;
constexpr unsigned char kPoison = 0xA5;
constexpr int kDriverVersion = 13000;
constexpr size_t kDeviceBytes = 4ull << 30;

__attribute__((format(printf, 1, 2))) [[noreturn]] void misuse(const char *pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    fputs("fake libcuda: ", stderr);
    vfprintf(stderr, pattern, arguments);
    fputs("\n", stderr);
    abort();
}

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

World &world() {
    static World *made = new World;  // never destroyed: worker threads may outlive the statics
    return *made;
}

char context_object;  // its address is the primary context
thread_local std::vector<void *> context_stack{nullptr};

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
    void run() {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            changed.wait(lock, [&] { return closing || !ops.empty(); });
            if (ops.empty()) return;
            const auto op = std::move(ops.front());
            ops.pop_front();
            busy = true;
            lock.unlock();
            int delay_us;
            {
                const std::lock_guard<std::mutex> of_world(world().mutex);
                delay_us = world().delay_us;
            }
            if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
            op();
            lock.lock();
            busy = false;
            changed.notify_all();
        }
    }

    const int priority;
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> ops;
    bool busy = false, closing = false;
    int64_t queued = 0;  // bytes; under the world's lock
    std::thread worker;
};

// Checks a call: fault injection must let it through, and the driver must be initialised.
Result enter(const char *call) {
    World &w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    if (w.initialised && w.pid != getpid()) misuse("%s after a fork: the child has no context", call);
    if (!w.initialised && strcmp(call, "cuInit") != 0) misuse("%s before cuInit", call);
    const int n = ++w.calls[call];
    if (const auto always = w.fail_always.find(call); always != w.fail_always.end()) return always->second;
    const auto at = w.fail_at.find(call);
    return at != w.fail_at.end() && at->second.first == n ? at->second.second : kSuccess;
}

// Does the same for calls that work on the current context.
Result enter_context(const char *call) {
    if (context_stack.back() != &context_object) misuse("%s on a thread without the context", call);
    const Result result = enter(call);
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (world().context_uses == 0) misuse("%s in a context that was released", call);
    return result;
}

#define ENTER(call) \
    if (const Result injected = enter(call); injected != kSuccess) return injected
#define ENTER_CONTEXT(call) \
    if (const Result injected = enter_context(call); injected != kSuccess) return injected

Stream *checked(void *stream, const char *call) {
    static Stream *default_stream = new Stream(0);  // NULL is the legacy default stream
    if (stream == nullptr) return default_stream;
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (world().streams.count(static_cast<Stream *>(stream)) == 0) misuse("%s on a stream that is none", call);
    return static_cast<Stream *>(stream);
}

std::shared_ptr<EventState> checked_event(void *event, const char *call) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    const auto found = world().events.find(event);
    if (found == world().events.end()) misuse("%s of an event that is none, or was destroyed", call);
    return found->second;
}

// The allocation that contains [at, at + n), or null.  The caller has locked the world.
Allocation *holder(std::map<char *, Allocation> &in, char *at, size_t n) {
    auto found = in.upper_bound(at);
    if (found == in.begin()) return nullptr;
    --found;
    return at + n <= found->first + found->second.n_bytes ? &found->second : nullptr;
}

Result copy(const char *call, void *to, const void *from, size_t n, void *stream_handle, bool to_device) {
    Stream *stream = checked(stream_handle, call);
    auto *device = static_cast<char *>(to_device ? to : const_cast<void *>(from));
    auto *host = static_cast<char *>(to_device ? const_cast<void *>(from) : to);
    World &w = world();
    const auto held = [&w, call, device, host, n, to_device] {
        Allocation *d = holder(w.device, device, n);
        if (d == nullptr) misuse("%s of %zu bytes outside device memory, or freed", call, n);
        Allocation *h = holder(w.pinned_own, host, n);
        if (h == nullptr) h = holder(w.pinned_registered, host, n);
        if (h == nullptr) misuse("%s of %zu bytes of host memory that is not pinned", call, n);
        if (!to_device && !h->writable) misuse("%s into memory registered read-only", call);
        return std::make_pair(d, h);
    };
    {
        const std::lock_guard<std::mutex> lock(w.mutex);
        const auto [d, h] = held();
        d->in_use++, h->in_use++;
        stream->queued += int64_t(n);
        w.most_queued = std::max(w.most_queued, stream->queued);
    }
    stream->add([&w, held, to, from, n, to_device, stream] {
        {
            const std::lock_guard<std::mutex> lock(w.mutex);
            held();
            w.log.emplace_back(stream->priority, to_device ? int64_t(n) : -int64_t(n));
        }
        memcpy(to, from, n);
        const std::lock_guard<std::mutex> lock(w.mutex);
        const auto [d, h] = held();
        d->in_use--, h->in_use--;
        stream->queued -= int64_t(n);
    });
    return kSuccess;
}

bool is_writable(const void *at) {
    FILE *maps = fopen("/proc/self/maps", "re");
    char line[512];
    bool writable = false;
    while (maps != nullptr && fgets(line, sizeof line, maps) != nullptr) {
        unsigned long begin, end;
        char mode[8];
        if (sscanf(line, "%lx-%lx %7s", &begin, &end, mode) == 3 && reinterpret_cast<unsigned long>(at) >= begin &&
            reinterpret_cast<unsigned long>(at) < end)
            writable = mode[1] == 'w';
    }
    if (maps != nullptr) fclose(maps);
    return writable;
}

}  // namespace

// ── the driver's calls ───────────────────────────────────────────────────────────────────────────────────────────

CALL Result cuInit(unsigned flags) {
    ENTER("cuInit");
    if (flags != 0) return kInvalidValue;
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().initialised = true;
    world().pid = getpid();
    return kSuccess;
}

CALL Result cuDriverGetVersion(int *version) {
    *version = kDriverVersion;
    return kSuccess;
}

CALL Result cuGetErrorName(Result result, const char **name) {
    switch (result) {
        case kInvalidValue: *name = "CUDA_ERROR_INVALID_VALUE"; return kSuccess;
        case kOutOfMemory: *name = "CUDA_ERROR_OUT_OF_MEMORY"; return kSuccess;
        case kNoDevice: *name = "CUDA_ERROR_NO_DEVICE"; return kSuccess;
        case 700: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; return kSuccess;
        default: *name = nullptr; return kInvalidValue;
    }
}

CALL Result cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    *device = ordinal;
    return ordinal == 0 ? kSuccess : kInvalidDevice;
}

CALL Result cuDeviceGetName(char *name, int n, int) {
    ENTER("cuDeviceGetName");
    snprintf(name, size_t(n), "fake device (host memory)");
    return kSuccess;
}

CALL Result cuDeviceGetAttribute(int *value, int attribute, int) {
    ENTER("cuDeviceGetAttribute");
    constexpr int kReadOnlyHostRegisterSupported = 113;
    const std::lock_guard<std::mutex> lock(world().mutex);
    *value = attribute == kReadOnlyHostRegisterSupported && world().read_only_register;
    return kSuccess;
}

CALL Result cuDevicePrimaryCtxRetain(void **context, int) {
    ENTER("cuDevicePrimaryCtxRetain");
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().context_uses++;
    *context = &context_object;
    return kSuccess;
}

CALL Result cuDevicePrimaryCtxRelease(int) {
    ENTER("cuDevicePrimaryCtxRelease");
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (world().context_uses == 0) misuse("the primary context was released more often than retained");
    world().context_uses--;
    return kSuccess;
}

CALL Result cuCtxSetCurrent(void *context) {
    ENTER("cuCtxSetCurrent");
    if (context != nullptr && context != &context_object) misuse("cuCtxSetCurrent of a context that is none");
    context_stack.back() = context;
    return kSuccess;
}

CALL Result cuCtxGetCurrent(void **context) {
    ENTER("cuCtxGetCurrent");
    *context = context_stack.back();
    return kSuccess;
}

CALL Result cuCtxPushCurrent(void *context) {
    ENTER("cuCtxPushCurrent");
    if (context != &context_object) misuse("cuCtxPushCurrent of a context that is none");
    context_stack.push_back(context);
    return kSuccess;
}

CALL Result cuCtxPopCurrent(void **context) {
    ENTER("cuCtxPopCurrent");
    if (context_stack.size() == 1) misuse("cuCtxPopCurrent without a push on this thread");
    *context = context_stack.back();
    context_stack.pop_back();
    return kSuccess;
}

CALL Result cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_CONTEXT("cuCtxGetStreamPriorityRange");
    *least = 0, *greatest = -5;
    return kSuccess;
}

CALL Result cuStreamCreateWithPriority(void **stream, unsigned, int priority) {
    ENTER_CONTEXT("cuStreamCreateWithPriority");
    auto *made = new Stream(priority);
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().streams.insert(made);
    *stream = made;
    return kSuccess;
}

CALL Result cuStreamDestroy_v2(void *handle) {
    ENTER_CONTEXT("cuStreamDestroy");
    Stream *stream = checked(handle, "cuStreamDestroy");
    stream->end();
    {
        const std::lock_guard<std::mutex> lock(world().mutex);
        world().streams.erase(stream);
    }
    delete stream;
    return kSuccess;
}

CALL Result cuStreamSynchronize(void *stream) {
    ENTER_CONTEXT("cuStreamSynchronize");
    checked(stream, "cuStreamSynchronize")->drain();
    return kSuccess;
}

CALL Result cuStreamWaitEvent(void *stream, void *event, unsigned) {
    ENTER_CONTEXT("cuStreamWaitEvent");
    const auto state = checked_event(event, "cuStreamWaitEvent");
    uint64_t wanted;
    {
        const std::lock_guard<std::mutex> lock(state->mutex);
        wanted = state->recorded;
    }
    if (wanted == 0) misuse("cuStreamWaitEvent of an event that was never recorded: nothing would be waited for");
    checked(stream, "cuStreamWaitEvent")->add([state, wanted] {
        std::unique_lock<std::mutex> lock(state->mutex);
        state->changed.wait(lock, [&] { return state->completed >= wanted; });
    });
    return kSuccess;
}

CALL Result cuEventCreate(void **event, unsigned) {
    ENTER_CONTEXT("cuEventCreate");
    auto state = std::make_shared<EventState>();
    const std::lock_guard<std::mutex> lock(world().mutex);
    *event = state.get();
    world().events[*event] = std::move(state);
    return kSuccess;
}

CALL Result cuEventRecord(void *event, void *stream) {
    ENTER_CONTEXT("cuEventRecord");
    const auto state = checked_event(event, "cuEventRecord");
    uint64_t number;
    {
        const std::lock_guard<std::mutex> lock(state->mutex);
        number = ++state->recorded;
    }
    checked(stream, "cuEventRecord")->add([state, number] {
        const std::lock_guard<std::mutex> lock(state->mutex);
        state->completed = number;
        state->at = std::chrono::steady_clock::now();
        state->changed.notify_all();
    });
    return kSuccess;
}

CALL Result cuEventSynchronize(void *event) {
    ENTER_CONTEXT("cuEventSynchronize");
    const auto state = checked_event(event, "cuEventSynchronize");
    std::unique_lock<std::mutex> lock(state->mutex);
    if (state->recorded == 0) misuse("cuEventSynchronize of an event that was never recorded");
    const uint64_t wanted = state->recorded;
    state->changed.wait(lock, [&] { return state->completed >= wanted; });
    return kSuccess;
}

CALL Result cuEventElapsedTime(float *ms, void *first, void *second) {
    ENTER_CONTEXT("cuEventElapsedTime");
    const auto a = checked_event(first, "cuEventElapsedTime"), b = checked_event(second, "cuEventElapsedTime");
    const std::scoped_lock lock(a->mutex, b->mutex);
    if (a->completed < a->recorded || b->completed < b->recorded) return kNotReady;
    *ms = std::chrono::duration<float, std::milli>(b->at - a->at).count();
    return kSuccess;
}

CALL Result cuEventDestroy_v2(void *event) {
    ENTER_CONTEXT("cuEventDestroy");
    const auto state = checked_event(event, "cuEventDestroy");
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().events.erase(event);
    return kSuccess;
}

CALL Result cuMemGetInfo_v2(size_t *free_bytes, size_t *total) {
    ENTER_CONTEXT("cuMemGetInfo");
    const std::lock_guard<std::mutex> lock(world().mutex);
    *total = kDeviceBytes, *free_bytes = kDeviceBytes - world().device_bytes;
    return kSuccess;
}

CALL Result cuMemAlloc_v2(Pointer *pointer, size_t n) {
    ENTER_CONTEXT("cuMemAlloc");
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (n == 0) return kInvalidValue;
    if (world().device_bytes + n > kDeviceBytes) return kOutOfMemory;
    constexpr size_t kAlignment = 256;
    auto *memory = static_cast<char *>(aligned_alloc(kAlignment, (n + kAlignment - 1) / kAlignment * kAlignment));
    if (memory == nullptr) return kOutOfMemory;
    memset(memory, kPoison, n);
    world().device[memory] = {n};
    world().device_bytes += n;
    *pointer = reinterpret_cast<Pointer>(memory);
    return kSuccess;
}

CALL Result cuMemFree_v2(Pointer pointer) {
    ENTER_CONTEXT("cuMemFree");
    int delay_us;
    {
        const std::lock_guard<std::mutex> lock(world().mutex);
        delay_us = world().free_delay_us;
    }
    if (delay_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay_us));
    const std::lock_guard<std::mutex> lock(world().mutex);
    const auto found = world().device.find(reinterpret_cast<char *>(pointer));
    if (found == world().device.end()) misuse("cuMemFree of what is no allocation, or twice");
    if (found->second.in_use > 0) misuse("cuMemFree while a copy still uses the memory");
    world().device_bytes -= found->second.n_bytes;
    memset(found->first, kPoison, found->second.n_bytes);
    free(found->first);
    world().device.erase(found);
    return kSuccess;
}

CALL Result cuMemHostAlloc(void **pointer, size_t n, unsigned) {
    ENTER_CONTEXT("cuMemHostAlloc");
    const std::lock_guard<std::mutex> lock(world().mutex);
    *pointer = malloc(n);
    memset(*pointer, kPoison, n);
    world().pinned_own[static_cast<char *>(*pointer)] = {n};
    return kSuccess;
}

CALL Result cuMemFreeHost(void *pointer) {
    ENTER_CONTEXT("cuMemFreeHost");
    const std::lock_guard<std::mutex> lock(world().mutex);
    const auto found = world().pinned_own.find(static_cast<char *>(pointer));
    if (found == world().pinned_own.end()) misuse("cuMemFreeHost of what is no allocation, or twice");
    if (found->second.in_use > 0) misuse("cuMemFreeHost while a copy still uses the memory");
    free(pointer);
    world().pinned_own.erase(found);
    return kSuccess;
}

CALL Result cuMemHostRegister_v2(void *pointer, size_t n, unsigned flags) {
    ENTER_CONTEXT("cuMemHostRegister");
    constexpr unsigned kReadOnly = 0x08;
    constexpr size_t kPage = 4096;
    auto *at = static_cast<char *>(pointer);
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (n == 0 || reinterpret_cast<uintptr_t>(at) % kPage != 0 || n % kPage != 0) misuse("registering half a page");
    if ((flags & kReadOnly) != 0 && !world().read_only_register) return kNotSupported;
    if ((flags & kReadOnly) == 0 && !is_writable(at)) return kInvalidValue;
    for (const auto &[begin, known] : world().pinned_registered)
        if (at < begin + known.n_bytes && begin < at + n) return kAlreadyRegistered;
    world().pinned_registered[at] = {n, 0, (flags & kReadOnly) == 0};
    return kSuccess;
}

CALL Result cuMemHostUnregister(void *pointer) {
    ENTER_CONTEXT("cuMemHostUnregister");
    const std::lock_guard<std::mutex> lock(world().mutex);
    const auto found = world().pinned_registered.find(static_cast<char *>(pointer));
    if (found == world().pinned_registered.end()) misuse("cuMemHostUnregister of what was not registered");
    if (found->second.in_use > 0) misuse("cuMemHostUnregister while a copy still uses the memory");
    world().pinned_registered.erase(found);
    return kSuccess;
}

CALL Result cuMemcpyHtoDAsync_v2(Pointer to, const void *from, size_t n, void *stream) {
    ENTER_CONTEXT("cuMemcpyHtoDAsync");
    return copy("cuMemcpyHtoDAsync", reinterpret_cast<void *>(to), from, n, stream, true);
}

CALL Result cuMemcpyDtoHAsync_v2(void *to, Pointer from, size_t n, void *stream) {
    ENTER_CONTEXT("cuMemcpyDtoHAsync");
    return copy("cuMemcpyDtoHAsync", to, reinterpret_cast<const void *>(from), n, stream, false);
}

CALL Result cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t, int *status) {
    // As in the driver, the base name with an old version returns the variant of that version.
    static void *self = [] {
        Dl_info info;
        return dladdr(reinterpret_cast<void *>(&cuGetProcAddress_v2), &info) != 0
                   ? dlopen(info.dli_fname, RTLD_NOW | RTLD_NOLOAD)
                   : nullptr;
    }();
    *function = nullptr;
    if (status != nullptr) *status = 1;  // not found
    {
        const std::lock_guard<std::mutex> lock(world().mutex);
        if (world().fail_always.count(std::string("missing ") + symbol) != 0) return kNoDevice;
    }
    if (version > kDriverVersion) return kInvalidValue;
    *function = dlsym(self, (std::string(symbol) + "_v2").c_str());
    if (*function == nullptr) *function = dlsym(self, symbol);
    if (*function == nullptr) return 500;  // CUDA_ERROR_NOT_FOUND
    if (status != nullptr) *status = 0;
    return kSuccess;
}

// ── the switches ─────────────────────────────────────────────────────────────────────────────────────────────────

void fake_cuda_delay_us(int delay_us) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().delay_us = delay_us;
}

void fake_cuda_free_delay_us(int delay_us) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().free_delay_us = delay_us;
}

void fake_cuda_fail(const char *call, int nth, int result) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().calls[call] = 0;
    if (nth == 0)
        world().fail_at.erase(call);
    else
        world().fail_at[call] = {nth, result};
}

void fake_cuda_fail_always(const char *call, int result) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (result == 0)
        world().fail_always.erase(call);
    else
        world().fail_always[call] = result;
}

void fake_cuda_read_only_register(int supported) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    world().read_only_register = supported != 0;
}

FakeCudaLeaks fake_cuda_leaks(void) {
    World &w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    return {w.context_uses, int(w.streams.size()), int(w.events.size()), int(w.device.size()),
            int(w.pinned_own.size()), int(w.pinned_registered.size())};
}

int fake_cuda_log_size(void) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    return int(world().log.size());
}

void fake_cuda_log_at(int i, int *priority, int64_t *n_bytes) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    *priority = world().log[size_t(i)].first;
    *n_bytes = world().log[size_t(i)].second;
}

int64_t fake_cuda_most_queued(void) {
    const std::lock_guard<std::mutex> lock(world().mutex);
    return world().most_queued;
}

void fake_cuda_reset(void) {
    World &w = world();
    const std::lock_guard<std::mutex> lock(w.mutex);
    w.most_queued = 0;
    w.log.clear(), w.fail_at.clear(), w.fail_always.clear(), w.calls.clear();
    w.delay_us = w.free_delay_us = 0, w.read_only_register = true;
}
