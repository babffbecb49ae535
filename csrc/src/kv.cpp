#include "kv.h"

#include <algorithm>

namespace thaw {

Kv::Kv(std::shared_ptr<Device> device, const thaw_kv_plane *planes, size_t n_layers, size_t planes_per_layer)
    : device_(std::move(device)),
      n_layers_(n_layers),
      planes_per_layer_(planes_per_layer),
      planes_(planes, planes + n_layers * planes_per_layer) {
    for (const thaw_kv_plane &p : planes_)
        if (p.base == 0 || p.block_bytes == 0 || p.block_stride < p.block_bytes ||
            p.n_blocks > (UINT64_MAX >> 1) / p.block_stride)
            throw Fault(THAW_BAD_ARGUMENT, "a KV plane without memory, or whose blocks overlap");
    device_->ready(Deadline(0));
}

uint64_t Kv::bytes(size_t layer, size_t n_blocks) const {
    if (layer >= n_layers_) return 0;
    uint64_t n_bytes = 0;
    for (size_t p = 0; p < planes_per_layer_; p++)
        n_bytes += planes_[layer * planes_per_layer_ + p].block_bytes * n_blocks;
    return n_bytes;
}

std::shared_ptr<Ticket> Kv::copy(Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks,
                                 char *host, uint64_t host_bytes, uintptr_t stream) {
    check_blocks(direction, layer, blocks, n_blocks);
    if (host_bytes != bytes(layer, n_blocks))
        throw Fault(THAW_BAD_ARGUMENT, format("%zu blocks of layer %zu have %llu bytes, the buffer %llu", n_blocks,
                                              layer, (unsigned long long)bytes(layer, n_blocks),
                                              (unsigned long long)host_bytes));
    std::vector<Piece> pieces = cut(direction, layer, blocks, n_blocks, host);
    auto ticket = device_->make_ticket();
    pieces.front().after = device_->mark(stream);
    pieces.back().last = true;
    for (Piece &piece : pieces) {
        piece.ticket = ticket;
        device_->submit(std::move(piece), Priority::kBackground);
    }
    return ticket;
}

void Kv::check_blocks(Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks) const {
    if (layer >= n_layers_) throw Fault(THAW_BAD_ARGUMENT, format("layer %zu of %zu", layer, n_layers_));
    for (size_t p = layer * planes_per_layer_; p < (layer + 1) * planes_per_layer_; p++)
        for (size_t b = 0; b < n_blocks; b++)
            if (blocks[b] >= planes_[p].n_blocks)
                throw Fault(THAW_BAD_ARGUMENT, format("block %u of %llu", blocks[b],
                                                      (unsigned long long)planes_[p].n_blocks));
    if (direction == Direction::kToHost) return;
    std::vector<uint32_t> sorted(blocks, blocks + n_blocks);
    std::sort(sorted.begin(), sorted.end());
    const auto twice = std::adjacent_find(sorted.begin(), sorted.end());
    if (twice != sorted.end()) throw Fault(THAW_BAD_ARGUMENT, format("block %u is named twice", *twice));
}

// Blocks that are adjacent in the cache and in the buffer are copied together.
std::vector<Piece> Kv::cut(Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks,
                           char *host) const {
    const size_t limit = device_->piece_bytes(false);
    std::vector<Piece> pieces(1);
    for (size_t p = layer * planes_per_layer_; p < (layer + 1) * planes_per_layer_; p++) {
        const thaw_kv_plane &plane = planes_[p];
        const bool dense = plane.block_stride == plane.block_bytes;
        for (size_t b = 0; b < n_blocks;) {
            size_t run = 1;
            while (dense && b + run < n_blocks && blocks[b + run] == blocks[b] + run) run++;
            uint64_t device = plane.base + blocks[b] * plane.block_stride, left = run * plane.block_bytes;
            while (left > 0) {
                if (pieces.back().n_bytes == limit) pieces.emplace_back();
                const size_t n = std::min<uint64_t>(left, limit - pieces.back().n_bytes);
                pieces.back().add({device, host, n});
                device += n, host += n, left -= n;
            }
            b += run;
        }
    }
    for (Piece &piece : pieces) piece.direction = direction;
    return pieces;
}

}  // namespace thaw
