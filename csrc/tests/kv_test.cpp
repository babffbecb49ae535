// Copies KV blocks out of a cache and into one: the same conformance tests run over the CPU and over the fake driver.
#include <string.h>

#include <memory>

#include "check.h"
#include "fake.h"
#include "support.h"

using namespace thaw_test;

namespace {

constexpr size_t kLayers = 3, kPlanes = 2, kBlocks = 40;

// A cache of planes whose blocks have a gap between them, so that the code cannot rely on adjacent blocks.
struct Cache {
    explicit Cache(thaw_device *device, uint64_t block_bytes, uint64_t gap, const FakeMemory &memory)
        : device_memory(memory), block_bytes(block_bytes), stride(block_bytes + gap) {
        const uint64_t plane_bytes = stride * kBlocks;
        base = device_memory.allocate(plane_bytes * kLayers * kPlanes);
        for (size_t p = 0; p < kLayers * kPlanes; p++)
            planes.push_back({base + p * plane_bytes, kBlocks, stride, block_bytes});
        OK(thaw_kv_open(device, planes.data(), kLayers, kPlanes, &kv));
    }
    ~Cache() {
        thaw_kv_free(kv);
        device_memory.release(base);
    }
    char *block(size_t layer, size_t plane, uint32_t b) const {
        return reinterpret_cast<char *>(planes[layer * kPlanes + plane].base + b * stride);
    }
    void fill(size_t layer) const {
        for (size_t p = 0; p < kPlanes; p++)
            for (uint32_t b = 0; b < kBlocks; b++)
                for (uint64_t i = 0; i < block_bytes; i++) block(layer, p, b)[i] = value(layer, p, b, i);
    }
    static char value(size_t layer, size_t p, uint32_t b, uint64_t i) { return char(layer * 91 + p * 53 + b * 7 + i); }

    const FakeMemory &device_memory;
    const uint64_t block_bytes, stride;
    uintptr_t base = 0;
    std::vector<thaw_kv_plane> planes;
    thaw_kv *kv = nullptr;
};

void gathered_blocks_lie_in_the_order_asked_for(thaw_device *device, const FakeMemory &memory) {
    Cache cache(device, 300, 20, memory);
    cache.fill(1);
    const uint32_t blocks[] = {7, 8, 9, 3, 39, 0, 8};
    std::string out(thaw_kv_bytes(cache.kv, 1, 7), '\0');
    CHECK_EQ(out.size(), size_t(300 * 7 * kPlanes));
    thaw_ticket *ticket = nullptr;
    OK(thaw_kv_gather(cache.kv, 1, blocks, 7, out.data(), out.size(), 0, &ticket));
    OK(thaw_ticket_wait(ticket, kLong));
    thaw_ticket_free(ticket);
    for (size_t p = 0; p < kPlanes; p++)
        for (size_t b = 0; b < 7; b++)
            for (size_t i = 0; i < 300; i++)
                CHECK_EQ(int(out[(p * 7 + b) * 300 + i]), int(Cache::value(1, p, blocks[b], i)));
}

void scattered_blocks_are_found_again_and_others_untouched(thaw_device *device, const FakeMemory &memory) {
    Cache from(device, 256, 0, memory), to(device, 256, 64, memory);
    from.fill(0), to.fill(2);
    const uint32_t out[] = {4, 5, 6, 20}, in[] = {1, 30, 31, 2};
    std::string chunk(thaw_kv_bytes(from.kv, 0, 4), '\0');
    thaw_ticket *ticket = nullptr;
    OK(thaw_kv_gather(from.kv, 0, out, 4, chunk.data(), chunk.size(), 0, &ticket));
    OK(thaw_ticket_wait(ticket, kLong));
    thaw_ticket_free(ticket);
    OK(thaw_kv_scatter(to.kv, 2, in, 4, chunk.data(), chunk.size(), 0, &ticket));
    OK(thaw_ticket_wait_stream(ticket, 0, kLong));
    OK(thaw_ticket_wait(ticket, kLong));
    thaw_ticket_free(ticket);
    for (size_t p = 0; p < kPlanes; p++)
        for (uint32_t b = 0; b < kBlocks; b++) {
            size_t moved = 4;
            for (size_t k = 0; k < 4; k++)
                if (in[k] == b) moved = k;
            for (size_t i = 0; i < 256; i++)
                CHECK_EQ(int(to.block(2, p, b)[i]),
                         int(moved < 4 ? Cache::value(0, p, out[moved], i) : Cache::value(2, p, b, i)));
        }
}

void many_chunks_are_on_their_way_at_once(thaw_device *device, const FakeMemory &memory) {
    Cache cache(device, 64 << 10, 0, memory);
    for (size_t layer = 0; layer < kLayers; layer++) cache.fill(layer);
    uint32_t all[kBlocks];
    for (uint32_t b = 0; b < kBlocks; b++) all[b] = b;
    std::string out[kLayers];
    thaw_ticket *tickets[kLayers];
    for (size_t layer = 0; layer < kLayers; layer++) {
        out[layer].resize(thaw_kv_bytes(cache.kv, layer, kBlocks));
        OK(thaw_kv_gather(cache.kv, layer, all, kBlocks, out[layer].data(), out[layer].size(), 0, &tickets[layer]));
    }
    for (size_t layer = kLayers; layer-- > 0;) {
        OK(thaw_ticket_wait(tickets[layer], kLong));
        thaw_ticket_free(tickets[layer]);
        for (size_t p = 0; p < kPlanes; p++)
            CHECK(memcmp(out[layer].data() + p * kBlocks * cache.block_bytes, cache.block(layer, p, 0),
                         kBlocks * cache.block_bytes) == 0);
    }
}

void what_does_not_fit_is_refused(thaw_device *device, const FakeMemory &memory) {
    Cache cache(device, 128, 0, memory);
    char buffer[128 * kPlanes * 2];
    const uint32_t twice[] = {3, 3}, beyond[] = {0, kBlocks};
    thaw_ticket *ticket = nullptr;
    const size_t n_bytes = sizeof buffer;
    REFUSED(thaw_kv_gather(cache.kv, kLayers, twice, 2, buffer, n_bytes, 0, &ticket), THAW_BAD_ARGUMENT, "layer 3");
    REFUSED(thaw_kv_gather(cache.kv, 0, beyond, 2, buffer, n_bytes, 0, &ticket), THAW_BAD_ARGUMENT, "block 40 of 40");
    REFUSED(thaw_kv_gather(cache.kv, 0, twice, 2, buffer, 100, 0, &ticket), THAW_BAD_ARGUMENT, "the buffer 100");
    REFUSED(thaw_kv_scatter(cache.kv, 0, twice, 2, buffer, n_bytes, 0, &ticket), THAW_BAD_ARGUMENT, "named twice");
    REFUSED(thaw_kv_gather(cache.kv, 0, nullptr, 2, buffer, sizeof buffer, 0, &ticket), THAW_BAD_ARGUMENT, "NULL");
    OK(thaw_kv_gather(cache.kv, 0, twice, 2, buffer, sizeof buffer, 0, &ticket));  // reading a block twice is allowed
    thaw_ticket_free(ticket);
    OK(thaw_kv_gather(cache.kv, 0, nullptr, 0, nullptr, 0, 0, &ticket));
    OK(thaw_ticket_wait(ticket, kLong));
    thaw_ticket_free(ticket);
    CHECK_EQ(thaw_kv_bytes(cache.kv, 17, 2), uint64_t(0));
    thaw_kv *kv = nullptr;
    thaw_kv_plane overlapping = {cache.base, 2, 64, 128};
    REFUSED(thaw_kv_open(device, &overlapping, 1, 1, &kv), THAW_BAD_ARGUMENT, "overlap");
}

void on_both(void (*test)(thaw_device *, const FakeMemory &)) {
    thaw_device *device = nullptr;
    const thaw_device_config config{};
    OK(thaw_device_open(&config, &device));
    test(device, FakeMemory::on_host());
    thaw_device_free(device);
    fake().reset();
    fake().delay_us(200);
    device = open_fake(small_config());
    test(device, FakeMemory::on_device());
    thaw_device_free(device);
    check_nothing_leaked();
}

}  // namespace

TEST(kv_gathered_blocks_lie_in_the_order_asked_for) { on_both(gathered_blocks_lie_in_the_order_asked_for); }
TEST(kv_scattered_blocks_are_found_again_and_others_untouched) {
    on_both(scattered_blocks_are_found_again_and_others_untouched);
}
TEST(kv_many_chunks_are_on_their_way_at_once) { on_both(many_chunks_are_on_their_way_at_once); }
TEST(kv_what_does_not_fit_is_refused) { on_both(what_does_not_fit_is_refused); }

TEST(kv_a_gather_reads_what_the_stream_wrote_before_it) {
    fake().reset();
    thaw_device *device = open_fake(small_config());
    {
        Cache cache(device, 4096, 0, FakeMemory::on_device());
        fake().delay_us(20'000);
        FakeStream compute;  // an engine's stream with a late write that is still pending
        const std::string fresh(4096, 'n');
        compute.write(reinterpret_cast<uintptr_t>(cache.block(0, 0, 5)), fresh);
        compute.write(reinterpret_cast<uintptr_t>(cache.block(0, 1, 5)), fresh);
        const uint32_t block = 5;
        std::string out(thaw_kv_bytes(cache.kv, 0, 1), '\0');
        thaw_ticket *ticket = nullptr;
        OK(thaw_kv_gather(cache.kv, 0, &block, 1, out.data(), out.size(), compute.handle(), &ticket));
        OK(thaw_ticket_wait(ticket, kLong));
        thaw_ticket_free(ticket);
        CHECK(out == fresh + fresh);
    }
    thaw_device_free(device);
    check_nothing_leaked();
}

TEST(kv_a_ticket_freed_early_gives_the_buffer_back_only_when_the_copy_is_done) {
    fake().reset();
    thaw_device *device = open_fake(small_config());
    {
        Cache cache(device, 8192, 0, FakeMemory::on_device());
        cache.fill(0);
        fake().delay_us(10'000);
        const uint32_t blocks[] = {1, 2, 3};
        auto out = std::make_unique<std::string>(thaw_kv_bytes(cache.kv, 0, 3), '\0');
        thaw_ticket *ticket = nullptr;
        OK(thaw_kv_gather(cache.kv, 0, blocks, 3, out->data(), out->size(), 0, &ticket));
        thaw_ticket_free(ticket);
        CHECK(memcmp(out->data(), cache.block(0, 0, 1), 3 * 8192) == 0);
        out.reset();
    }
    thaw_device_free(device);
    check_nothing_leaked();
}
