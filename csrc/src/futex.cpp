#include "futex.h"

#include <errno.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <climits>
#include <cstring>

#include "clock.h"
#include "thaw/fault.h"

namespace thaw {

namespace {

constexpr long kFutexWaitv = 449;        // the same number on every architecture
constexpr uint32_t kSharedWord = 0x02;   // FUTEX_32 without the private flag: another process wakes us
constexpr uint32_t kPrivateWord = 0x82;  // FUTEX_32 | FUTEX_PRIVATE_FLAG
constexpr size_t kMostWords = 4;

struct Word {  // struct futex_waitv of linux/futex.h, which older headers do not have
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

std::atomic<bool> waitv_works{true};

timespec timespec_of(int64_t ns) { return {time_t(ns / 1'000'000'000), long(ns % 1'000'000'000)}; }

bool expected(int error) { return error == EAGAIN || error == ETIMEDOUT || error == EINTR; }

}  // namespace

void Bell::ring() {
    word_.store(1, std::memory_order_release);
    syscall(SYS_futex, &word_, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, nullptr, nullptr, 0);
}

void sleep_on(const uint32_t *shared, uint32_t seen, std::initializer_list<const Bell *> bells, int64_t timeout_ns) {
    if (timeout_ns <= 0) return;
    if (waitv_works.load(std::memory_order_relaxed) && bells.size() < kMostWords) {
        Word words[kMostWords] = {{seen, reinterpret_cast<uint64_t>(shared), kSharedWord, 0}};
        unsigned n = 1;
        for (const Bell *bell : bells) words[n++] = {0, reinterpret_cast<uint64_t>(bell->word()), kPrivateWord, 0};
        const timespec at = timespec_of(now_ns() + timeout_ns);
        if (syscall(kFutexWaitv, words, n, 0, &at, CLOCK_MONOTONIC) >= 0 || expected(errno)) return;
        waitv_works.store(false, std::memory_order_relaxed);  // ENOSYS, or a filter does not know the call
    }
    const timespec left = timespec_of(timeout_ns);
    if (syscall(SYS_futex, shared, FUTEX_WAIT, seen, &left, nullptr, 0) != 0 && !expected(errno))
        throw Fault(THAW_SYSTEM, format("futex: %s", strerror(errno)));
}

}  // namespace thaw
