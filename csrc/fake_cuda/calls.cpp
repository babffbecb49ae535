// A strict libcuda.so.1 on host memory: it has the calls that the parameter manager uses, and enforces the driver's
// rules.  Streams are threads that do their work late.  The driver may tolerate misuse, or corrupt a result somewhere
// else; this library ends the process with a sentence instead.
//
//   context   a call on a thread without the current context aborts; so does a call after a fork
//   memory    device memory is poisoned; an operation checks bounds when it runs; freeing memory in use aborts
//   copies    host memory must be pinned; read-only registrations cannot be written
//   events    waiting for an event that was never recorded aborts (the driver would not wait at all)
#include <dlfcn.h>
#include <stdio.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <string>
#include <thread>

#include "rules.h"

#define CALL extern "C" __attribute__((visibility("default")))

using namespace fake_cuda;

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
