// The unit of copying: bounded in bytes, goes to one stream, all or nothing.
#pragma once

#include <memory>
#include <vector>

#include "ticket.h"

namespace thaw {

enum class Direction { kToDevice, kToHost };
enum class Priority { kCritical, kBackground };

struct Part {
    cuda::Pointer device;
    char *host;  // read only where the direction is to the device
    size_t n_bytes;
};

struct Piece {
    Direction direction = Direction::kToDevice;
    std::vector<Part> parts;
    size_t n_bytes = 0;
    bool pinned = false;           // the host side is; else it goes through the bounce ring
    cuda::Event after = nullptr;   // waited for on the stream, destroyed afterwards
    std::shared_ptr<Ticket> ticket;
    bool last = false;             // of its ticket

    void add(Part part) {
        n_bytes += part.n_bytes;
        parts.push_back(part);
    }
};

}  // namespace thaw
