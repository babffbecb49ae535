#include "cuda_load.h"

#include <algorithm>
#include <thread>

#include "pinner.h"

namespace thaw {

namespace {

constexpr uint64_t kTensorAlignment = 256;  // the alignment of cuMemAlloc; kernels read wide words
constexpr int64_t kContextDeadlineNs = 120'000'000'000;

// Counts the device memory of the groups, from before its allocation until it is freed.
class Budget {
   public:
    explicit Budget(uint64_t window_bytes) : window_bytes_(window_bytes) {}

    // Waits until n bytes fit or nothing is held.  A caller that waits for `group` may need one tensor more than the
    // window allows; it only waits until the released memory is freed, which needs no further action.  Returns false if
    // the budget was stopped.
    bool take(uint64_t n_bytes, size_t group) {
        std::unique_lock<std::mutex> lock(mutex_);
        changed_.wait(lock, [&] {
            return stopped_ || window_bytes_ == 0 || held_ == 0 || held_ + n_bytes <= window_bytes_ ||
                   (group < demanded_ && leaving_ == 0);
        });
        held_ += n_bytes;
        return !stopped_;
    }
    // Gives back bytes that were taken but not allocated.
    void give_back(uint64_t n_bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        held_ -= n_bytes;
        changed_.notify_all();
    }
    // The memory has no user any more; a call of `freed` follows.
    void let_go(uint64_t n_bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        leaving_ += n_bytes;
    }
    void freed(uint64_t n_bytes) {
        const std::lock_guard<std::mutex> lock(mutex_);
        held_ -= n_bytes, leaving_ -= n_bytes;
        changed_.notify_all();
    }
    void demand(size_t group) {
        const std::lock_guard<std::mutex> lock(mutex_);
        demanded_ = std::max(demanded_, group + 1);
        changed_.notify_all();
    }
    void stop() {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
        changed_.notify_all();
    }

   private:
    std::mutex mutex_;
    std::condition_variable changed_;
    const uint64_t window_bytes_;
    uint64_t held_ = 0;     // includes leaving_
    uint64_t leaving_ = 0;  // released, but not yet freed
    size_t demanded_ = 0;
    bool stopped_ = false;
};

// A group's memory, which is released when the load and all its tensors have released it.
struct Buffer {
    Buffer(std::shared_ptr<CudaDevice> device, std::shared_ptr<Budget> budget, std::shared_ptr<Ticket> ticket,
           uint64_t n_bytes)
        : device(std::move(device)),
          budget(std::move(budget)),
          ticket(std::move(ticket)),
          n_bytes(n_bytes),
          pointer(this->device->allocate(n_bytes)) {}
    ~Buffer() {
        budget->let_go(n_bytes);
        device->free_later(pointer, n_bytes, std::move(ticket), [budget = budget, n = n_bytes] { budget->freed(n); });
    }
    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    const std::shared_ptr<CudaDevice> device;
    const std::shared_ptr<Budget> budget;
    std::shared_ptr<Ticket> ticket;
    const uint64_t n_bytes;
    const cuda::Pointer pointer;
};

struct Group {
    size_t first, end;  // tensors
    Priority priority;
    uint64_t n_bytes = 0;
    std::shared_ptr<Ticket> ticket;
    std::shared_ptr<Buffer> buffer;  // held until the last tensor of the group was taken
    size_t untaken = 0;
};

class CudaLoad final : public Load {
   public:
    CudaLoad(std::shared_ptr<CudaDevice> device, std::shared_ptr<Segment> segment, std::vector<thaw_tensor> tensors,
             uint64_t window_bytes)
        : Load(std::move(segment), std::move(tensors)),
          device_(std::move(device)),
          budget_(std::make_shared<Budget>(window_bytes)) {
        make_groups();
        follower_ = std::thread([this] { follow(); });
    }

    ~CudaLoad() override {
        close();
        follower_.join();
        for (Group &group : groups_) group.ticket->wait_ended();
        pinner_.reset();  // after the last copy from the segment
    }

    void wait(size_t i, const Deadline &deadline) override { demanded(i).ticket->wait_done(deadline); }
    void wait_on_stream(size_t i, uintptr_t stream, const Deadline &deadline) override {
        device_->wait_on_stream(stream, *demanded(i).ticket, deadline);
    }

    DLManagedTensor *take(size_t i) override {
        const thaw_tensor &t = row(i);
        Group &group = groups_[group_of_[i]];
        group.ticket->wait_issued(Deadline(0));
        mark_taken(i);
        const std::lock_guard<std::mutex> lock(mutex_);
        std::shared_ptr<Buffer> buffer = group.buffer;
        if (--group.untaken == 0) group.buffer.reset();
        void *data = reinterpret_cast<void *>(buffer->pointer + place_[i]);
        return export_tensor(t, data, {kDLCUDA, device_->ordinal()}, std::move(buffer));
    }

    void close() override {
        stopped_.ring();
        budget_->stop();
        const std::lock_guard<std::mutex> lock(mutex_);
        if (pinner_ != nullptr) pinner_->stop();
    }

   private:
    void make_groups() {
        for (size_t i = 0; i < tensors_.size(); i++) {
            const thaw_tensor &t = tensors_[i];
            if (i == 0 || t.group != tensors_[i - 1].group) {
                const auto priority = t.background != 0 ? Priority::kBackground : Priority::kCritical;
                groups_.push_back({i, i, priority, 0, device_->make_ticket(), nullptr, 0});
            }
            Group &group = groups_.back();
            group_of_.push_back(groups_.size() - 1);
            place_.push_back(group.n_bytes);
            group.n_bytes += (t.n_bytes + kTensorAlignment - 1) / kTensorAlignment * kTensorAlignment;
            group.end = i + 1, group.untaken++;
        }
    }

    Group &demanded(size_t i) {
        row(i);
        budget_->demand(group_of_[i]);
        return groups_[group_of_[i]];
    }

    void follow() {
        size_t next = 0;  // the first group whose ticket the lane does not have yet
        try {
            device_->ready(Deadline(kContextDeadlineNs));
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                pinner_ = std::make_unique<Pinner>(device_, segment_);
            }
            if (stopped_.rung()) pinner_->stop();
            for (; next < groups_.size(); next++) copy(groups_[next]);
        } catch (const Fault &fault) {
            give_up(next, fault);
        } catch (const std::exception &e) {  // e.g. no memory for a piece, or no thread for the pinner
            give_up(next, Fault(THAW_SYSTEM, e.what()));
        }
    }

    void give_up(size_t from, const Fault &fault) {
        for (size_t g = from; g < groups_.size(); g++) {
            groups_[g].ticket->note(fault);
            groups_[g].ticket->finish();
        }
    }

    // Throws Fault if no piece of the group was submitted.  A later fault is noted in the group's ticket; the next
    // group then meets faults of its own.
    void copy(Group &group) {
        allocate(group);
        Piece piece = new_piece(group);
        try {
            for (size_t i = group.first; i < group.end; i++) copy_tensor(group, i, piece);
        } catch (const Fault &fault) {
            group.ticket->note(fault);
        }
        piece.last = true;  // even an empty piece is submitted: it ends the ticket behind the earlier pieces
        device_->submit(std::move(piece), group.priority);
    }

    void allocate(Group &group) {
        const uint64_t n_bytes = std::max<uint64_t>(group.n_bytes, kTensorAlignment);
        if (!budget_->take(n_bytes, size_t(&group - groups_.data()))) {
            budget_->give_back(n_bytes);
            throw Fault(THAW_CLOSED, "the load was closed");
        }
        try {
            auto buffer = std::make_shared<Buffer>(device_, budget_, group.ticket, n_bytes);
            const std::lock_guard<std::mutex> lock(mutex_);
            group.buffer = std::move(buffer);
        } catch (const Fault &) {
            budget_->give_back(n_bytes);
            throw;
        }
    }

    void copy_tensor(Group &group, size_t i, Piece &piece) {
        const thaw_tensor &t = tensors_[i];
        const uint64_t end = end_of(i);
        if (segment_->end() < end) {
            flush(group, piece);  // submit the bytes that have arrived before waiting for more
            segment_->wait(end, Deadline(INT64_MAX), &stopped_);
        }
        for (uint64_t at = 0; at < t.n_bytes;) {
            bool pinned = false;
            const size_t reach = pinner_->reach(t.offset + at, t.n_bytes - at, &pinned);
            if (stopped_.rung()) throw Fault(THAW_CLOSED, "the load was closed");
            if (pinned != piece.pinned || piece.n_bytes >= device_->piece_bytes(piece.pinned)) flush(group, piece);
            piece.pinned = pinned;
            const size_t n = std::min(reach, device_->piece_bytes(pinned) - piece.n_bytes);
            piece.add({group.buffer->pointer + place_[i] + at, const_cast<char *>(segment_->at(t.offset + at)), n});
            at += n;
        }
    }

    void flush(const Group &group, Piece &piece) {
        if (piece.n_bytes > 0) device_->submit(std::move(piece), group.priority);
        piece = new_piece(group);
    }

    static Piece new_piece(const Group &group) {
        Piece piece;
        piece.direction = Direction::kToDevice;
        piece.ticket = group.ticket;
        return piece;
    }

    const std::shared_ptr<CudaDevice> device_;
    const std::shared_ptr<Budget> budget_;
    std::vector<Group> groups_;
    std::vector<size_t> group_of_;   // by tensor
    std::vector<uint64_t> place_;    // in the group's buffer, by tensor
    std::mutex mutex_;               // protects the groups' buffers and the pinner_ pointer
    std::unique_ptr<Pinner> pinner_;
    Bell stopped_;
    std::thread follower_;
};

}  // namespace

std::unique_ptr<Load> open_cuda_load(std::shared_ptr<CudaDevice> device, std::shared_ptr<Segment> segment,
                                     std::vector<thaw_tensor> tensors, uint64_t window_bytes) {
    return std::make_unique<CudaLoad>(std::move(device), std::move(segment), std::move(tensors), window_bytes);
}

}  // namespace thaw
