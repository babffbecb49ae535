// A granted segment, which is mapped read-only and contiguously, and which follows the watermark.
#pragma once

#include <cstdint>
#include <memory>

#include "clock.h"
#include "futex.h"
#include "thaw/segment_v1.h"

namespace thaw {

// The reserved address space [address, address + n_bytes), which is unmapped with the object.
class Region {
   public:
    Region(uint64_t n_bytes, uint64_t alignment);
    ~Region();
    Region(const Region &) = delete;
    Region &operator=(const Region &) = delete;

    // Maps n_bytes of fd read-only over [at, at + n_bytes).  Throws Fault if the file is shorter, because a read behind
    // its end would kill the process.
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
    // The current end of the bytes that have arrived.
    uint64_t end() { return look().end; }
    // Sleeps until [0, end) has arrived, and returns the current end.  `stop` ends the wait like close() does.
    uint64_t wait(uint64_t end, const Deadline &deadline, const Bell *stop = nullptr);
    void failure(thaw_failure *failure) const;
    void close() { closed_.ring(); }

   private:
    PageLook look();

    uint64_t n_bytes_;
    Region page_;
    Region slabs_;
    std::atomic<uint64_t> seen_{0};  // the largest end that was seen; it never decreases
    Bell closed_;
};

}  // namespace thaw
