#include "support.h"

#include <limits.h>
#include <linux/futex.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

namespace thaw_test {

std::vector<Json> vectors_of(const char *file_name, const char *member) {
    const std::string path = std::string(vectors_directory) + "/" + file_name;
    FILE *file = fopen(path.c_str(), "re");
    if (file == nullptr) fail(__FILE__, __LINE__, "cannot read " + path);
    std::string text;
    char block[65536];
    for (size_t n; (n = fread(block, 1, sizeof block, file)) > 0;) text.append(block, n);
    fclose(file);
    return Json::parse(text)[member].items;
}

std::string from_hex(const std::string &hex) {
    std::string bytes;
    for (size_t i = 0; i + 1 < hex.size(); i += 2) bytes += char(strtoul(hex.substr(i, 2).c_str(), nullptr, 16));
    return bytes;
}

std::string to_hex(const std::string &bytes) {
    std::string hex;
    for (const char c : bytes) hex += thaw::format("%02x", static_cast<unsigned char>(c));
    return hex;
}

Producer::Producer(uint64_t n_bytes, uint64_t slab_bytes) : n_bytes_(n_bytes), slab_bytes_(slab_bytes) {
    const auto make = [&](uint64_t size) {
        const int fd = memfd_create("native test", MFD_CLOEXEC);
        CHECK(fd >= 0 && ftruncate(fd, off_t(size)) == 0);
        void *memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        CHECK(memory != MAP_FAILED);
        fds_.push_back(fd);
        return static_cast<char *>(memory);
    };
    page_ = reinterpret_cast<thaw::ControlPage *>(make(thaw::kPageBytes));
    memcpy(page_->magic, "THWS", 4);
    page_->version = thaw::kSegmentVersion;
    page_->n_bytes = n_bytes;
    beat();
    for (uint64_t at = 0; at < n_bytes; at += slab_bytes) slabs_.push_back(make(slab_bytes));
}

Producer::~Producer() {
    munmap(page_, thaw::kPageBytes);
    for (char *slab : slabs_) munmap(slab, slab_bytes_);
    for (const int fd : fds_) close(fd);
}

thaw_segment *Producer::open() const {
    thaw_segment *segment = nullptr;
    OK(thaw_segment_open(fds_.data(), fds_.size(), n_bytes_, slab_bytes_, &segment));
    return segment;
}

void Producer::arrive(uint64_t to) {
    for (uint64_t i = page_->end; i < to; i++) slabs_[i / slab_bytes_][i % slab_bytes_] = char(pattern(i));
    __atomic_store_n(&page_->end, to, __ATOMIC_RELEASE);
    if (to == n_bytes_) __atomic_store_n(&page_->state, uint32_t(thaw::SegmentState::kComplete), __ATOMIC_RELEASE);
    announce();
}

void Producer::fail(uint32_t code, const std::string &message, const std::string &hint) {
    memcpy(page_->text, message.data(), message.size());
    memcpy(page_->text + message.size(), hint.data(), hint.size());
    page_->error_code = code;
    page_->message_bytes = uint32_t(message.size());
    page_->hint_bytes = uint32_t(hint.size());
    __atomic_store_n(&page_->state, uint32_t(thaw::SegmentState::kFailed), __ATOMIC_RELEASE);
    announce();
}

void Producer::beat(int64_t age_ns) {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    const int64_t at = int64_t(t.tv_sec) * kSecond + t.tv_nsec - age_ns;
    __atomic_store_n(&page_->heartbeat_ns, uint64_t(at), __ATOMIC_RELAXED);
}

void Producer::announce() {
    beat();
    __atomic_fetch_add(&page_->seq, 1, __ATOMIC_RELEASE);
    syscall(SYS_futex, &page_->seq, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool is_pattern(const void *data, uint64_t offset, uint64_t n_bytes) {
    const auto *bytes = static_cast<const unsigned char *>(data);
    for (uint64_t i = 0; i < n_bytes; i++)
        if (bytes[i] != Producer::pattern(offset + i)) return false;
    return true;
}

}  // namespace thaw_test
