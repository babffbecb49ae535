// Reads the formats' good and bad vectors, which Python reads, too (tests/relay, tests/invoker).
#include <string.h>

#include <memory>

#include "check.h"
#include "support.h"
#include "thaw/frame_v1.h"
#include "thaw/plan_v1.h"

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

FrameHeader header_of(const Json &plain) {
    FrameHeader h;
    h.kind = uint8_t(plain["kind"].integer), h.priority = uint8_t(plain["priority"].integer);
    h.flags = uint8_t(plain["flags"].integer);
    memcpy(h.group_id, from_hex(plain["group_id"].text).data(), 16);
    h.stream_id = uint32_t(plain["stream_id"].natural), h.seq = plain["seq"].natural;
    h.chunk = uint32_t(plain["chunk"].natural), h.n_chunks = uint32_t(plain["n_chunks"].natural);
    h.step = plain["step"].natural;
    return h;
}

FrameHeader decode(const std::string &bytes) {
    return decode_frame(reinterpret_cast<const uint8_t *>(bytes.data()), bytes.size());
}

// An aligned buffer, like a mapped page.
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

TEST(good_frames_are_written_and_read) {
    for (const Json &vector : vectors_of("frames.json", "good")) {
        const std::string payload = from_hex(vector["payload"].text), bytes = from_hex(vector["bytes"].text);
        const FrameHeader wanted = header_of(vector["header"]);
        CHECK(encode_frame(wanted, payload.data(), payload.size()) == bytes);
        FrameHeader read = decode(bytes);
        CHECK_EQ(size_t(read.n_bytes), payload.size());
        uint8_t again[kFrameHeaderBytes];
        encode_frame_header(read, again);
        CHECK(memcmp(again, bytes.data(), sizeof again) == 0);
    }
}

TEST(bad_frames_are_refused_with_their_reason) {
    for (const Json &vector : vectors_of("frames.json", "bad"))
        check_refused(vector, [&] { decode(from_hex(vector["bytes"].text)); });
}

TEST(a_frame_cut_or_damaged_anywhere_is_refused) {
    const std::string whole = encode_frame(FrameHeader{}, "hidden states", 13);
    const auto refused = [](const std::string &bytes) {
        try {
            decode(bytes);
        } catch (const Fault &) {
            return true;
        }
        return false;
    };
    for (size_t n = 0; n < whole.size(); n++) CHECK(refused(whole.substr(0, n)));
    for (size_t bit = 0; bit < whole.size() * 8; bit++) {
        std::string damaged = whole;
        damaged[bit / 8] = char(damaged[bit / 8] ^ 1 << bit % 8);
        CHECK(refused(damaged));
    }
}

TEST(both_ways_to_a_checksum_agree) {
    std::string data;
    for (int i = 0; i < 1000; i++) data += char(i * 37);
    CHECK_EQ(crc32c("123456789", 9), 0xE3069283u);
    for (size_t n = 0; n < data.size(); n += 7) {
        const auto *bytes = reinterpret_cast<const uint8_t *>(data.data());
        const uint32_t table = ~crc_detail::by_table(~0u, bytes, n);
        CHECK_EQ(crc32c(bytes, n), table);
        CHECK_EQ(crc32c(bytes + n / 3, n - n / 3, crc32c(bytes, n / 3)), table);
    }
}

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

TEST(ranges_are_laid_out_as_the_vectors_say) {
    for (const Json &vector : vectors_of("segment.json", "layouts")) {
        std::vector<uint64_t> lengths;
        for (const Json &range : vector["ranges"].items) lengths.push_back(range.items[2].natural);
        const std::vector<uint64_t> offsets = lay_out(lengths);
        uint64_t n_bytes = 0;
        for (size_t i = 0; i < offsets.size(); i++) {
            CHECK_EQ(offsets[i], vector["segment_offsets"].items[i].natural);
            n_bytes = offsets[i] + lengths[i] > n_bytes ? offsets[i] + lengths[i] : n_bytes;
        }
        CHECK_EQ(offsets.size(), vector["segment_offsets"].items.size());
        CHECK_EQ(n_bytes, vector["n_bytes"].natural);
    }
}

TEST(good_plans_are_taken_and_written_as_they_were_read) {
    for (const Json &vector : vectors_of("plan.json", "good")) {
        const Plan plan = read_plan(vector["plan"]);
        const std::string written = write_plan(plan);
        CHECK(write_plan(read_plan(Json::parse(written))) == written);
        CHECK(plan.plan_id == vector["plan"]["plan_id"].text);
        CHECK_EQ(plan.stages.size(), vector["plan"]["stages"].items.size());
    }
}

TEST(bad_plans_are_refused_with_their_reason) {
    for (const Json &vector : vectors_of("plan.json", "bad"))
        check_refused(vector, [&] { read_plan(vector["plan"]); });
}

TEST(what_is_not_json_is_refused) {
    for (const char *text : {"", "{", "[1,]", "{\"a\":}", "tru", "\"\x01\"", "\"\\x\"", "\"\\ud800\"", "1 2", "-", "01",
                             "1.", "\"abc", "{\"a\" 1}", "[1 2]", "\"\\ud800\\u0041\""}) {
        bool refused = false;
        try {
            Json::parse(text);
        } catch (const Fault &) {
            refused = true;
        }
        if (!refused) fail(__FILE__, __LINE__, std::string("taken: ") + text);
    }
    CHECK(Json::parse("\"\\ud83d\\ude00\\u00e9\\n\"").text == "\xf0\x9f\x98\x80\xc3\xa9\n");
    std::string deep(100, '[');
    bool refused = false;
    try {
        Json::parse(deep);
    } catch (const Fault &) {
        refused = true;
    }
    CHECK(refused);
}
