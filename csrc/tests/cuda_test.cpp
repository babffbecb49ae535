// Loads onto a CUDA device, over the strict fake driver: order, lifetimes, priorities, faults, fallbacks.
#include <string.h>
#include <unistd.h>

#include <functional>
#include <memory>
#include <thread>

#include "check.h"
#include "fake.h"
#include "support.h"
#include "thaw/dlpack.h"

using namespace thaw_test;

namespace {

constexpr uint64_t kMiB = 1u << 20;

// `n` rows of bytes, one behind the other; each is in its own group unless the caller says otherwise.
std::vector<thaw_tensor> rows(size_t n, uint64_t n_bytes, uint64_t from = 0, size_t per_group = 1) {
    std::vector<thaw_tensor> table;
    for (size_t i = 0; i < n; i++) {
        thaw_tensor t{};
        t.offset = from + i * n_bytes, t.n_bytes = n_bytes, t.dtype = THAW_U8, t.n_dims = 1;
        t.shape[0] = int64_t(n_bytes), t.group = uint32_t(i / per_group);
        table.push_back(t);
    }
    return table;
}

// A segment, a device over the fake driver, and a load from the segment to the device; they are ended in order.
struct Loading {
    Loading(const Producer &producer, const std::vector<thaw_tensor> &rows,
            const thaw_device_config &config = small_config(), uint64_t window = 0)
        : table(rows) {
        segment = producer.open();
        OK(thaw_device_open(&config, &device));
        OK(thaw_load_open(device, segment, table.data(), table.size(), window, &load));
    }
    ~Loading() {
        thaw_load_free(load);
        thaw_device_free(device);
        thaw_segment_free(segment);
    }
    DLManagedTensor *take(size_t i) {
        DLManagedTensor *t = nullptr;
        OK(thaw_load_wait(load, i, kLong));
        OK(thaw_load_tensor(load, i, &t));
        return t;
    }
    void check_all() {
        for (size_t i = 0; i < table.size(); i++) {
            DLManagedTensor *t = take(i);
            CHECK(is_pattern(t->dl_tensor.data, table[i].offset, table[i].n_bytes));  // only a fake device allows this
            t->deleter(t);
        }
    }
    thaw_device_info info() const {
        thaw_device_info described;
        OK(thaw_device_describe(device, &described));
        return described;
    }

    const std::vector<thaw_tensor> table;
    thaw_segment *segment = nullptr;
    thaw_device *device = nullptr;
    thaw_load *load = nullptr;
};

}  // namespace

TEST(cuda_what_is_there_already_goes_pinned_and_without_a_copy) {
    fake().reset(), fake().delay_us(50);
    Producer producer(3 * kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(12, kSlab / 4));
        for (size_t i = 0; i < 12; i++) {
            DLManagedTensor *t = loading.take(i);
            CHECK_EQ(t->dl_tensor.device.device_type, int(kDLCUDA));
            CHECK_EQ(reinterpret_cast<uintptr_t>(t->dl_tensor.data) % 256, uintptr_t(0));
            CHECK(is_pattern(t->dl_tensor.data, loading.table[i].offset, loading.table[i].n_bytes));
            t->deleter(t);
        }
        CHECK_EQ(loading.info().registered_bytes, uint64_t(3 * kSlab));
        CHECK_EQ(loading.info().bounced_bytes, uint64_t(0));
        CHECK_EQ(loading.info().copied_bytes, uint64_t(3 * kSlab));
        CHECK_EQ(loading.info().read_only_register, 1);
        CHECK(strstr(loading.info().name, "fake") != nullptr);
    }
    check_nothing_leaked();
}

TEST(cuda_what_arrives_slowly_goes_through_the_ring) {
    fake().reset(), fake().delay_us(20);
    Producer producer(kSlab);
    {
        Loading loading(producer, rows(31, 60'000, 100));
        for (uint64_t end = 0; end < producer.n_bytes(); end += 77'777) {
            producer.arrive(end);
            const auto last = size_t(end < 60'100 ? 0 : (end - 100) / 60'000);
            if (last > 0 && last <= 31) OK(thaw_load_wait(loading.load, last - 1, kLong));
        }
        producer.complete();
        loading.check_all();
        CHECK(loading.info().bounced_bytes > 0);
        CHECK_EQ(loading.info().copied_bytes, uint64_t(31 * 60'000));
    }
    check_nothing_leaked();
}

TEST(cuda_a_group_of_many_small_and_one_large_tensor_shares_a_buffer) {
    fake().reset();
    Producer producer(kSlab);
    producer.complete();
    std::vector<thaw_tensor> table = rows(9, 1000, 3);
    for (thaw_tensor &t : table) t.group = 4;
    table.push_back(rows(1, kMiB, 20'000)[0]);
    table.back().group = 4;
    table.push_back(rows(1, 0, 5)[0]);  // empty
    table.back().group = 4;
    {
        Loading loading(producer, table);
        OK(thaw_load_wait(loading.load, 0, kLong));
        const uint64_t live = loading.info().live_bytes;
        CHECK(live >= kMiB + 9000 && live <= kMiB + 12 * 1280);
        loading.check_all();
    }
    check_nothing_leaked();
}

TEST(cuda_a_device_that_pins_no_read_only_memory_uses_the_ring) {
    fake().reset(), fake().read_only_register(0);
    Producer producer(2 * kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(4, kSlab / 2));
        loading.check_all();
        CHECK_EQ(loading.info().registered_bytes, uint64_t(0));
        CHECK_EQ(loading.info().bounced_bytes, uint64_t(2 * kSlab));
    }
    check_nothing_leaked();
}

TEST(cuda_a_driver_that_refuses_to_pin_is_not_asked_again) {
    fake().reset(), fake().fail("cuMemHostRegister", 2, 304);
    Producer producer(2 * kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(4, kSlab / 2));
        loading.check_all();
        CHECK_EQ(loading.info().registered_bytes, uint64_t(small_config().register_bytes));
        CHECK(loading.info().bounced_bytes > 0);
    }
    check_nothing_leaked();
}

// The ring has one buffer: a copy that could not allocate it must free its place in the ring for the next copy.
TEST(cuda_a_buffer_of_the_ring_that_could_not_be_allocated_is_allocated_for_the_next_copy) {
    fake().reset(), fake().read_only_register(0), fake().fail("cuMemHostAlloc", 1, 2);
    Producer producer(2 * kSlab);
    producer.complete();
    {
        thaw_device_config config = small_config();
        config.n_slots = 1;
        Loading loading(producer, rows(2, kSlab), config);
        REFUSED(thaw_load_wait(loading.load, 0, kLong), THAW_OUT_OF_MEMORY, "cuMemHostAlloc");
        DLManagedTensor *t = loading.take(1);
        CHECK(is_pattern(t->dl_tensor.data, kSlab, kSlab));
        t->deleter(t);
    }
    check_nothing_leaked();
}

// Two copies of one group fail in different ways: the second error follows from the first one, or would hide it.
TEST(cuda_of_two_faults_of_one_group_the_first_is_told) {
    fake().reset(), fake().read_only_register(0);
    fake().fail("cuMemHostAlloc", 1, 2), fake().fail("cuMemcpyHtoDAsync", 1, 700);
    Producer producer(kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(1, kSlab));
        REFUSED(thaw_load_wait(loading.load, 0, kLong), THAW_OUT_OF_MEMORY, "cuMemHostAlloc");
    }
    check_nothing_leaked();
}

TEST(cuda_memory_somebody_else_pinned_is_used_and_left_pinned) {
    fake().reset();
    Producer producer(kSlab);
    producer.complete();
    thaw_segment *other = nullptr;
    {
        Loading loading(producer, rows(1, 16));  // a small load of its own, which is only needed for the mapping
        other = producer.open();
        loading.check_all();
    }
    void *address = reinterpret_cast<void *>(thaw_segment_address(other));
    thaw_device *device = open_fake(small_config());
    {
        const InContext here;
        CHECK_EQ(fake().host_register(address, kSlab, 0x09), 0);
    }
    const std::vector<thaw_tensor> table = rows(4, kSlab / 4);
    thaw_load *load = nullptr;
    OK(thaw_load_open(device, other, table.data(), table.size(), 0, &load));
    for (size_t i = 0; i < 4; i++) OK(thaw_load_wait(load, i, kLong));
    thaw_device_info info;
    OK(thaw_device_describe(device, &info));
    CHECK_EQ(info.bounced_bytes, uint64_t(0));
    thaw_load_free(load);
    CHECK_EQ(fake().leaks().registrations, 1);
    {
        const InContext here;
        CHECK_EQ(fake().host_unregister(address), 0);
    }
    thaw_device_free(device);
    thaw_segment_free(other);
    check_nothing_leaked();
}

TEST(cuda_two_loads_of_one_segment_share_what_is_pinned) {
    fake().reset(), fake().delay_us(300);
    Producer producer(2 * kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(8, kSlab / 4));
        const std::vector<thaw_tensor> table = rows(8, kSlab / 4);
        thaw_load *second = nullptr;
        OK(thaw_load_open(loading.device, loading.segment, table.data(), table.size(), 0, &second));
        OK(thaw_load_wait(second, 0, kLong));
        thaw_load_free(second);  // in the middle of the load
        loading.check_all();
    }
    check_nothing_leaked();
}

TEST(cuda_a_stream_waits_for_the_copy_and_the_host_does_not) {
    fake().reset();
    Producer producer(kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(8, kSlab / 8));
        FakeStream engine;
        fake().delay_us(2000);
        for (size_t i = 0; i < 8; i++) {
            OK(thaw_load_wait_stream(loading.load, i, engine.handle(), kLong));
            DLManagedTensor *t = nullptr;
            OK(thaw_load_tensor(loading.load, i, &t));
            const std::string seen = engine.read(reinterpret_cast<uintptr_t>(t->dl_tensor.data), 5000);
            CHECK(is_pattern(seen.data(), loading.table[i].offset, 5000));
            t->deleter(t);
        }
    }
    check_nothing_leaked();
}

TEST(cuda_a_tensor_dropped_while_its_copy_is_on_its_way_is_freed_after_it) {
    fake().reset(), fake().delay_us(3000);
    Producer producer(kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(4, kSlab / 4));
        for (size_t i = 0; i < 4; i++) {
            OK(thaw_load_wait_stream(loading.load, i, 0, kLong));
            DLManagedTensor *t = nullptr;
            OK(thaw_load_tensor(loading.load, i, &t));
            std::thread([&] { t->deleter(t); }).join();  // a thread that has never seen the context
        }
    }
    check_nothing_leaked();
}

TEST(cuda_the_context_goes_with_the_last_tensor) {
    fake().reset();
    auto producer = std::make_unique<Producer>(kSlab);
    producer->complete();
    DLManagedTensor *t = nullptr;
    {
        Loading loading(*producer, rows(2, 4096));
        t = loading.take(1);
    }
    producer.reset();
    CHECK_EQ(fake().leaks().contexts, 1);
    CHECK(fake().leaks().device_allocations >= 1);
    CHECK_EQ(fake().leaks().registrations, 0);
    CHECK(is_pattern(t->dl_tensor.data, 4096, 4096));
    t->deleter(t);
    check_nothing_leaked();
}

TEST(cuda_background_copies_yield_to_critical_ones) {
    fake().reset(), fake().delay_us(500);
    Producer producer(4 * kSlab);
    producer.complete();
    std::vector<thaw_tensor> table = rows(4, kSlab);
    table[2].background = table[3].background = 1;
    thaw_device_config config = small_config();
    config.never_register = 1;
    {
        Loading loading(producer, table, config);
        for (size_t i = 0; i < 4; i++) OK(thaw_load_wait(loading.load, i, kLong));
        int background = 0, critical = 0, critical_after = 0;
        for (int i = 0; i < fake().log_size(); i++) {
            int priority;
            int64_t n_bytes;
            fake().log_at(i, &priority, &n_bytes);
            if (priority < 0) critical++, critical_after += background > 0;
            else background++;
        }
        CHECK_EQ(critical, int(2 * kSlab / config.piece_bytes));
        CHECK_EQ(background, critical);
        // These are at most the copies in flight on the two streams when the last critical copy was issued.  Without
        // the priority there could be more: 64 copies wait at the beginning.
        CHECK(critical_after <= 2 * int(config.in_flight_bytes / config.piece_bytes));
        CHECK(fake().most_queued() <= int64_t(config.in_flight_bytes));
    }
    check_nothing_leaked();
}

TEST(cuda_a_window_bounds_the_device_memory_but_never_who_waits) {
    fake().reset();
    Producer producer(4 * kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(16, kSlab / 4), small_config(), kSlab);
        for (size_t i = 0; i < 16; i++) {
            DLManagedTensor *t = loading.take(i);
            CHECK(loading.info().live_bytes <= kSlab + kSlab / 4);  // the awaited tensor may exceed the window
            t->deleter(t);
        }
    }
    {
        Loading loading(producer, rows(16, kSlab / 4), small_config(), kSlab);
        std::vector<DLManagedTensor *> kept;  // a model that keeps all tensors
        for (size_t i = 0; i < 16; i++) kept.push_back(loading.take(i));
        for (DLManagedTensor *t : kept) t->deleter(t);
    }
    check_nothing_leaked();
}

TEST(cuda_who_waits_for_a_group_waits_for_memory_that_is_being_freed) {
    fake().reset(), fake().free_delay_us(2000);
    Producer producer(4 * kSlab);
    producer.complete();
    {
        Loading loading(producer, rows(16, kSlab / 4), small_config(), kSlab);
        for (size_t i = 0; i < 16; i++) {
            DLManagedTensor *t = loading.take(i);
            CHECK(loading.info().live_bytes <= kSlab + kSlab / 4);
            t->deleter(t);
        }
    }
    check_nothing_leaked();
}

TEST(cuda_a_fetch_that_fails_keeps_what_arrived) {
    fake().reset();
    Producer producer(kSlab);
    producer.arrive(kSlab / 2);
    {
        Loading loading(producer, rows(4, kSlab / 4));
        DLManagedTensor *t = loading.take(1);
        producer.fail(6, "503", "");
        REFUSED(thaw_load_wait(loading.load, 3, kLong), THAW_FETCH_FAILED, "the fetch failed");
        REFUSED(thaw_load_wait(loading.load, 2, kLong), THAW_FETCH_FAILED, "the fetch failed");
        OK(thaw_load_wait(loading.load, 0, kLong));
        CHECK(is_pattern(t->dl_tensor.data, kSlab / 4, kSlab / 4));
        t->deleter(t);
    }
    check_nothing_leaked();
}

TEST(cuda_closing_a_load_wakes_who_waits) {
    fake().reset();
    Producer producer(kSlab);
    producer.arrive(1000);
    {
        Loading loading(producer, rows(4, kSlab / 4));
        int host = -1, stream = -1;
        std::thread first([&] { host = thaw_load_wait(loading.load, 0, kLong); });
        std::thread second([&] { stream = thaw_load_wait_stream(loading.load, 3, 0, kLong); });
        OK(thaw_load_close(loading.load));
        first.join(), second.join();
        CHECK_EQ(host, int(THAW_CLOSED));
        CHECK_EQ(stream, int(THAW_CLOSED));
    }
    check_nothing_leaked();
}

TEST(cuda_without_a_driver_the_feature_is_off_and_says_why) {
    fake().reset();
    thaw_device *device = nullptr;
    thaw_device_config config = small_config();
    config.libcuda = "/nowhere/libcuda.so.1";
    REFUSED(thaw_device_open(&config, &device), THAW_NO_DEVICE, "/nowhere/libcuda.so.1");
    config.libcuda = "libc.so.6";
    REFUSED(thaw_device_open(&config, &device), THAW_NO_DEVICE, "has no cuGetProcAddress_v2");
    config = small_config();
    fake().fail_always("missing cuMemHostRegister", 1);
    REFUSED(thaw_device_open(&config, &device), THAW_NO_DEVICE, "libcuda has no cuMemHostRegister of version 6050");
    fake().reset();
    fake().fail_always("cuInit", 100);
    OK(thaw_device_open(&config, &device));
    REFUSED(thaw_device_ready(device, kLong), THAW_NO_DEVICE, "cuInit: CUDA_ERROR_NO_DEVICE (100)");
    thaw_device_free(device);
    fake().reset();
    config.ordinal = 3;
    OK(thaw_device_open(&config, &device));
    REFUSED(thaw_device_ready(device, kLong), THAW_NO_DEVICE, "cuDeviceGet");
    thaw_device_free(device);
    check_nothing_leaked();
}

// In a whole load, the nth call of one kind fails: the load succeeds in another way or reports the error, and nothing
// hangs or leaks.
TEST(cuda_any_call_may_fail_at_any_time) {
    const char *const calls[] = {
        "cuInit", "cuDeviceGet", "cuDeviceGetName", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain",
        "cuCtxGetStreamPriorityRange", "cuStreamCreateWithPriority", "cuMemAlloc", "cuMemHostAlloc",
        "cuMemHostRegister", "cuEventCreate", "cuEventRecord", "cuEventSynchronize", "cuStreamWaitEvent",
        "cuMemcpyHtoDAsync", "cuCtxPushCurrent"};
    const int kAlways = 0;
    int failed = 0, survived = 0;
    for (const char *call : calls)
        for (const int nth : {1, 2, 5, kAlways}) {
            fake().reset();
            if (nth == kAlways)
                fake().fail_always(call, 700);
            else
                fake().fail(call, nth, strcmp(call, "cuMemAlloc") == 0 ? 2 : 700);
            Producer producer(kSlab);
            producer.arrive(kSlab / 3);
            {
                thaw_device_config config = small_config();
                config.register_bytes = 256 << 10;
                Loading loading(producer, rows(16, kSlab / 16, 0, 2), config);
                if (nth != kAlways) producer.complete();
                bool all = true;
                for (size_t i = 0; i < 4; i++) {
                    const int status = thaw_load_wait(loading.load, i, kLong);
                    all = all && status == THAW_OK;
                    if (status != THAW_OK) {
                        CHECK(status == THAW_DEVICE || status == THAW_NO_DEVICE || status == THAW_OUT_OF_MEMORY);
                        CHECK(strncmp(thaw_error(), "cu", 2) == 0);
                        continue;
                    }
                    DLManagedTensor *t = nullptr;
                    OK(thaw_load_tensor(loading.load, i, &t));
                    CHECK(is_pattern(t->dl_tensor.data, loading.table[i].offset, loading.table[i].n_bytes));
                    t->deleter(t);
                }
                (all ? survived : failed)++;
            }
            fake().reset();
            check_nothing_leaked();
        }
    CHECK(failed >= 20);
    CHECK(survived >= 8);
}

// ── the fake itself ──────────────────────────────────────────────────────────────────────────────────────────────

namespace {

struct Rule {
    const char *what;
    const char *sentence;
    std::function<void()> break_it;
};

const std::vector<Rule> &broken_rules() {
    static char host[4096] __attribute__((aligned(4096)));
    static const auto device = [](auto then) {
        const uintptr_t pointer = FakeMemory::on_device().allocate(4096);
        FakeStream stream;
        const InContext here;
        then(pointer, reinterpret_cast<void *>(stream.handle()));
    };
    static const std::vector<Rule> rules = {
        {"context", "on a thread without the context", [] { open_fake(small_config()), fake().alloc(nullptr, 1); }},
        {"unpinned", "host memory that is not pinned",
         [] { device([](uintptr_t p, void *s) { fake().to_device(p, host, 16, s); }); }},
        {"bounds", "outside device memory, or freed", [] {
             device([](uintptr_t p, void *s) {
                 void *pinned;
                 fake().host_alloc(&pinned, 8192, 0);
                 fake().to_device(p, pinned, 4097, s);
             });
         }},
        {"in-use", "while a copy still uses the memory", [] {
             device([](uintptr_t p, void *s) {
                 void *pinned;
                 fake().host_alloc(&pinned, 4096, 0);
                 fake().delay_us(1'000'000);
                 fake().to_device(p, pinned, 4096, s);
                 fake().free(p);
             });
         }},
        {"twice", "no allocation, or twice", [] {
             device([](uintptr_t p, void *) { fake().free(p), fake().free(p); });
         }},
        {"unrecorded", "never recorded: nothing would be waited for", [] {
             device([](uintptr_t, void *s) {
                 void *event;
                 fake().event_create(&event, 2);
                 fake().stream_wait(s, event, 0);
             });
         }},
        {"read-only", "into memory registered read-only", [] {
             device([](uintptr_t p, void *s) {
                 fake().host_register(host, 4096, 0x09);
                 fake().to_host(host, p, 16, s);
             });
         }},
    };
    return rules;
}

}  // namespace

int thaw_test::misuse(const char *what) {
    for (const Rule &rule : broken_rules())
        if (strcmp(rule.what, what) == 0) rule.break_it();
    return 0;
}

TEST(cuda_the_fake_ends_a_program_that_breaks_its_rules) {
    for (const Rule &rule : broken_rules()) {
        char self[4096];
        const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
        CHECK(n > 0);
        const std::string command = "'" + std::string(self, size_t(n)) + "' --misuse " + rule.what + " 2>&1";
        FILE *output = popen(command.c_str(), "re");
        CHECK(output != nullptr);
        std::string said;
        char line[512];
        while (fgets(line, sizeof line, output) != nullptr) said += line;
        CHECK(pclose(output) != 0);
        if (said.find(rule.sentence) == std::string::npos)
            fail(__FILE__, __LINE__, std::string(rule.what) + " said: " + said);
    }
}
