// Switches of the fake driver, besides the calls that it imitates.  Tests find them with dlsym in the same library.
#pragma once

#include <cstdint>

#pragma GCC visibility push(default)

extern "C" {

// Counts of living objects: all are zero after a program has cleaned up.
struct FakeCudaLeaks {
    int contexts, streams, events, device_allocations, host_allocations, registrations;
};

// Every operation on a stream takes this long before it happens.
void fake_cuda_delay_us(int delay_us);
// Every cuMemFree takes this long, like a cuMemFree that waits for the device's work.
void fake_cuda_free_delay_us(int delay_us);
// The nth call (from 1) of `call` ("cuMemAlloc" …) fails with this result; nth 0 removes the fault.
void fake_cuda_fail(const char *call, int nth, int result);
// Every call of `call` returns this result from now on; result 0 removes the fault.
void fake_cuda_fail_always(const char *call, int result);
void fake_cuda_read_only_register(int supported);
FakeCudaLeaks fake_cuda_leaks(void);
// A log of copies on streams of the higher and of the lower priority, in the order in which they were done: its length,
// and one entry (priority, bytes; negative bytes were copied to the host).
int fake_cuda_log_size(void);
void fake_cuda_log_at(int i, int *priority, int64_t *n_bytes);
// The largest number of bytes in copies that ever waited on one stream.
int64_t fake_cuda_most_queued(void);
// Clears the log, the faults and the delays.
void fake_cuda_reset(void);
}

#pragma GCC visibility pop
