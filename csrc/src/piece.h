// The unit of copying: it is bounded in bytes, and is issued to one stream as a whole or not at all.
#pragma once

#include <memory>
#include <vector>

#include "ticket.h"

namespace thaw {

enum class Direction { kToDevice, kToHost };
enum class Priority { kCritical, kBackground };

struct Part {
    cuda::Pointer device;
    char *host;  // only read if the direction is to the device
    size_t n_bytes;
};

struct Piece {
    Direction direction = Direction::kToDevice;
    std::vector<Part> parts;
    size_t n_bytes = 0;
    bool pinned = false;           // whether the host memory is pinned; if not, the piece uses the bounce ring
    cuda::Event after = nullptr;   // the stream waits for this event, which is destroyed afterwards
    std::shared_ptr<Ticket> ticket;
    bool last = false;             // whether this is the last piece of its ticket

    void add(Part part) {
        n_bytes += part.n_bytes;
        parts.push_back(part);
    }
};

}  // namespace thaw
