// The destination of tensors: the host itself, or a CUDA device.
#pragma once

#include <atomic>
#include <memory>

#include "piece.h"
#include "thaw/params.h"

namespace thaw {

class Device {
   public:
    virtual ~Device() = default;

    virtual int ordinal() const { return 0; }
    // Throws Fault when the device cannot be used.
    virtual void ready(const Deadline &deadline) = 0;
    virtual void describe(thaw_device_info *info) = 0;
    // The largest number of bytes in a piece, for pinned or for other host memory.
    virtual size_t piece_bytes(bool pinned) const = 0;
    // Pieces of one priority are copied in order.  The ticket of a piece gets the outcome.
    virtual void submit(Piece piece, Priority priority) = 0;
    virtual std::shared_ptr<Ticket> make_ticket() = 0;
    // An event behind the stream's work so far, for Piece::after; null on a device without streams.
    virtual cuda::Event mark(uintptr_t stream) = 0;
    virtual void wait_on_stream(uintptr_t stream, Ticket &ticket, const Deadline &deadline) = 0;
};

std::shared_ptr<Device> open_cpu();
std::shared_ptr<Device> open_cuda(const thaw_device_config &config);

}  // namespace thaw
