// Frame v1 (docs/formats/frame.md): 64 bytes, little-endian, then the payload.
//
// The checks come in the order of the format's page, so that a damaged frame is refused for the same reason as in
// Python.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>

#include "thaw/crc32c.h"
#include "thaw/fault.h"

namespace thaw {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "the formats are little-endian and so is every host we know");

constexpr size_t kFrameHeaderBytes = 64;
constexpr uint32_t kMaxFramePayload = 8u << 20;
constexpr uint8_t kFrameVersion = 1;
constexpr uint8_t kFlagTensors = 1;
constexpr uint8_t kLastKind = 5;
constexpr uint8_t kLastPriority = 2;

struct FrameHeader {
    uint8_t kind = 0;  // control, hidden_states, kv, bulk, ack, credit
    uint8_t priority = 0;
    uint8_t flags = 0;
    uint8_t group_id[16] = {};
    uint32_t stream_id = 0;
    uint64_t seq = 0;
    uint32_t chunk = 0;
    uint32_t n_chunks = 1;
    uint32_t n_bytes = 0;
    uint64_t step = 0;
    uint32_t payload_crc = 0;
};

namespace frame_detail {

template <typename T>
T load(const uint8_t *at) {
    T value;
    std::memcpy(&value, at, sizeof value);
    return value;
}

template <typename T>
void store(uint8_t *at, T value) {
    std::memcpy(at, &value, sizeof value);
}

inline uint32_t header_crc(const uint8_t *raw) { return crc32c(raw + 60, 4, crc32c(raw, 56)); }

[[noreturn]] inline void refuse(const std::string &why) { throw Fault(THAW_BAD_ARGUMENT, why); }

}  // namespace frame_detail

inline void encode_frame_header(const FrameHeader &h, uint8_t *raw) {
    using frame_detail::store;
    std::memcpy(raw, "THWF", 4);
    raw[4] = kFrameVersion, raw[5] = h.kind, raw[6] = h.priority, raw[7] = h.flags;
    std::memcpy(raw + 8, h.group_id, 16);
    store(raw + 24, h.stream_id), store(raw + 28, h.seq), store(raw + 36, h.chunk), store(raw + 40, h.n_chunks);
    store(raw + 44, h.n_bytes), store(raw + 48, h.step), store(raw + 60, h.payload_crc);
    store(raw + 56, frame_detail::header_crc(raw));
}

// Encodes a whole frame, and sets n_bytes and payload_crc.
inline std::string encode_frame(FrameHeader h, const void *payload, size_t n_bytes) {
    if (n_bytes > kMaxFramePayload)
        frame_detail::refuse(format("frame payload of %zu bytes; the limit is %u", n_bytes, kMaxFramePayload));
    h.n_bytes = uint32_t(n_bytes);
    h.payload_crc = crc32c(payload, n_bytes);
    std::string frame(kFrameHeaderBytes, '\0');
    encode_frame_header(h, reinterpret_cast<uint8_t *>(frame.data()));
    return frame.append(static_cast<const char *>(payload), n_bytes);
}

// Reads exactly 64 bytes.  Throws Fault.  No memory is allocated according to the header's claims.
inline FrameHeader decode_frame_header(const uint8_t *raw, size_t n) {
    using frame_detail::load;
    using frame_detail::refuse;
    if (n != kFrameHeaderBytes) refuse(format("a frame header has %zu bytes, got %zu", kFrameHeaderBytes, n));
    if (std::memcmp(raw, "THWF", 4) != 0) refuse("not a frame: magic");
    if (raw[4] != kFrameVersion) refuse(format("frame version %u; this side reads %u", raw[4], kFrameVersion));
    if (load<uint32_t>(raw + 56) != frame_detail::header_crc(raw)) refuse("frame header failed its checksum");
    FrameHeader h;
    h.kind = raw[5], h.priority = raw[6], h.flags = raw[7];
    if (h.kind > kLastKind || h.priority > kLastPriority || (h.flags & ~kFlagTensors) != 0)
        refuse(format("frame of kind %u, priority %u, flags 0x%x is not known", h.kind, h.priority, h.flags));
    std::memcpy(h.group_id, raw + 8, 16);
    h.stream_id = load<uint32_t>(raw + 24), h.seq = load<uint64_t>(raw + 28);
    h.chunk = load<uint32_t>(raw + 36), h.n_chunks = load<uint32_t>(raw + 40);
    h.n_bytes = load<uint32_t>(raw + 44), h.step = load<uint64_t>(raw + 48);
    h.payload_crc = load<uint32_t>(raw + 60);
    if (h.n_bytes > kMaxFramePayload)
        refuse(format("frame claims %u bytes; the limit is %u", h.n_bytes, kMaxFramePayload));
    if (h.n_chunks == 0 || h.chunk >= h.n_chunks) refuse(format("frame claims chunk %u of %u", h.chunk, h.n_chunks));
    return h;
}

// Decodes one whole frame, whose payload begins at data + 64.
inline FrameHeader decode_frame(const uint8_t *data, size_t n) {
    using frame_detail::refuse;
    if (n < kFrameHeaderBytes) refuse(format("a frame has at least %zu bytes, got %zu", kFrameHeaderBytes, n));
    const FrameHeader h = decode_frame_header(data, kFrameHeaderBytes);
    const size_t carried = n - kFrameHeaderBytes;
    if (carried != h.n_bytes) refuse(format("frame claims %u bytes and carries %zu", h.n_bytes, carried));
    if (crc32c(data + kFrameHeaderBytes, carried) != h.payload_crc) refuse("frame payload failed its checksum");
    return h;
}

}  // namespace thaw
