// Copies of one priority, in order: an issuer thread hands pieces to the streams, a completer sees them done.
//
//   submit ─▶ queue ─▶ issuer ─▶ stream (bounded bytes in flight) ─▶ completer ─▶ ticket
//
// A stream's priority does not reorder a copy engine, so priority is made here: the background lane issues only while
// the critical one has nothing to issue, and little is ever in flight.
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
    // Of `streams`, which stay the caller's.  A lane with an `above` yields to it.
    Lane(CudaDevice &device, std::vector<cuda::Stream> streams, size_t n_slots, Lane *above);
    // What is queued fails with THAW_CLOSED, what is in flight ends.
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
        cuda::Event event;  // null: it was never issued
    };

    void issue_all();
    void complete_all();
    // Takes the next piece, waiting for its turn.  False: the lane is closing and nothing is left.
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
    std::vector<cuda::Event> events_;  // completed, to be used again
    bool closing_ = false, issuer_gone_ = false;

    std::thread issuer_, completer_;
};

}  // namespace thaw
