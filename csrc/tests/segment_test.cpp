// Segments through the C ABI: following the watermark, and control pages with false values.
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <thread>

#include "check.h"
#include "support.h"

using namespace thaw_test;

namespace {

// Runs `wait` on another thread until it sleeps in the kernel.
class Sleeper {
   public:
    template <typename Wait>
    explicit Sleeper(Wait wait) : thread_([this, wait] {
          tid_ = gettid();
          status_ = wait();
      }) {
        while (!asleep()) std::this_thread::yield();
    }
    int join() {
        thread_.join();
        return status_;
    }

   private:
    bool asleep() const {
        const int tid = tid_;
        if (tid == 0) return false;
        FILE *stat = fopen(thaw::format("/proc/self/task/%d/stat", tid).c_str(), "re");
        if (stat == nullptr) return true;  // the thread has already ended
        char state = 0;
        const int n = fscanf(stat, "%*d %*s %c", &state);
        fclose(stat);
        return n == 1 && state == 'S';
    }

    std::atomic<int> tid_{0};
    int status_ = -1;
    std::thread thread_;
};

}  // namespace

TEST(slabs_lie_one_behind_the_other_and_read_only) {
    Producer producer(2 * kSlab + 1234);
    thaw_segment *segment = producer.open();
    producer.complete();
    uint64_t have = 0;
    OK(thaw_segment_wait(segment, producer.n_bytes(), 0, &have));
    CHECK_EQ(have, producer.n_bytes());
    const uintptr_t address = thaw_segment_address(segment);
    CHECK_EQ(address % kSlab, uintptr_t(0));
    CHECK(is_pattern(reinterpret_cast<void *>(address), 0, producer.n_bytes()));
    CHECK(mprotect(reinterpret_cast<void *>(address), kSlab, PROT_READ) == 0);
    thaw_segment_free(segment);
}

TEST(a_waiter_is_woken_by_the_chunk) {
    Producer producer(kSlab);
    thaw_segment *segment = producer.open();
    for (uint64_t end = 1000; end <= 5000; end += 1000) {
        uint64_t have = 0;
        Sleeper waiter([&] { return thaw_segment_wait(segment, end, kLong, &have); });
        producer.arrive(end);
        CHECK_EQ(waiter.join(), int(THAW_OK));
        CHECK_EQ(have, end);
    }
    thaw_segment_free(segment);
}

TEST(close_wakes_every_waiter_and_refuses_what_comes_later) {
    Producer producer(kSlab);
    thaw_segment *segment = producer.open();
    uint64_t have = 0, also = 0;
    Sleeper first([&] { return thaw_segment_wait(segment, 1, kLong, &have); });
    Sleeper second([&] { return thaw_segment_wait(segment, kSlab, kLong, &also); });
    OK(thaw_segment_close(segment));
    CHECK_EQ(first.join(), int(THAW_CLOSED));
    CHECK_EQ(second.join(), int(THAW_CLOSED));
    REFUSED(thaw_segment_wait(segment, 0, 0, &have), THAW_CLOSED, "was closed");
    thaw_segment_free(segment);
}

TEST(a_failed_fetch_says_why_and_what_arrived_stays_good) {
    Producer producer(kSlab);
    thaw_segment *segment = producer.open();
    producer.arrive(100);
    producer.fail(3, "chunk 3 failed", "push again");
    uint64_t have = 0;
    OK(thaw_segment_wait(segment, 100, 0, &have));
    REFUSED(thaw_segment_wait(segment, 101, kLong, &have), THAW_FETCH_FAILED, "the fetch failed");
    thaw_failure failure;
    OK(thaw_segment_failure(segment, &failure));
    CHECK_EQ(failure.code, 3u);
    CHECK(strcmp(failure.message, "chunk 3 failed") == 0 && strcmp(failure.hint, "push again") == 0);
    thaw_segment_free(segment);
}

TEST(a_passed_deadline_and_a_dead_fetchd_are_told_apart) {
    Producer producer(kSlab);
    thaw_segment *segment = producer.open();
    uint64_t have = 0;
    REFUSED(thaw_segment_wait(segment, 5, 20'000'000, &have), THAW_TIMED_OUT,
            "0 of the 5 bytes wanted had arrived after 0.02 s");
    producer.beat(thaw::kDeadAfterNs + kSecond / 10);
    REFUSED(thaw_segment_wait(segment, 5, kLong, &have), THAW_FETCH_DIED,
            "the fetch stopped at byte 0 of 2097152: no heartbeat for 3 s");
    REFUSED(thaw_segment_wait(segment, kSlab + 1, 0, &have), THAW_BAD_ARGUMENT, "waiting for byte 2097153");
    thaw_segment_free(segment);
}

TEST(a_page_that_lies_is_refused_while_it_is_followed) {
    Producer producer(kSlab);
    thaw_segment *segment = producer.open();
    uint64_t have = 0;
    producer.arrive(5000);
    OK(thaw_segment_wait(segment, 5000, 0, &have));
    Sleeper waiter([&] { return thaw_segment_wait(segment, 6000, kLong, &have); });
    __atomic_store_n(&producer.page().end, 4000, __ATOMIC_RELEASE);
    producer.announce();
    CHECK_EQ(waiter.join(), int(THAW_BAD_SEGMENT));
    thaw_segment_free(segment);
}

TEST(descriptors_that_make_no_segment_are_refused) {
    Producer producer(2 * kSlab);
    thaw_segment *segment = nullptr;
    const std::vector<int> &fds = producer.fds();
    REFUSED(thaw_segment_open(fds.data(), 2, 2 * kSlab, kSlab, &segment), THAW_BAD_SEGMENT, "came with 2 descriptors");
    REFUSED(thaw_segment_open(fds.data(), 0, 0, kSlab, &segment), THAW_BAD_SEGMENT, "no segment");
    REFUSED(thaw_segment_open(fds.data(), 3, 2 * kSlab, 1000, &segment), THAW_BAD_SEGMENT, "no segment");
    REFUSED(thaw_segment_open(fds.data(), 3, 2 * kSlab, UINT64_MAX & ~4095ull, &segment), THAW_BAD_SEGMENT, "");
    REFUSED(thaw_segment_open(fds.data(), 3, 2 * kSlab - 1, kSlab, &segment), THAW_BAD_SEGMENT, "the offer 4194303");
    REFUSED(thaw_segment_open(fds.data(), 3, 2 * kSlab, 2 * kSlab, &segment), THAW_BAD_SEGMENT, "has 2097152 bytes");
    const int swapped[] = {fds[1], fds[0], fds[2]};
    REFUSED(thaw_segment_open(swapped, 3, 2 * kSlab, kSlab, &segment), THAW_BAD_SEGMENT, "not a control page");
    const int closed[] = {fds[0], fds[1], 1 << 20};
    REFUSED(thaw_segment_open(closed, 3, 2 * kSlab, kSlab, &segment), THAW_SYSTEM, "descriptor 1048576");
    REFUSED(thaw_segment_open(nullptr, 3, 0, kSlab, &segment), THAW_BAD_ARGUMENT, "NULL");
}

TEST(an_older_kernel_follows_segments_too) {
    char self[4096];
    const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    CHECK(n > 0);
    const std::string program = "'" + std::string(self, size_t(n)) + "' --old-kernel '" + vectors_directory + "' ";
    for (const char *word : {"a_waiter_is_woken", "close_wakes_every_waiter", "cuda_what_arrives_slowly"})
        CHECK_EQ(system((program + word + " >/dev/null").c_str()), 0);
}
