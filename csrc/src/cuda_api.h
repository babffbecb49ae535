// The few driver calls that we use, through dlopen("libcuda.so.1") and cuGetProcAddress: CUDA is not needed to build or
// to load the library.
//
// Types and numbers are our own; csrc/tests/cuda_layout_test.cpp compares them with cuda.h if there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace thaw::cuda {

using Result = int;
using Device = int;
using Pointer = unsigned long long;  // CUdeviceptr
struct ContextTag;
struct StreamTag;
struct EventTag;
using Context = ContextTag *;
using Stream = StreamTag *;
using Event = EventTag *;

constexpr Result kSuccess = 0;
constexpr Result kOutOfMemory = 2;
constexpr Result kAlreadyRegistered = 712;
constexpr int kReadOnlyHostRegisterSupported = 113;
constexpr unsigned kHostRegisterPortable = 0x01;
constexpr unsigned kHostRegisterReadOnly = 0x08;
constexpr unsigned kHostAllocPortable = 0x01;
constexpr unsigned kStreamNonBlocking = 0x1;
constexpr unsigned kEventBlockingSync = 0x1;
constexpr unsigned kEventDisableTiming = 0x2;

// Each entry: name, the oldest driver version with this signature, parameters.  Asking for exactly that version avoids
// every suffix (_v2, _v3) and still works when a newer driver changes the default.
#define THAW_CUDA_CALLS(X)                                                    \
    X(Init, 2000, (unsigned flags))                                           \
    X(DriverGetVersion, 2020, (int *version))                                 \
    X(GetErrorName, 6000, (Result result, const char **name))                 \
    X(DeviceGet, 2000, (Device * device, int ordinal))                        \
    X(DeviceGetName, 2000, (char *name, int n, Device device))                \
    X(DeviceGetAttribute, 2000, (int *value, int attribute, Device device))   \
    X(DevicePrimaryCtxRetain, 7000, (Context * context, Device device))       \
    X(DevicePrimaryCtxRelease, 11000, (Device device))                        \
    X(CtxSetCurrent, 4000, (Context context))                                 \
    X(CtxPushCurrent, 4000, (Context context))                                \
    X(CtxPopCurrent, 4000, (Context * context))                               \
    X(CtxGetStreamPriorityRange, 5050, (int *least, int *greatest))           \
    X(StreamCreateWithPriority, 5050, (Stream * stream, unsigned flags, int priority)) \
    X(StreamDestroy, 4000, (Stream stream))                                   \
    X(StreamSynchronize, 2000, (Stream stream))                               \
    X(StreamWaitEvent, 3020, (Stream stream, Event event, unsigned flags))    \
    X(EventCreate, 2000, (Event * event, unsigned flags))                     \
    X(EventRecord, 2000, (Event event, Stream stream))                        \
    X(EventSynchronize, 2000, (Event event))                                  \
    X(EventDestroy, 4000, (Event event))                                      \
    X(MemAlloc, 3020, (Pointer * pointer, size_t n))                          \
    X(MemFree, 3020, (Pointer pointer))                                       \
    X(MemHostAlloc, 2020, (void **pointer, size_t n, unsigned flags))         \
    X(MemFreeHost, 2000, (void *pointer))                                     \
    X(MemHostRegister, 6050, (void *pointer, size_t n, unsigned flags))       \
    X(MemHostUnregister, 4000, (void *pointer))                               \
    X(MemcpyHtoDAsync, 3020, (Pointer to, const void *from, size_t n, Stream stream)) \
    X(MemcpyDtoHAsync, 3020, (void *to, Pointer from, size_t n, Stream stream))

struct Api {
#define THAW_CUDA_MEMBER(name, version, parameters) Result(*name) parameters = nullptr;
    THAW_CUDA_CALLS(THAW_CUDA_MEMBER)
#undef THAW_CUDA_MEMBER

    // Throws Fault(THAW_DEVICE), or THAW_OUT_OF_MEMORY for the device's memory, which names the call and the error.
    void check(Result result, const char *call) const;
    std::string name_of(Result result) const;
};

// The library stays loaded.  Throws Fault(THAW_NO_DEVICE) that says what is missing.
Api load(const char *path);

}  // namespace thaw::cuda
