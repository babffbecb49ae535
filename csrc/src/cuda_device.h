// A CUDA device through its primary context, which torch shares.  The context is never reset, and it is released with
// the last object that uses it.
//
// One thread makes the context while the caller imports.  Afterwards this thread destroys the objects that other
// threads release: a tensor's deleter may run on any thread, and must neither wait nor touch that thread's context.
#pragma once

#include <functional>
#include <map>
#include <thread>
#include <vector>

#include "device.h"
#include "lane.h"

namespace thaw {

class CudaDevice final : public Device, public std::enable_shared_from_this<CudaDevice> {
   public:
    // Loads the driver and resolves every call, on the caller's thread.
    explicit CudaDevice(const thaw_device_config &config);
    ~CudaDevice() override;

    int ordinal() const override { return config_.ordinal; }
    void ready(const Deadline &deadline) override;
    void describe(thaw_device_info *info) override;
    size_t piece_bytes(bool pinned) const override;
    void submit(Piece piece, Priority priority) override;
    std::shared_ptr<Ticket> make_ticket() override;
    cuda::Event mark(uintptr_t stream) override;
    void wait_on_stream(uintptr_t stream, Ticket &ticket, const Deadline &deadline) override;

    // ── for lanes and loads; only after the device is ready ──
    const cuda::Api &api() const { return api_; }
    void check(cuda::Result result, const char *call) const { api_.check(result, call); }
    // Makes the context current on one of our own threads, for the thread's whole life.
    void make_current() { api_.CtxSetCurrent(context_); }
    size_t in_flight_bytes() const { return config_.in_flight_bytes; }
    size_t register_bytes() const { return config_.register_bytes; }
    size_t slot_bytes() const { return config_.slot_bytes; }
    bool may_register() const { return config_.never_register == 0 && read_only_register_; }
    char *allocate_host(size_t n_bytes);
    void free_host(char *memory);
    void count_copied(size_t n_bytes, bool bounced);

    // These calls may be made on any thread.  Pins of the same range are counted.  Returns false if the driver refuses.
    bool pin(const char *host, size_t n_bytes);
    void unpin(const char *host);
    cuda::Pointer allocate(size_t n_bytes);
    // The device's own thread frees the memory after `ticket` has ended, and then calls `freed`.
    void free_later(cuda::Pointer pointer, size_t n_bytes, std::shared_ptr<Ticket> ticket,
                    std::function<void()> freed);
    void discard(cuda::Event event);

   private:
    class Current;  // makes the context current on a thread that is not ours, for one block
    struct Garbage {
        cuda::Event event = nullptr;
        cuda::Pointer pointer = 0;
        size_t n_bytes = 0;
        std::shared_ptr<Ticket> ticket;
        std::function<void()> freed;
    };
    struct Pin {
        size_t uses;
        bool ours;  // false: other code registered the range and will unregister it
    };

    void run();
    void make_context();
    void collect_garbage();
    bool destroy_some();
    void destroy(const Garbage &garbage);

    const cuda::Api api_;
    const thaw_device_config config_;
    cuda::Device device_ = 0;
    cuda::Context context_ = nullptr;
    bool read_only_register_ = false;
    std::vector<cuda::Stream> streams_;
    std::unique_ptr<Lane> critical_, background_;
    thaw_device_info info_{};
    std::atomic<uint64_t> registered_{0}, bounced_{0}, copied_{0}, live_{0};

    std::mutex pins_mutex_;
    std::map<const char *, Pin> pins_;

    std::mutex mutex_;
    std::condition_variable changed_;
    enum { kStarting, kReady, kFailed } state_ = kStarting;
    Fault failure_{THAW_OK, ""};
    std::vector<Garbage> garbage_;
    bool closing_ = false;
    std::thread thread_;
};

}  // namespace thaw
