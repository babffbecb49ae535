// How tests use the fake driver: its switches, its memory, and an engine's stream.
#pragma once

#include <stdint.h>

#include <string>

#include "../fake_cuda/fake_cuda.h"
#include "thaw/params.h"

namespace thaw_test {

struct Fake {
    void (*delay_us)(int);
    void (*free_delay_us)(int);
    void (*fail)(const char *, int, int);
    void (*fail_always)(const char *, int);
    void (*read_only_register)(int);
    FakeCudaLeaks (*leaks)();
    int (*log_size)();
    void (*log_at)(int, int *, int64_t *);
    int64_t (*most_queued)();
    void (*reset)();

    int (*init)(unsigned), (*retain)(void **, int), (*release)(int);
    int (*push)(void *), (*pop)(void **);
    int (*alloc)(unsigned long long *, size_t), (*free)(unsigned long long);
    int (*host_alloc)(void **, size_t, unsigned), (*host_free)(void *);
    int (*host_register)(void *, size_t, unsigned), (*host_unregister)(void *);
    int (*stream_create)(void **, unsigned, int), (*stream_destroy)(void *), (*stream_synchronize)(void *);
    int (*to_device)(unsigned long long, const void *, size_t, void *);
    int (*to_host)(void *, unsigned long long, size_t, void *);
    int (*event_create)(void **, unsigned), (*event_destroy)(void *), (*stream_wait)(void *, void *, unsigned);
};

Fake &fake();
const char *fake_path();
// Small sizes, so that a few MiB make many pieces.
thaw_device_config small_config();
thaw_device *open_fake(thaw_device_config config);
// Waits until the device's thread has destroyed everything that is pending.
void check_nothing_leaked();

// For tests: makes the primary context current on this thread, for one block.
class InContext {
   public:
    InContext();
    ~InContext();
};

// Memory of a device: the host's own, or the fake's.  The host can read the fake's memory, but not a real device's.
class FakeMemory {
   public:
    static const FakeMemory &on_host();
    static const FakeMemory &on_device();
    uintptr_t allocate(uint64_t n_bytes) const;
    void release(uintptr_t pointer) const;

   private:
    explicit FakeMemory(bool device) : device_(device) {}
    const bool device_;
};

// An engine's stream, in addition to ours.
class FakeStream {
   public:
    FakeStream();
    ~FakeStream();
    uintptr_t handle() const { return reinterpret_cast<uintptr_t>(stream_); }
    void write(uintptr_t device, const std::string &bytes);
    std::string read(uintptr_t device, size_t n_bytes);

   private:
    void *stream_ = nullptr;
    char *pinned_ = nullptr;
    size_t used_ = 0;
};

}  // namespace thaw_test
