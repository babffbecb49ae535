// The host as a device: the segment is mapped into its memory, and one thread does the copying.
#include <cstring>
#include <deque>
#include <thread>

#include "device.h"

namespace thaw {

namespace {

constexpr size_t kPieceBytes = 16u << 20;

class CpuDevice final : public Device {
   public:
    ~CpuDevice() override {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            closing_ = true;
            changed_.notify_all();
        }
        if (copier_.joinable()) copier_.join();
    }

    void ready(const Deadline &) override {}
    size_t piece_bytes(bool) const override { return kPieceBytes; }
    std::shared_ptr<Ticket> make_ticket() override { return std::make_shared<Ticket>(); }
    cuda::Event mark(uintptr_t) override { return nullptr; }
    void wait_on_stream(uintptr_t, Ticket &ticket, const Deadline &deadline) override { ticket.wait_done(deadline); }

    void describe(thaw_device_info *info) override {
        *info = {};
        info->copied_bytes = copied_.load();
        std::strcpy(info->name, "CPU");
    }

    void submit(Piece piece, Priority priority) override {
        const std::lock_guard<std::mutex> lock(mutex_);
        (priority == Priority::kCritical ? critical_ : background_).push_back(std::move(piece));
        if (!copier_.joinable()) copier_ = std::thread([this] { run(); });
        changed_.notify_all();
    }

   private:
    void run() {
        std::unique_lock<std::mutex> lock(mutex_);
        while (true) {
            changed_.wait(lock, [&] { return closing_ || !critical_.empty() || !background_.empty(); });
            auto &queue = critical_.empty() ? background_ : critical_;
            if (queue.empty()) return;  // the device is closing, and no piece is left
            const Piece piece = std::move(queue.front());
            queue.pop_front();
            lock.unlock();
            copy(piece);
            lock.lock();
        }
    }

    void copy(const Piece &piece) {
        for (const Part &part : piece.parts) {
            auto *device = reinterpret_cast<char *>(part.device);
            if (piece.direction == Direction::kToDevice)
                std::memcpy(device, part.host, part.n_bytes);
            else
                std::memcpy(part.host, device, part.n_bytes);
        }
        copied_ += piece.n_bytes;
        if (piece.last) piece.ticket->finish();
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Piece> critical_, background_;
    bool closing_ = false;
    std::thread copier_;
    std::atomic<uint64_t> copied_{0};
};

}  // namespace

std::shared_ptr<Device> open_cpu() { return std::make_shared<CpuDevice>(); }

}  // namespace thaw
