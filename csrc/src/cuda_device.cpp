#include "cuda_device.h"

#include <algorithm>

namespace thaw {

namespace {

constexpr uint64_t kMiB = 1u << 20;
constexpr int kCriticalStreams = 2;

thaw_device_config with_defaults(thaw_device_config c) {
    if (c.piece_bytes == 0) c.piece_bytes = 16 * kMiB;
    if (c.in_flight_bytes == 0) c.in_flight_bytes = 64 * kMiB;
    if (c.register_bytes == 0) c.register_bytes = 64 * kMiB;
    if (c.slot_bytes == 0) c.slot_bytes = 32 * kMiB;
    if (c.n_slots == 0) c.n_slots = 4;
    constexpr uint64_t kPage = 4096;
    c.register_bytes = (c.register_bytes + kPage - 1) / kPage * kPage;
    c.libcuda = nullptr;  // the caller's string
    return c;
}

}  // namespace

class CudaDevice::Current {
   public:
    explicit Current(const CudaDevice &device) : device_(device) {
        device_.check(device_.api_.CtxPushCurrent(device_.context_), "CtxPushCurrent");
    }
    ~Current() {
        cuda::Context gone;
        device_.api_.CtxPopCurrent(&gone);
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

   private:
    const CudaDevice &device_;
};

CudaDevice::CudaDevice(const thaw_device_config &config)
    : api_(cuda::load(config.libcuda != nullptr ? config.libcuda : "libcuda.so.1")), config_(with_defaults(config)) {
    thread_ = std::thread([this] { run(); });
}

CudaDevice::~CudaDevice() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }
    thread_.join();
}

// ── the device's own thread ──────────────────────────────────────────────────────────────────────────────────────

void CudaDevice::run() {
    bool made = false;
    try {
        make_context();
        made = true;
    } catch (const Fault &fault) {
        const std::lock_guard<std::mutex> lock(mutex_);
        failure_ = fault;
    }
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        state_ = made ? kReady : kFailed;
        changed_.notify_all();
    }
    collect_garbage();
    background_.reset();  // joins its threads; must come before the reset of the lane that it yields to
    critical_.reset();
    while (destroy_some()) {  // destroying a ticket may discard its event
    }
    for (const cuda::Stream stream : streams_) api_.StreamDestroy(stream);
    if (context_ != nullptr) {
        api_.CtxSetCurrent(nullptr);
        api_.DevicePrimaryCtxRelease(device_);
    }
}

void CudaDevice::make_context() {
    const int64_t began = now_ns();
    const auto need = [&](cuda::Result result, const char *call) {
        if (result == cuda::kSuccess) return;
        throw Fault(THAW_NO_DEVICE, format("cu%s: %s", call, api_.name_of(result).c_str()));
    };
    need(api_.Init(0), "Init");
    need(api_.DriverGetVersion(&info_.driver_version), "DriverGetVersion");
    need(api_.DeviceGet(&device_, config_.ordinal), "DeviceGet");
    need(api_.DeviceGetName(info_.name, sizeof info_.name, device_), "DeviceGetName");
    int read_only = 0;
    api_.DeviceGetAttribute(&read_only, cuda::kReadOnlyHostRegisterSupported, device_);  // stays 0 with old drivers
    read_only_register_ = read_only != 0;
    need(api_.DevicePrimaryCtxRetain(&context_, device_), "DevicePrimaryCtxRetain");
    need(api_.CtxSetCurrent(context_), "CtxSetCurrent");
    int least = 0, greatest = 0;
    need(api_.CtxGetStreamPriorityRange(&least, &greatest), "CtxGetStreamPriorityRange");
    for (int i = 0; i <= kCriticalStreams; i++) {
        cuda::Stream stream = nullptr;
        const int priority = i < kCriticalStreams ? greatest : least;
        need(api_.StreamCreateWithPriority(&stream, cuda::kStreamNonBlocking, priority), "StreamCreateWithPriority");
        streams_.push_back(stream);
    }
    const std::vector<cuda::Stream> critical(streams_.begin(), streams_.end() - 1);
    critical_ = std::make_unique<Lane>(*this, critical, config_.n_slots, nullptr);
    const size_t background_slots = std::max<size_t>(1, config_.n_slots / 2);
    background_ = std::make_unique<Lane>(*this, std::vector<cuda::Stream>{streams_.back()}, background_slots,
                                         critical_.get());
    info_.context = reinterpret_cast<uintptr_t>(context_);
    info_.context_ns = uint64_t(now_ns() - began);
}

void CudaDevice::collect_garbage() {
    while (true) {
        {
            std::unique_lock<std::mutex> lock(mutex_);
            changed_.wait(lock, [&] { return closing_ || !garbage_.empty(); });
            if (closing_) return;
        }
        destroy_some();
    }
}

// Returns false if there was nothing to destroy.
bool CudaDevice::destroy_some() {
    std::vector<Garbage> taken;
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        taken.swap(garbage_);
    }
    for (const Garbage &garbage : taken) destroy(garbage);
    return !taken.empty();
}

// Failures are ignored: after a device error every call reports the error, so the next wait reports it, too.
void CudaDevice::destroy(const Garbage &garbage) {
    if (garbage.ticket != nullptr) garbage.ticket->wait_ended();
    if (garbage.event != nullptr) api_.EventDestroy(garbage.event);
    if (garbage.pointer != 0) {
        api_.MemFree(garbage.pointer);  // waits for all work of a consumer's stream that still uses the memory
        live_ -= garbage.n_bytes;
        garbage.freed();
    }
}

// ── Device ───────────────────────────────────────────────────────────────────────────────────────────────────────

void CudaDevice::ready(const Deadline &deadline) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (!deadline.wait(changed_, lock, [&] { return state_ != kStarting; }))
        throw Fault(THAW_TIMED_OUT, format("no CUDA context after %g s", deadline.seconds()));
    if (state_ == kFailed) throw failure_;
}

void CudaDevice::describe(thaw_device_info *info) {
    const std::lock_guard<std::mutex> lock(mutex_);
    *info = state_ == kReady ? info_ : thaw_device_info{};
    info->cuda = 1;
    info->ordinal = config_.ordinal;
    info->read_only_register = state_ == kReady && read_only_register_;
    info->registered_bytes = registered_.load();
    info->bounced_bytes = bounced_.load();
    info->copied_bytes = copied_.load();
    info->live_bytes = live_.load();
}

size_t CudaDevice::piece_bytes(bool pinned) const {
    return pinned ? config_.piece_bytes : std::min(config_.piece_bytes, config_.slot_bytes);
}

void CudaDevice::submit(Piece piece, Priority priority) {
    (priority == Priority::kCritical ? critical_ : background_)->submit(std::move(piece));
}

std::shared_ptr<Ticket> CudaDevice::make_ticket() {
    // Every holder of a ticket also holds the device, or is one of its lanes.
    return std::make_shared<Ticket>([this](cuda::Event event) { discard(event); });
}

cuda::Event CudaDevice::mark(uintptr_t stream) {
    const Current current(*this);
    cuda::Event event = nullptr;
    check(api_.EventCreate(&event, cuda::kEventDisableTiming), "EventCreate");
    const cuda::Result result = api_.EventRecord(event, reinterpret_cast<cuda::Stream>(stream));
    if (result != cuda::kSuccess) api_.EventDestroy(event);
    check(result, "EventRecord");
    return event;
}

void CudaDevice::wait_on_stream(uintptr_t stream, Ticket &ticket, const Deadline &deadline) {
    const cuda::Event event = ticket.wait_issued(deadline);  // a stream would not wait for an event not yet recorded
    if (event == nullptr) return;
    const Current current(*this);
    check(api_.StreamWaitEvent(reinterpret_cast<cuda::Stream>(stream), event, 0), "StreamWaitEvent");
}

// ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────

char *CudaDevice::allocate_host(size_t n_bytes) {
    void *memory = nullptr;
    check(api_.MemHostAlloc(&memory, n_bytes, cuda::kHostAllocPortable), "MemHostAlloc");
    return static_cast<char *>(memory);
}

void CudaDevice::free_host(char *memory) { api_.MemFreeHost(memory); }

void CudaDevice::count_copied(size_t n_bytes, bool bounced) {
    copied_ += n_bytes;
    if (bounced) bounced_ += n_bytes;
}

bool CudaDevice::pin(const char *host, size_t n_bytes) {
    const std::lock_guard<std::mutex> lock(pins_mutex_);
    const auto found = pins_.find(host);
    if (found != pins_.end()) {
        found->second.uses++;
        return true;
    }
    const Current current(*this);
    constexpr unsigned kFlags = cuda::kHostRegisterPortable | cuda::kHostRegisterReadOnly;
    const cuda::Result result = api_.MemHostRegister(const_cast<char *>(host), n_bytes, kFlags);
    if (result != cuda::kSuccess && result != cuda::kAlreadyRegistered) return false;
    pins_[host] = Pin{1, result == cuda::kSuccess};
    registered_ += n_bytes;
    return true;
}

void CudaDevice::unpin(const char *host) {
    const std::lock_guard<std::mutex> lock(pins_mutex_);
    const auto found = pins_.find(host);
    if (found == pins_.end() || --found->second.uses > 0) return;
    if (found->second.ours) {
        const Current current(*this);
        api_.MemHostUnregister(const_cast<char *>(host));
    }
    pins_.erase(found);
}

cuda::Pointer CudaDevice::allocate(size_t n_bytes) {
    const Current current(*this);
    cuda::Pointer pointer = 0;
    check(api_.MemAlloc(&pointer, n_bytes), "MemAlloc");
    live_ += n_bytes;
    return pointer;
}

void CudaDevice::free_later(cuda::Pointer pointer, size_t n_bytes, std::shared_ptr<Ticket> ticket,
                            std::function<void()> freed) {
    Garbage garbage;
    garbage.pointer = pointer, garbage.n_bytes = n_bytes, garbage.ticket = std::move(ticket);
    garbage.freed = std::move(freed);
    const std::lock_guard<std::mutex> lock(mutex_);
    garbage_.push_back(std::move(garbage));
    changed_.notify_all();
}

void CudaDevice::discard(cuda::Event event) {
    Garbage garbage;
    garbage.event = event;
    const std::lock_guard<std::mutex> lock(mutex_);
    garbage_.push_back(std::move(garbage));
    changed_.notify_all();
}

std::shared_ptr<Device> open_cuda(const thaw_device_config &config) { return std::make_shared<CudaDevice>(config); }

}  // namespace thaw
