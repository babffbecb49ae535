// Makes a segment like fetchd, but without fetchd; reads files of vectors.
#pragma once

#include <stdint.h>

#include <string>
#include <vector>

#include "json.h"
#include "thaw/params.h"
#include "thaw/segment_v1.h"

namespace thaw_test {

inline const char *vectors_directory = "tests/vectors";

constexpr int64_t kSecond = 1'000'000'000;
constexpr int64_t kLong = 30 * kSecond;  // a deadline that no wait should reach
constexpr uint64_t kSlab = 2u << 20;

// The member of a file of vectors, by value: a range-for would outlive what it is part of.
std::vector<Json> vectors_of(const char *file, const char *member);
std::string from_hex(const std::string &hex);
std::string to_hex(const std::string &bytes);

// Writer of segment v1: data → end → heartbeat → seq + 1 → wake.
class Producer {
   public:
    explicit Producer(uint64_t n_bytes, uint64_t slab_bytes = kSlab);
    ~Producer();
    Producer(const Producer &) = delete;
    Producer &operator=(const Producer &) = delete;

    const std::vector<int> &fds() const { return fds_; }
    uint64_t n_bytes() const { return n_bytes_; }
    thaw_segment *open() const;
    // Writes the pattern at [from, to) and announces it on the control page.
    void arrive(uint64_t to);
    void complete() { arrive(n_bytes_); }
    void fail(uint32_t code, const std::string &message, const std::string &hint);
    void beat(int64_t age_ns = 0);
    thaw::ControlPage &page() { return *page_; }
    void announce();

    // The value of byte i in every segment that is made here.
    static unsigned char pattern(uint64_t i) { return static_cast<unsigned char>(i * 31 + (i >> 8) * 7 + (i >> 16)); }

   private:
    uint64_t n_bytes_, slab_bytes_;
    std::vector<int> fds_;
    std::vector<char *> slabs_;
    thaw::ControlPage *page_;
};

// Implements `native_tests --misuse WHAT`: it breaks a rule of the fake driver and should not return.
int misuse(const char *what);

bool is_pattern(const void *data, uint64_t offset, uint64_t n_bytes);

}  // namespace thaw_test
