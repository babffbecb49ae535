#include "fake.h"

#include <dlfcn.h>
#include <string.h>
#include <unistd.h>

#include "check.h"
#include "support.h"

namespace thaw_test {

namespace {

constexpr size_t kPinned = 1u << 20;

template <typename Function>
void find(void *library, const char *name, Function &function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
    if (function == nullptr) fail(__FILE__, __LINE__, std::string("the fake lacks ") + name);
}

}  // namespace

// The fake driver lies beside the test program, where the Makefile puts it.
const char *fake_path() {
    static const std::string path = [] {
        char self[4096];
        const ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
        CHECK(n > 0);
        const std::string program(self, size_t(n));
        return program.substr(0, program.rfind('/')) + "/fake/libcuda.so.1";
    }();
    return path.c_str();
}

Fake &fake() {
    static Fake made = [] {
        void *library = dlopen(fake_path(), RTLD_NOW | RTLD_LOCAL);
        if (library == nullptr) fail(__FILE__, __LINE__, dlerror());
        Fake f;
        find(library, "fake_cuda_delay_us", f.delay_us), find(library, "fake_cuda_fail", f.fail);
        find(library, "fake_cuda_free_delay_us", f.free_delay_us);
        find(library, "fake_cuda_fail_always", f.fail_always), find(library, "fake_cuda_leaks", f.leaks);
        find(library, "fake_cuda_read_only_register", f.read_only_register);
        find(library, "fake_cuda_log_size", f.log_size), find(library, "fake_cuda_log_at", f.log_at);
        find(library, "fake_cuda_most_queued", f.most_queued);
        find(library, "cuEventCreate", f.event_create), find(library, "cuEventDestroy_v2", f.event_destroy);
        find(library, "cuStreamWaitEvent", f.stream_wait);
        find(library, "fake_cuda_reset", f.reset), find(library, "cuCtxPushCurrent", f.push);
        find(library, "cuInit", f.init), find(library, "cuDevicePrimaryCtxRetain", f.retain);
        find(library, "cuDevicePrimaryCtxRelease", f.release);
        find(library, "cuCtxPopCurrent", f.pop), find(library, "cuMemAlloc_v2", f.alloc);
        find(library, "cuMemFree_v2", f.free), find(library, "cuMemHostAlloc", f.host_alloc);
        find(library, "cuMemFreeHost", f.host_free), find(library, "cuMemHostRegister_v2", f.host_register);
        find(library, "cuMemHostUnregister", f.host_unregister);
        find(library, "cuStreamCreateWithPriority", f.stream_create);
        find(library, "cuStreamDestroy_v2", f.stream_destroy);
        find(library, "cuStreamSynchronize", f.stream_synchronize);
        find(library, "cuMemcpyHtoDAsync_v2", f.to_device), find(library, "cuMemcpyDtoHAsync_v2", f.to_host);
        return f;
    }();
    return made;
}

thaw_device_config small_config() {
    thaw_device_config config{};
    config.cuda = 1;
    config.libcuda = fake_path();
    config.piece_bytes = 64 << 10;
    config.in_flight_bytes = 256 << 10;
    config.register_bytes = 512 << 10;
    config.slot_bytes = 96 << 10;
    config.n_slots = 3;
    return config;
}

thaw_device *open_fake(thaw_device_config config) {
    thaw_device *device = nullptr;
    OK(thaw_device_open(&config, &device));
    OK(thaw_device_ready(device, kLong));
    return device;
}

// A device ends on the thread that releases it last, so nothing is pending here.
void check_nothing_leaked() {
    const FakeCudaLeaks leaks = fake().leaks();
    CHECK_EQ(leaks.contexts, 0);
    CHECK_EQ(leaks.streams, 0);
    CHECK_EQ(leaks.events, 0);
    CHECK_EQ(leaks.device_allocations, 0);
    CHECK_EQ(leaks.host_allocations, 0);
    CHECK_EQ(leaks.registrations, 0);
}

InContext::InContext() {
    void *context = nullptr;
    CHECK_EQ(fake().init(0), 0);
    CHECK_EQ(fake().retain(&context, 0), 0);
    CHECK_EQ(fake().push(context), 0);
}

InContext::~InContext() {
    void *gone;
    fake().pop(&gone);
    fake().release(0);
}

const FakeMemory &FakeMemory::on_host() {
    static const FakeMemory memory(false);
    return memory;
}

const FakeMemory &FakeMemory::on_device() {
    static const FakeMemory memory(true);
    return memory;
}

uintptr_t FakeMemory::allocate(uint64_t n_bytes) const {
    if (!device_) return reinterpret_cast<uintptr_t>(malloc(n_bytes));
    const InContext here;
    unsigned long long pointer = 0;
    CHECK_EQ(fake().alloc(&pointer, n_bytes), 0);
    return uintptr_t(pointer);
}

void FakeMemory::release(uintptr_t pointer) const {
    if (!device_) return free(reinterpret_cast<void *>(pointer));
    const InContext here;
    CHECK_EQ(fake().free(pointer), 0);
}

FakeStream::FakeStream() {
    const InContext here;
    CHECK_EQ(fake().stream_create(&stream_, 1, 0), 0);
    void *memory = nullptr;
    CHECK_EQ(fake().host_alloc(&memory, kPinned, 0), 0);
    pinned_ = static_cast<char *>(memory);
}

FakeStream::~FakeStream() {
    const InContext here;
    fake().stream_destroy(stream_);
    fake().host_free(pinned_);
}

void FakeStream::write(uintptr_t device, const std::string &bytes) {
    const InContext here;
    CHECK(used_ + bytes.size() <= kPinned);
    memcpy(pinned_ + used_, bytes.data(), bytes.size());
    CHECK_EQ(fake().to_device(device, pinned_ + used_, bytes.size(), stream_), 0);
    used_ += bytes.size();
}

std::string FakeStream::read(uintptr_t device, size_t n_bytes) {
    const InContext here;
    CHECK(used_ + n_bytes <= kPinned);
    CHECK_EQ(fake().to_host(pinned_ + used_, device, n_bytes, stream_), 0);
    CHECK_EQ(fake().stream_synchronize(stream_), 0);
    return std::string(pinned_ + used_, n_bytes);
}

}  // namespace thaw_test
