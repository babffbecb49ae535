// Copies of one priority, in order: an issuer thread gives pieces to the streams, and a completer thread waits for
// their end.
//
//   submit ─▶ queue ─▶ issuer ─▶ stream (bounded bytes in flight) ─▶ completer ─▶ ticket
//
// A stream's priority does not reorder a copy engine, so the lanes implement priority: the background lane issues only
// while the critical lane has nothing to issue, and only few bytes are ever in flight.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "piece.h"

namespace thaw {

class CudaDevice;

class Lane {
   public:
    // Uses `streams`, which the caller owns.  A lane with an `above` yields to that lane.
    Lane(CudaDevice &device, std::vector<cuda::Stream> streams, size_t n_slots, Lane *above);
    // Queued pieces fail with THAW_CLOSED; pieces in flight end normally.
    ~Lane();
    Lane(const Lane &) = delete;
    Lane &operator=(const Lane &) = delete;

    void submit(Piece piece);

   private:
    struct Slot {
        char *memory = nullptr;
        bool busy = false;
    };
    struct Flight {
        Piece piece;
        size_t stream;
        Slot *slot;
        cuda::Event event;  // null if issuing the piece failed
    };

    void issue_all();
    void complete_all();
    // Waits for its turn and takes the next piece.  Returns false if the lane is closing and no piece is left.
    bool next(Piece &piece, bool &closing);
    void issue(Piece piece, bool closing);
    size_t wait_for_stream(size_t n_bytes);
    Slot *wait_for_slot();
    void enqueue_copies(const Piece &piece, cuda::Stream stream, const Slot *slot);
    cuda::Event record(const Piece &piece, size_t stream);
    void complete(Flight &flight);
    void poke();

    CudaDevice &device_;
    const std::vector<cuda::Stream> streams_;
    Lane *const above_;
    Lane *below_ = nullptr;
    std::atomic<size_t> unissued_{0};

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<Piece> queue_;
    std::deque<Flight> flights_;
    std::vector<size_t> in_flight_;  // bytes, by stream
    std::vector<Slot> slots_;
    std::vector<cuda::Event> events_;  // completed events, which are used again
    bool closing_ = false, issuer_gone_ = false;

    std::thread issuer_, completer_;
};

}  // namespace thaw
