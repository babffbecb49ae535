// A handle to wait for a group of copies.
#pragma once

#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>

#include "clock.h"
#include "cuda_api.h"
#include "thaw/fault.h"

namespace thaw {

// queued → issued (its event is recorded: streams can wait for it) → ended.  The fault of a piece is reported only at
// the end, because until then another piece may still be writing to the caller's buffer.
class Ticket {
   public:
    using Discard = std::function<void(cuda::Event)>;

    explicit Ticket(Discard discard = {}) : discard_(std::move(discard)) {}
    ~Ticket() {
        if (event_ != nullptr) discard_(event_);
    }
    Ticket(const Ticket &) = delete;
    Ticket &operator=(const Ticket &) = delete;

    // From now on, the ticket owns the event.
    void issued(cuda::Event event) {
        const std::lock_guard<std::mutex> lock(mutex_);
        event_ = event;
        changed_.notify_all();
    }
    void note(const Fault &fault) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (status_ == THAW_OK) status_ = fault.status, message_ = fault.message;
    }
    void finish() {
        const std::lock_guard<std::mutex> lock(mutex_);
        ended_ = true;
        changed_.notify_all();
    }

    void wait_done(const Deadline &deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!deadline.wait(changed_, lock, [&] { return ended_; })) timed_out(deadline);
        rethrow();
    }
    // The event to wait for; null when all copies have already ended.
    cuda::Event wait_issued(const Deadline &deadline) {
        std::unique_lock<std::mutex> lock(mutex_);
        if (!deadline.wait(changed_, lock, [&] { return ended_ || event_ != nullptr; })) timed_out(deadline);
        rethrow();
        return ended_ ? nullptr : event_;
    }
    void wait_ended() {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] { return ended_; });
    }

   private:
    void rethrow() const {
        if (status_ != THAW_OK) throw Fault(status_, message_);
    }
    [[noreturn]] static void timed_out(const Deadline &deadline) {
        throw Fault(THAW_TIMED_OUT, format("the copy was not done after %g s", deadline.seconds()));
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    thaw_status status_ = THAW_OK;
    std::string message_;
    cuda::Event event_ = nullptr;
    Discard discard_;
};

}  // namespace thaw
