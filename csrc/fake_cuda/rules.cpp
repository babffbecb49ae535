#include "rules.h"

#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstring>

namespace fake_cuda {

void misuse(const char *pattern, ...) {
    va_list arguments;
    va_start(arguments, pattern);
    fputs("fake libcuda: ", stderr);
    vfprintf(stderr, pattern, arguments);
    fputs("\n", stderr);
    abort();
}

World &world() {
    static World *made = new World;  // never destroyed: worker threads may outlive the statics
    return *made;
}

char context_object;
thread_local std::vector<void *> context_stack{nullptr};

void Stream::run() {
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

Result enter_context(const char *call) {
    if (context_stack.back() != &context_object) misuse("%s on a thread without the context", call);
    const Result result = enter(call);
    const std::lock_guard<std::mutex> lock(world().mutex);
    if (world().context_uses == 0) misuse("%s in a context that was released", call);
    return result;
}

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

}  // namespace fake_cuda
