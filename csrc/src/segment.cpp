#include "segment.h"

#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstring>

namespace thaw {

namespace {

constexpr uint64_t kHugePage = 2u << 20;  // a slab may consist of huge pages, which need addresses with this alignment
constexpr uint64_t kMostBytes = 1ull << 46;

uint64_t checked_size(size_t n_fds, uint64_t n_bytes, uint64_t slab_bytes) {
    if (n_fds < 1 || slab_bytes == 0 || slab_bytes % kPageBytes != 0 || slab_bytes > kMostBytes)
        throw Fault(THAW_BAD_SEGMENT, format("%zu descriptors with slabs of %llu bytes are no segment", n_fds,
                                             (unsigned long long)slab_bytes));
    const uint64_t n_slabs = n_fds - 1;
    if (n_slabs > kMostBytes / slab_bytes || n_slabs * slab_bytes < n_bytes)
        throw Fault(THAW_BAD_SEGMENT,
                    format("segment of %llu bytes came with %zu descriptors", (unsigned long long)n_bytes, n_fds));
    return n_slabs * slab_bytes;
}

}  // namespace

Region::Region(uint64_t n_bytes, uint64_t alignment) : reserved_bytes_(n_bytes + alignment) {
    reserved_ = mmap(nullptr, reserved_bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (reserved_ == MAP_FAILED)
        throw Fault(THAW_OUT_OF_MEMORY, format("cannot reserve %llu bytes of address space: %s",
                                               (unsigned long long)reserved_bytes_, strerror(errno)));
    const auto base = reinterpret_cast<uintptr_t>(reserved_);
    address_ = static_cast<char *>(reserved_) + (alignment - base % alignment) % alignment;
}

Region::~Region() { munmap(reserved_, reserved_bytes_); }

void Region::map(uint64_t at, int fd, uint64_t n_bytes) {
    struct stat about;
    if (fstat(fd, &about) != 0) throw Fault(THAW_SYSTEM, format("descriptor %d: %s", fd, strerror(errno)));
    if (about.st_size < 0 || uint64_t(about.st_size) < n_bytes)
        throw Fault(THAW_BAD_SEGMENT, format("descriptor %d has %lld bytes, not %llu", fd, (long long)about.st_size,
                                             (unsigned long long)n_bytes));
    if (mmap(address_ + at, n_bytes, PROT_READ, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED)
        throw Fault(THAW_SYSTEM, format("cannot map descriptor %d: %s", fd, strerror(errno)));
}

Segment::Segment(const int *fds, size_t n_fds, uint64_t n_bytes, uint64_t slab_bytes)
    : n_bytes_(n_bytes), page_(kPageBytes, kPageBytes), slabs_(checked_size(n_fds, n_bytes, slab_bytes), kHugePage) {
    page_.map(0, fds[0], kPageBytes);
    check_page(*reinterpret_cast<const ControlPage *>(page_.address()), n_bytes);
    for (size_t i = 1; i < n_fds; i++) slabs_.map((i - 1) * slab_bytes, fds[i], slab_bytes);
}

PageLook Segment::look() {
    uint64_t least = seen_.load(std::memory_order_acquire);
    const PageLook look = look_at(*reinterpret_cast<const ControlPage *>(page_.address()), n_bytes_, least);
    while (least < look.end && !seen_.compare_exchange_weak(least, look.end)) {
    }
    return look;
}

uint64_t Segment::wait(uint64_t end, const Deadline &deadline, const Bell *stop) {
    if (end > n_bytes_)
        throw Fault(THAW_BAD_ARGUMENT, format("waiting for byte %llu of a segment of %llu bytes",
                                              (unsigned long long)end, (unsigned long long)n_bytes_));
    const auto &page = *reinterpret_cast<const ControlPage *>(page_.address());
    while (true) {
        if (closed_.rung() || (stop != nullptr && stop->rung())) throw Fault(THAW_CLOSED, "the segment was closed");
        const PageLook now = look();
        if (now.end >= end) return now.end;
        if (now.state == SegmentState::kFailed) throw Fault(THAW_FETCH_FAILED, "the fetch failed");
        const auto beat = int64_t(__atomic_load_n(&page.heartbeat_ns, __ATOMIC_RELAXED));
        if (now_ns() - beat > kDeadAfterNs)
            throw Fault(THAW_FETCH_DIED, format("the fetch stopped at byte %llu of %llu: no heartbeat for %d s",
                                                (unsigned long long)now.end, (unsigned long long)n_bytes_,
                                                int(kDeadAfterNs / 1'000'000'000)));
        const int64_t left = deadline.left_ns();
        if (left <= 0)
            throw Fault(THAW_TIMED_OUT, format("%llu of the %llu bytes wanted had arrived after %g s",
                                               (unsigned long long)now.end, (unsigned long long)end,
                                               deadline.seconds()));
        const int64_t sleep_ns = std::min(left, kLongestSleepNs);
        if (stop != nullptr)
            sleep_on(&page.seq, now.seq, {&closed_, stop}, sleep_ns);
        else
            sleep_on(&page.seq, now.seq, {&closed_}, sleep_ns);
    }
}

void Segment::failure(thaw_failure *failure) const {
    read_failure(*reinterpret_cast<const ControlPage *>(page_.address()), failure);
}

}  // namespace thaw
