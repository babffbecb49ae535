// Sleeping on a word of fetchd's page and on words of our own at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>

namespace thaw {

// A word of this process that ends sleeps once it is raised.
class Bell {
   public:
    void ring();
    bool rung() const { return word_.load(std::memory_order_acquire) != 0; }
    const void *word() const { return &word_; }

   private:
    std::atomic<uint32_t> word_{0};
};

// Until *shared differs from `seen`, a bell has rung, or timeout_ns is over; or for no reason: look again.  Where the
// kernel cannot wait on several words (before Linux 5.16) a bell is heard when the timeout is over.
void sleep_on(const uint32_t *shared, uint32_t seen, std::initializer_list<const Bell *> bells, int64_t timeout_ns);

}  // namespace thaw
