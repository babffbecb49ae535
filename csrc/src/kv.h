// Copies KV blocks out of an engine's cache and into it: between strided device memory and one contiguous host buffer.
#pragma once

#include <memory>
#include <vector>

#include "device.h"

namespace thaw {

class Kv {
   public:
    Kv(std::shared_ptr<Device> device, const thaw_kv_plane *planes, size_t n_layers, size_t planes_per_layer);

    const std::shared_ptr<Device> &device() const { return device_; }
    uint64_t bytes(size_t layer, size_t n_blocks) const;
    std::shared_ptr<Ticket> copy(Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks,
                                 char *host, uint64_t host_bytes, uintptr_t stream);

   private:
    void check_blocks(Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks) const;
    std::vector<Piece> cut(Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks,
                           char *host) const;

    const std::shared_ptr<Device> device_;
    const size_t n_layers_, planes_per_layer_;
    std::vector<thaw_kv_plane> planes_;
};

}  // namespace thaw
