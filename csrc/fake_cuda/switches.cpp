#include <mutex>

#include "fake_cuda.h"
#include "rules.h"

using fake_cuda::World;
using fake_cuda::world;

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
