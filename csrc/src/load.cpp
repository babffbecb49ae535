#include "load.h"

namespace thaw {

namespace {

// A tensor is ready when it is below the watermark, and it is a view of the segment.
class CpuLoad final : public Load {
   public:
    using Load::Load;

    void wait(size_t i, const Deadline &deadline) override {
        row(i);
        segment_->wait(end_of(i), deadline, &closed_);
    }
    void wait_on_stream(size_t i, uintptr_t, const Deadline &deadline) override { wait(i, deadline); }

    DLManagedTensor *take(size_t i) override {
        const thaw_tensor &t = row(i);
        if (segment_->end() < end_of(i)) throw Fault(THAW_BAD_ARGUMENT, format("tensor %zu has not arrived", i));
        mark_taken(i);
        return export_tensor(t, const_cast<char *>(segment_->at(t.offset)), {kDLCPU, 0}, segment_);
    }

    void close() override { closed_.ring(); }

   private:
    Bell closed_;
};

}  // namespace

Load::Load(std::shared_ptr<Segment> segment, std::vector<thaw_tensor> tensors)
    : segment_(std::move(segment)), tensors_(std::move(tensors)), taken_(tensors_.size()) {
    uint32_t group = 0;
    for (const thaw_tensor &t : tensors_) {
        check_tensor(t, segment_->n_bytes());
        if (t.group < group) throw Fault(THAW_BAD_ARGUMENT, format("group %u comes behind group %u", t.group, group));
        group = t.group;
    }
}

const thaw_tensor &Load::row(size_t i) const {
    if (i >= tensors_.size()) throw Fault(THAW_BAD_ARGUMENT, format("tensor %zu of %zu", i, tensors_.size()));
    return tensors_[i];
}

void Load::mark_taken(size_t i) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (taken_[i]) throw Fault(THAW_BAD_ARGUMENT, format("tensor %zu was taken before", i));
    taken_[i] = true;
}

std::unique_ptr<Load> open_cpu_load(std::shared_ptr<Segment> segment, std::vector<thaw_tensor> tensors) {
    return std::make_unique<CpuLoad>(std::move(segment), std::move(tensors));
}

}  // namespace thaw
