// Pins a segment piece by piece, one piece ahead of the copy, and only pieces that have arrived.
//
// Pinning 64 MiB takes about half as long as copying it into the bounce ring (docs/gpu.md), on another thread.  So
// pinning pays off when the bytes are already there (a resident model), and not when the copy waits for them.  Therefore the
// copy never waits for bytes only to pin them.
#pragma once

#include <thread>
#include <vector>

#include "cuda_device.h"
#include "segment.h"

namespace thaw {

class Pinner {
   public:
    Pinner(std::shared_ptr<CudaDevice> device, std::shared_ptr<Segment> segment);
    // No copy from the segment may be running any more.
    ~Pinner();

    // How many of the n bytes from `offset` on lie in one piece, and whether that piece is pinned.  The call also says
    // that the copy has reached `offset`, so pieces before it are no longer worth pinning.
    size_t reach(uint64_t offset, size_t n_bytes, bool *pinned);
    void stop();

   private:
    enum class State : uint8_t { kWaiting, kPinned, kNot };

    void run();
    uint64_t end_of(size_t piece) const;

    const std::shared_ptr<CudaDevice> device_;
    const std::shared_ptr<Segment> segment_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<State> pieces_;
    size_t current_ = 0;
    Bell stopped_;
    std::thread thread_;
};

}  // namespace thaw
