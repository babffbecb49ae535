// A granted segment, mapped read-only and contiguously; follows the watermark.
#pragma once

#include <cstdint>
#include <memory>

#include "clock.h"
#include "futex.h"
#include "thaw/segment_v1.h"

namespace thaw {

// [address, address + n_bytes) of reserved address space, unmapped with the object.
class Region {
   public:
    Region(uint64_t n_bytes, uint64_t alignment);
    ~Region();
    Region(const Region &) = delete;
    Region &operator=(const Region &) = delete;

    // Lays n_bytes of fd over [at, at + n_bytes), read-only.  The file must be that long: reading behind its end kills.
    void map(uint64_t at, int fd, uint64_t n_bytes);
    char *address() const { return address_; }

   private:
    void *reserved_;
    uint64_t reserved_bytes_;
    char *address_;
};

class Segment {
   public:
    Segment(const int *fds, size_t n_fds, uint64_t n_bytes, uint64_t slab_bytes);

    uint64_t n_bytes() const { return n_bytes_; }
    const char *at(uint64_t offset) const { return slabs_.address() + offset; }
    // What has arrived by now.
    uint64_t end() { return look().end; }
    // Sleeps until [0, end) has arrived; the end there is then.  `stop` ends it as close() does.
    uint64_t wait(uint64_t end, const Deadline &deadline, const Bell *stop = nullptr);
    void failure(thaw_failure *failure) const;
    void close() { closed_.ring(); }

   private:
    PageLook look();

    uint64_t n_bytes_;
    Region page_;
    Region slabs_;
    std::atomic<uint64_t> seen_{0};  // the largest end seen: it never decreases
    Bell closed_;
};

}  // namespace thaw
