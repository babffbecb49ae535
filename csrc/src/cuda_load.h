#pragma once

#include "cuda_device.h"
#include "load.h"

namespace thaw {

// Loads tensors to the device, with a buffer, an event and a ticket per group.  A follower thread follows the
// watermark.
std::unique_ptr<Load> open_cuda_load(std::shared_ptr<CudaDevice> device, std::shared_ptr<Segment> segment,
                                     std::vector<thaw_tensor> tensors, uint64_t window_bytes);

}  // namespace thaw
