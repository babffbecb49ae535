// One row of a load's table, which is checked once, and the DLPack tensor that is made from it.
#pragma once

#include <memory>

#include "thaw/dlpack.h"
#include "thaw/params.h"

namespace thaw {

// Throws Fault for a row that lies outside the segment or contradicts itself.
void check_tensor(const thaw_tensor &tensor, uint64_t segment_bytes);

// The tensor's deleter releases `keep`, which owns the memory at `data`.
DLManagedTensor *export_tensor(const thaw_tensor &tensor, void *data, DLDevice device, std::shared_ptr<void> keep);

}  // namespace thaw
