#include "pinner.h"

#include <algorithm>

namespace thaw {

namespace {

constexpr int64_t kForeverNs = INT64_MAX;  // the segment's heartbeat and stop() bound the wait

size_t pieces_of(uint64_t n_bytes, uint64_t piece_bytes) { return size_t((n_bytes + piece_bytes - 1) / piece_bytes); }

}  // namespace

Pinner::Pinner(std::shared_ptr<CudaDevice> device, std::shared_ptr<Segment> segment)
    : device_(std::move(device)),
      segment_(std::move(segment)),
      pieces_(pieces_of(segment_->n_bytes(), device_->register_bytes()), State::kWaiting) {
    if (device_->may_register())
        thread_ = std::thread([this] { run(); });
    else
        std::fill(pieces_.begin(), pieces_.end(), State::kNot);
}

Pinner::~Pinner() {
    stop();
    if (thread_.joinable()) thread_.join();
    for (size_t p = 0; p < pieces_.size(); p++)
        if (pieces_[p] == State::kPinned) device_->unpin(segment_->at(p * device_->register_bytes()));
}

void Pinner::stop() {
    stopped_.ring();
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
}

size_t Pinner::reach(uint64_t offset, size_t n_bytes, bool *pinned) {
    const auto piece = size_t(offset / device_->register_bytes());
    const uint64_t end = end_of(piece);
    std::unique_lock<std::mutex> lock(mutex_);
    current_ = std::max(current_, piece);
    changed_.notify_all();
    if (segment_->end() >= end)
        changed_.wait(lock, [&] { return pieces_[piece] != State::kWaiting || stopped_.rung(); });
    *pinned = pieces_[piece] == State::kPinned;
    return size_t(std::min<uint64_t>(n_bytes, end - offset));
}

uint64_t Pinner::end_of(size_t piece) const {
    return std::min<uint64_t>((piece + 1) * device_->register_bytes(), segment_->n_bytes());
}

void Pinner::run() {
    bool allowed = true;
    for (size_t p = 0; p < pieces_.size(); p++) {
        State found = State::kNot;
        try {
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait(lock, [&] { return current_ + 1 >= p || stopped_.rung(); });
            }
            segment_->wait(end_of(p), Deadline(kForeverNs), &stopped_);
            bool worth = allowed;
            {
                const std::lock_guard<std::mutex> lock(mutex_);
                worth = worth && current_ <= p;
            }
            const uint64_t begin = p * device_->register_bytes();
            if (worth) {
                constexpr uint64_t kPage = 4096;  // rounding up is safe: the mapping extends to the end of the slab
                const uint64_t n_bytes = (end_of(p) - begin + kPage - 1) / kPage * kPage;
                allowed = device_->pin(segment_->at(begin), n_bytes);
                if (allowed) found = State::kPinned;
            }
        } catch (const Fault &) {
            allowed = false;  // the copy meets the same fault and reports it
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        pieces_[p] = found;
        changed_.notify_all();
    }
}

}  // namespace thaw
