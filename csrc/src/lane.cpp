#include "lane.h"

#include <algorithm>
#include <cstring>

#include "cuda_device.h"

namespace thaw {

Lane::Lane(CudaDevice &device, std::vector<cuda::Stream> streams, size_t n_slots, Lane *above)
    : device_(device),
      streams_(std::move(streams)),
      above_(above),
      in_flight_(streams_.size(), 0),
      slots_(n_slots) {
    if (above_ != nullptr) {
        const std::lock_guard<std::mutex> lock(above_->mutex_);
        above_->below_ = this;
    }
    issuer_ = std::thread([this] { issue_all(); });
    completer_ = std::thread([this] { complete_all(); });
}

Lane::~Lane() {
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        closing_ = true;
        changed_.notify_all();
    }
    issuer_.join();
    completer_.join();
    if (above_ != nullptr) {
        const std::lock_guard<std::mutex> lock(above_->mutex_);
        above_->below_ = nullptr;
    }
    for (const cuda::Event event : events_) device_.discard(event);
    for (const Slot &slot : slots_)
        if (slot.memory != nullptr) device_.free_host(slot.memory);
}

void Lane::submit(Piece piece) {
    const std::lock_guard<std::mutex> lock(mutex_);
    unissued_++;
    queue_.push_back(std::move(piece));
    changed_.notify_all();
}

void Lane::poke() {
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
}

void Lane::issue_all() {
    device_.make_current();
    Piece piece;
    bool closing = false;
    while (next(piece, closing)) {
        issue(std::move(piece), closing);
        if (--unissued_ == 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            if (below_ != nullptr) below_->poke();
        }
    }
    const std::lock_guard<std::mutex> lock(mutex_);
    issuer_gone_ = true;
    changed_.notify_all();
}

bool Lane::next(Piece &piece, bool &closing) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] {
        return closing_ || (!queue_.empty() && (above_ == nullptr || above_->unissued_.load() == 0));
    });
    closing = closing_;
    if (queue_.empty()) return false;
    piece = std::move(queue_.front());
    queue_.pop_front();
    return true;
}

void Lane::issue(Piece piece, bool closing) {
    Flight flight{std::move(piece), 0, nullptr, nullptr};
    const Piece &p = flight.piece;
    try {
        if (closing) throw Fault(THAW_CLOSED, "the device was closed");
        flight.stream = wait_for_stream(p.n_bytes);
        if (!p.pinned && p.n_bytes > 0) flight.slot = wait_for_slot();
        const cuda::Stream stream = streams_[flight.stream];
        if (p.after != nullptr) device_.check(device_.api().StreamWaitEvent(stream, p.after, 0), "StreamWaitEvent");
        enqueue_copies(p, stream, flight.slot);
        flight.event = record(p, flight.stream);
        if (p.last) p.ticket->issued(flight.event);
    } catch (const Fault &fault) {
        p.ticket->note(fault);
        // Copies that were enqueued before the failure may still run, so the completer waits for the whole stream.
    }
    if (p.after != nullptr) device_.discard(p.after);
    const std::lock_guard<std::mutex> lock(mutex_);
    in_flight_[flight.stream] += p.n_bytes;
    flights_.push_back(std::move(flight));
    changed_.notify_all();
}

// Waits until the stream with the fewest bytes in flight has room.  A piece larger than the bound is issued alone.
size_t Lane::wait_for_stream(size_t n_bytes) {
    std::unique_lock<std::mutex> lock(mutex_);
    size_t best = 0;
    changed_.wait(lock, [&] {
        best = size_t(std::min_element(in_flight_.begin(), in_flight_.end()) - in_flight_.begin());
        return in_flight_[best] == 0 || in_flight_[best] + n_bytes <= device_.in_flight_bytes();
    });
    return best;
}

Lane::Slot *Lane::wait_for_slot() {
    std::unique_lock<std::mutex> lock(mutex_);
    Slot *free = nullptr;
    changed_.wait(lock, [&] {
        for (Slot &slot : slots_)
            if (!slot.busy && (free == nullptr || (free->memory == nullptr && slot.memory != nullptr))) free = &slot;
        return free != nullptr;
    });
    free->busy = true;
    lock.unlock();
    if (free->memory == nullptr) {
        try {
            free->memory = device_.allocate_host(device_.slot_bytes());
        } catch (const Fault &) {
            lock.lock();
            free->busy = false;
            throw;
        }
    }
    return free;
}

void Lane::enqueue_copies(const Piece &piece, cuda::Stream stream, const Slot *slot) {
    const cuda::Api &api = device_.api();
    size_t at = 0;
    for (const Part &part : piece.parts) {
        char *host = slot == nullptr ? part.host : slot->memory + at;
        if (piece.direction == Direction::kToDevice) {
            if (slot != nullptr) std::memcpy(host, part.host, part.n_bytes);
            device_.check(api.MemcpyHtoDAsync(part.device, host, part.n_bytes, stream), "MemcpyHtoDAsync");
        } else {
            device_.check(api.MemcpyDtoHAsync(host, part.device, part.n_bytes, stream), "MemcpyDtoHAsync");
        }
        at += part.n_bytes;
    }
}

// Records the event behind the piece; for the last piece of a ticket, behind everything in flight.
cuda::Event Lane::record(const Piece &piece, size_t stream) {
    const cuda::Api &api = device_.api();
    cuda::Event event = nullptr;
    {
        // Under the lock, the completer cannot release an event that is used here.
        const std::lock_guard<std::mutex> lock(mutex_);
        std::vector<bool> joined(streams_.size(), !piece.last);
        joined[stream] = true;
        for (auto flight = flights_.rbegin(); flight != flights_.rend(); ++flight) {
            if (flight->event == nullptr || joined[flight->stream]) continue;
            joined[flight->stream] = true;
            device_.check(api.StreamWaitEvent(streams_[stream], flight->event, 0), "StreamWaitEvent");
        }
        if (!events_.empty()) event = events_.back(), events_.pop_back();
    }
    if (event == nullptr)
        device_.check(api.EventCreate(&event, cuda::kEventBlockingSync | cuda::kEventDisableTiming), "EventCreate");
    const cuda::Result result = api.EventRecord(event, streams_[stream]);
    if (result != cuda::kSuccess) device_.discard(event);
    device_.check(result, "EventRecord");
    return event;
}

void Lane::complete_all() {
    device_.make_current();
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
        changed_.wait(lock, [&] { return issuer_gone_ || !flights_.empty(); });
        if (flights_.empty()) return;
        Flight &flight = flights_.front();  // the reference stays valid, because only this thread removes flights
        lock.unlock();
        complete(flight);
        lock.lock();
        const Flight gone = std::move(flights_.front());
        flights_.pop_front();
        in_flight_[gone.stream] -= gone.piece.n_bytes;
        if (gone.slot != nullptr) gone.slot->busy = false;
        if (gone.event != nullptr && !gone.piece.last) events_.push_back(gone.event);
        changed_.notify_all();
        lock.unlock();
        if (gone.piece.last) gone.piece.ticket->finish();
        lock.lock();
    }
}

void Lane::complete(Flight &flight) {
    const Piece &piece = flight.piece;
    const cuda::Api &api = device_.api();
    const cuda::Stream stream = streams_[flight.stream];
    try {
        if (flight.event == nullptr) {
            device_.check(api.StreamSynchronize(stream), "StreamSynchronize");
            return;
        }
        const cuda::Result result = api.EventSynchronize(flight.event);
        // The copy may still be running, and its memory is released after this.
        if (result != cuda::kSuccess) api.StreamSynchronize(stream);
        device_.check(result, "EventSynchronize");
        size_t at = 0;
        for (const Part &part : piece.parts) {
            if (flight.slot != nullptr && piece.direction == Direction::kToHost)
                std::memcpy(part.host, flight.slot->memory + at, part.n_bytes);
            at += part.n_bytes;
        }
        device_.count_copied(piece.n_bytes, flight.slot != nullptr);
    } catch (const Fault &fault) {
        piece.ticket->note(fault);
    }
}

}  // namespace thaw
