// Sleep on a word of fetchd's page and on words of this process at the same time.
#pragma once

#include <atomic>
#include <cstdint>
#include <initializer_list>

namespace thaw {

// A word of this process that ends all sleeps on it when it is rung.
class Bell {
   public:
    void ring();
    bool rung() const { return word_.load(std::memory_order_acquire) != 0; }
    const void *word() const { return &word_; }

   private:
    std::atomic<uint32_t> word_{0};
};

// Sleeps until *shared differs from `seen`, a bell has rung, or timeout_ns has passed.  It may also return for no
// reason, so the caller must check again.  If the kernel cannot wait on several words (before Linux 5.16), a bell is
// noticed only when the timeout has passed.
void sleep_on(const uint32_t *shared, uint32_t seen, std::initializer_list<const Bell *> bells, int64_t timeout_ns);

}  // namespace thaw
