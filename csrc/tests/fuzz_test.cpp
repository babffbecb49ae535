// Passes seeded mutations of good control pages to their reader: each is accepted or refused, and nothing else happens.
#include <string.h>

#include <memory>

#include "check.h"
#include "support.h"
#include "thaw/segment_v1.h"

using namespace thaw;
using namespace thaw_test;

namespace {

// xorshift64*: the same on every machine.
class Random {
   public:
    explicit Random(uint64_t seed) : state_(seed * 0x9E3779B97F4A7C15u + 1) {}
    uint64_t next() {
        state_ ^= state_ >> 12, state_ ^= state_ << 25, state_ ^= state_ >> 27;
        return state_ * 0x2545F4914F6CDD1Du;
    }
    size_t below(size_t n) { return n == 0 ? 0 : size_t(next() % n); }

   private:
    uint64_t state_;
};

std::string mutated(std::string bytes, Random &random) {
    const size_t n = 1 + random.below(4);
    for (size_t i = 0; i < n; i++) {
        const size_t at = random.below(bytes.size());
        switch (random.below(5)) {
            case 0: bytes.resize(at); break;
            case 1: bytes.insert(at, 1 + random.below(9), char(random.next())); break;
            case 2: if (!bytes.empty()) bytes[at] = char(bytes[at] ^ 1 << random.below(8)); break;
            case 3: if (!bytes.empty()) bytes[at] = char(random.next()); break;
            default: for (size_t k = at; k < bytes.size() && k < at + 8; k++) bytes[k] = char(0xff);
        }
    }
    return bytes;
}

size_t iterations() {
    const char *wanted = getenv("THAW_FUZZ_ITERATIONS");
    return wanted != nullptr ? strtoul(wanted, nullptr, 10) : 20'000;
}

template <typename Read>
void feed(const std::vector<std::string> &good, uint64_t seed, Read &&read) {
    Random random(seed);
    size_t taken = 0, refused = 0;
    for (size_t i = 0; i < iterations(); i++) {
        const std::string bytes = mutated(good[random.below(good.size())], random);
        try {
            read(bytes);
            taken++;
        } catch (const Fault &) {
            refused++;
        }
    }
    CHECK(refused > 0);
    CHECK_EQ(taken + refused, iterations());
}

}  // namespace

TEST(fuzz_control_pages) {
    std::vector<std::string> good;
    for (const Json &vector : vectors_of("segment.json", "pages")) good.push_back(from_hex(vector["hex"].text));
    const auto page = std::make_unique<ControlPage>();
    const auto failure = std::make_unique<thaw_failure>();
    feed(good, 3, [&](const std::string &bytes) {
        memset(page.get(), 0, sizeof *page);
        memcpy(page.get(), bytes.data(), bytes.size() < sizeof *page ? bytes.size() : sizeof *page);
        check_page(*page, 12345);
        const PageLook look = look_at(*page, 12345, 0);
        CHECK(look.end <= 12345);
        read_failure(*page, failure.get());
        CHECK(strlen(failure->message) <= THAW_MAX_TEXT && strlen(failure->hint) <= THAW_MAX_TEXT);
    });
}
