// Deadlines on CLOCK_MONOTONIC, the clock of heartbeats.
#pragma once

#include <time.h>

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace thaw {

inline int64_t now_ns() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return int64_t(t.tv_sec) * 1'000'000'000 + t.tv_nsec;
}

class Deadline {
   public:
    explicit Deadline(int64_t timeout_ns) : timeout_ns_(timeout_ns < 0 ? 0 : timeout_ns) {
        const int64_t now = now_ns();
        at_ns_ = timeout_ns_ > kForever - now ? kForever : now + timeout_ns_;
    }
    int64_t left_ns() const { return at_ns_ - now_ns(); }
    double seconds() const { return double(timeout_ns_) / 1e9; }

    // Returns false if the deadline has passed and `done` still does not hold.
    template <typename Done>
    bool wait(std::condition_variable &changed, std::unique_lock<std::mutex> &lock, Done done) const {
        const auto at = std::chrono::steady_clock::time_point(std::chrono::nanoseconds(at_ns_));
        return changed.wait_until(lock, at, done);
    }

   private:
    static constexpr int64_t kForever = INT64_MAX / 2;  // arithmetic with it cannot overflow
    int64_t timeout_ns_, at_ns_;
};

}  // namespace thaw
