// Switches of the fake driver, beside the calls it imitates.  Found by dlsym in the same library.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)

extern "C" {

// What is alive: all zero when a program cleaned up behind itself.
struct FakeCudaLeaks {
    int contexts, streams, events, device_allocations, host_allocations, registrations;
};

// Every operation on a stream takes this long before it happens.
void fake_cuda_delay_us(int delay_us);
// Every cuMemFree takes this long, as one does that waits for the device's work.
void fake_cuda_free_delay_us(int delay_us);
// The nth call (from 1) of "cuMemAlloc" … fails with this result; nth 0 forgets it.
void fake_cuda_fail(const char *call, int nth, int result);
// Every result of this call from now on; 0 forgets it.
void fake_cuda_fail_always(const char *call, int result);
void fake_cuda_read_only_register(int supported);
FakeCudaLeaks fake_cuda_leaks(void);
// How many bytes went each way on streams of the higher and of the lower priority, in the order they were done:
// the log's length, and an entry (priority, bytes; negative bytes went to the host).
int fake_cuda_log_size(void);
void fake_cuda_log_at(int i, int *priority, int64_t *n_bytes);
// The most bytes of copies that ever waited on one stream.
int64_t fake_cuda_most_queued(void);
// Forgets the log, the faults and the delays.
void fake_cuda_reset(void);
}

#pragma GCC visibility pop
