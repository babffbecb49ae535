// Segment v1 (docs/formats/segment.md): the control page.
#pragma once

#include <cstdint>
#include <cstring>

#include "thaw/fault.h"

namespace thaw {

constexpr uint64_t kPageBytes = 4096;
constexpr uint32_t kSegmentVersion = 1;
constexpr int64_t kDeadAfterNs = 3'000'000'000;
constexpr int64_t kLongestSleepNs = 200'000'000;  // how often the heartbeat is checked: a dead fetchd wakes no reader

enum class SegmentState : uint32_t { kFilling = 0, kComplete = 1, kFailed = 2 };

// The layout of the page.  Read it with the accessors below, which order the loads.
struct ControlPage {
    char magic[4];
    uint32_t version;
    uint64_t n_bytes;
    uint64_t end;
    uint32_t seq;
    uint32_t state;
    uint64_t heartbeat_ns;
    uint32_t error_code;
    uint32_t message_bytes;
    uint32_t hint_bytes;
    uint8_t zero[12];
    char text[kPageBytes - 64];
};
static_assert(sizeof(ControlPage) == kPageBytes && offsetof(ControlPage, seq) == 24, "segment v1");
static_assert(offsetof(ControlPage, heartbeat_ns) == 32 && offsetof(ControlPage, text) == 64, "segment v1");

// What one read of the page found.  seq was loaded first, so progress after that makes a futex wait on it return at
// once.
struct PageLook {
    uint32_t seq;
    SegmentState state;
    uint64_t end;
};

inline void check_page(const ControlPage &page, uint64_t n_bytes) {
    if (std::memcmp(page.magic, "THWS", 4) != 0 || page.version != kSegmentVersion)
        throw Fault(THAW_BAD_SEGMENT,
                    format("not a control page of segment v%u: version %u", kSegmentVersion, page.version));
    const uint64_t said = __atomic_load_n(&page.n_bytes, __ATOMIC_RELAXED);
    if (said != n_bytes)
        throw Fault(THAW_BAD_SEGMENT, format("control page says %llu bytes, the offer %llu", (unsigned long long)said,
                                             (unsigned long long)n_bytes));
}

// `least` is an end that was seen before.  The state is loaded before the end, so a complete page shows its full end.
inline PageLook look_at(const ControlPage &page, uint64_t n_bytes, uint64_t least) {
    PageLook look;
    look.seq = __atomic_load_n(&page.seq, __ATOMIC_ACQUIRE);
    const uint32_t state = __atomic_load_n(&page.state, __ATOMIC_ACQUIRE);
    look.end = __atomic_load_n(&page.end, __ATOMIC_ACQUIRE);
    if (state > uint32_t(SegmentState::kFailed))
        throw Fault(THAW_BAD_SEGMENT, format("control page is in state %u", state));
    look.state = SegmentState(state);
    const auto end = (unsigned long long)look.end, whole = (unsigned long long)n_bytes;
    if (look.end > n_bytes)
        throw Fault(THAW_BAD_SEGMENT, format("control page ends at %llu of %llu bytes", end, whole));
    const auto seen = (unsigned long long)least;
    if (look.end < least)
        throw Fault(THAW_BAD_SEGMENT, format("control page went back from %llu to %llu", seen, end));
    if (look.state == SegmentState::kComplete && look.end != n_bytes)
        throw Fault(THAW_BAD_SEGMENT, format("control page is complete at %llu of %llu bytes", end, whole));
    return look;
}

// Reads the error of a failed page.  Lengths are bounded here, whatever the page claims.
inline void read_failure(const ControlPage &page, thaw_failure *failure) {
    const uint32_t m = page.message_bytes, h = page.hint_bytes;
    const size_t message = m < THAW_MAX_TEXT ? m : THAW_MAX_TEXT, hint = h < THAW_MAX_TEXT ? h : THAW_MAX_TEXT;
    failure->code = page.error_code;
    std::memcpy(failure->message, page.text, message);
    failure->message[message] = '\0';
    std::memcpy(failure->hint, page.text + message, hint);
    failure->hint[hint] = '\0';
}

}  // namespace thaw
