// The vectors of segments, good and bad, as Python reads them (tests/relay/test_segment.py).
#include <string.h>

#include <memory>

#include "check.h"
#include "support.h"

using namespace thaw;
using namespace thaw_test;

namespace {

template <typename Read>
void check_refused(const Json &vector, Read &&read) {
    const std::string name = vector["name"].text, wanted = vector["error"].text;
    try {
        read();
    } catch (const Fault &fault) {
        if (fault.message.find(wanted) == std::string::npos)
            fail(__FILE__, __LINE__, name + ": \"" + fault.message + "\" does not say \"" + wanted + "\"");
        return;
    }
    fail(__FILE__, __LINE__, name + " was taken");
}

// Aligned, as a mapped page is.
std::unique_ptr<ControlPage> page_of(const std::string &hex) {
    auto page = std::make_unique<ControlPage>();
    memset(page.get(), 0, sizeof *page);
    const std::string bytes = from_hex(hex);
    memcpy(page.get(), bytes.data(), bytes.size());
    return page;
}

const char *const kStates[] = {"FILLING", "COMPLETE", "FAILED"};
const char *const kErrors[] = {"PlatformError", "PlatformError", "ModelNotFound", "ModelCorrupt",
                               "ModelUnsupported", "MemoryTooSmall", "StoreUnavailable", "ModelChanged"};

void check_page_vector(const Json &vector) {
    const auto page = page_of(vector["hex"].text);
    const uint64_t n_bytes = vector["n_bytes"].natural;
    check_page(*page, n_bytes);
    const PageLook look = look_at(*page, n_bytes, 0);
    CHECK_EQ(look.end, vector["end"].natural);
    CHECK_EQ(look.seq, uint32_t(vector["seq"].natural));
    CHECK(vector["state"].text == kStates[uint32_t(look.state)]);
    if (const Json *error = vector.find("error")) {
        auto failure = std::make_unique<thaw_failure>();
        read_failure(*page, failure.get());
        CHECK(error->items[0].text == kErrors[failure->code < 8 ? failure->code : 0]);
        CHECK(error->items[1].text == failure->message);
        CHECK(error->items[2].text == failure->hint);
    }
}

}  // namespace

TEST(control_pages_are_read_as_the_vectors_say) {
    for (const Json &vector : vectors_of("segment.json", "pages")) check_page_vector(vector);
    for (const Json &vector : vectors_of("segment.json", "read_only_pages")) check_page_vector(vector);
}

TEST(control_pages_are_written_as_the_vectors_say) {
    for (const Json &vector : vectors_of("segment.json", "pages")) {
        if (vector["n_bytes"].natural > (64u << 20)) continue;  // the writer here fills the whole memory
        Producer producer(vector["n_bytes"].natural);
        for (const Json &step : vector["steps"].items) {
            const std::string what = step["do"].text;
            if (what == "advance") producer.arrive(step["end"].natural);
            if (what == "complete") producer.complete();
            if (what == "fail") {
                uint32_t code = 0;
                for (uint32_t i = 1; i < 8; i++)
                    if (step["code"].text == kErrors[i]) code = i;
                producer.fail(code, step["message"].text, step["hint"].text);
            }
        }
        producer.page().heartbeat_ns = 0;
        const std::string wanted = from_hex(vector["hex"].text);
        CHECK(to_hex(std::string(reinterpret_cast<char *>(&producer.page()), wanted.size())) == vector["hex"].text);
    }
}

TEST(bad_control_pages_are_refused_with_their_reason) {
    for (const Json &vector : vectors_of("segment.json", "bad_pages"))
        check_refused(vector, [&] {
            uint64_t seen = 0;
            for (const Json &hex : vector["hexes"].items) {
                const auto page = page_of(hex.text);
                check_page(*page, vector["n_bytes"].natural);
                seen = look_at(*page, vector["n_bytes"].natural, seen).end;
            }
        });
}
