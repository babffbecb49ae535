// CRC-32C (Castagnoli), the checksum of frames: with SSE4.2 if the processor has it, else with a table.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

namespace thaw {

namespace crc_detail {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

// kTables[0] is the classic byte table; kTables[k] is for a byte that is followed by k zero bytes (slicing by 8).
constexpr std::array<std::array<uint32_t, 256>, 8> make_tables() {
    std::array<std::array<uint32_t, 256>, 8> t{};
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++) crc = (crc >> 1) ^ ((crc & 1) ? kPolynomial : 0);
        t[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (size_t k = 1; k < 8; k++) t[k][i] = (t[k - 1][i] >> 8) ^ t[0][t[k - 1][i] & 0xff];
    return t;
}

inline constexpr std::array<std::array<uint32_t, 256>, 8> kTables = make_tables();

inline uint32_t by_table(uint32_t crc, const uint8_t *p, size_t n) {
    for (; n >= 8; p += 8, n -= 8) {
        const uint32_t a = crc ^ (uint32_t(p[0]) | uint32_t(p[1]) << 8 | uint32_t(p[2]) << 16 | uint32_t(p[3]) << 24);
        crc = kTables[7][a & 0xff] ^ kTables[6][a >> 8 & 0xff] ^ kTables[5][a >> 16 & 0xff] ^ kTables[4][a >> 24] ^
              kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
    }
    for (; n > 0; p++, n--) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xff];
    return crc;
}

#if defined(__x86_64__)
__attribute__((target("sse4.2"))) inline uint32_t by_sse42(uint32_t crc, const uint8_t *p, size_t n) {
    uint64_t wide = crc;
    for (; n >= 8; p += 8, n -= 8) {
        uint64_t word;
        std::memcpy(&word, p, 8);
        wide = _mm_crc32_u64(wide, word);
    }
    auto narrow = uint32_t(wide);
    for (; n > 0; p++, n--) narrow = _mm_crc32_u8(narrow, *p);
    return narrow;
}
#endif

}  // namespace crc_detail

// `crc` is what an earlier call returned for the bytes before these.
inline uint32_t crc32c(const void *data, size_t n, uint32_t crc = 0) {
    const auto *p = static_cast<const uint8_t *>(data);
#if defined(__x86_64__)
    static const bool fast = __builtin_cpu_supports("sse4.2");
    if (fast) return ~crc_detail::by_sse42(~crc, p, n);
#endif
    return ~crc_detail::by_table(~crc, p, n);
}

}  // namespace thaw
