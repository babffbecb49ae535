// A table of tensors that are loaded from a segment, in order.
#pragma once

#include <memory>
#include <mutex>
#include <vector>

#include "segment.h"
#include "tensor.h"

namespace thaw {

class Load {
   public:
    Load(std::shared_ptr<Segment> segment, std::vector<thaw_tensor> tensors);
    virtual ~Load() = default;

    virtual void wait(size_t i, const Deadline &deadline) = 0;
    virtual void wait_on_stream(size_t i, uintptr_t stream, const Deadline &deadline) = 0;
    // Throws Fault unless tensor i has been loaded and was not taken before.
    virtual DLManagedTensor *take(size_t i) = 0;
    virtual void close() = 0;

   protected:
    const thaw_tensor &row(size_t i) const;
    uint64_t end_of(size_t i) const { return tensors_[i].offset + tensors_[i].n_bytes; }
    // Throws Fault when the tensor was taken before.
    void mark_taken(size_t i);

    const std::shared_ptr<Segment> segment_;
    const std::vector<thaw_tensor> tensors_;

   private:
    std::mutex mutex_;
    std::vector<bool> taken_;
};

std::unique_ptr<Load> open_cpu_load(std::shared_ptr<Segment> segment, std::vector<thaw_tensor> tensors);

}  // namespace thaw
