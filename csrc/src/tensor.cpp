#include "tensor.h"

#include "thaw/fault.h"

namespace thaw {

namespace {

constexpr DLDataType kTypes[] = {
    {kDLBool, 8, 1}, {kDLUInt, 8, 1},   {kDLInt, 8, 1},     {kDLInt, 16, 1},   {kDLInt, 32, 1},  {kDLInt, 64, 1},
    {kDLFloat, 16, 1}, {kDLBfloat, 16, 1}, {kDLFloat, 32, 1}, {kDLFloat, 64, 1}, {kDLUInt, 8, 1}, {kDLUInt, 8, 1},
};
constexpr size_t kNTypes = sizeof kTypes / sizeof *kTypes;
static_assert(kNTypes == THAW_F8_E5M2 + 1, "one entry a dtype");

struct Exported {
    DLManagedTensor managed;
    std::shared_ptr<void> keep;
    int64_t shape[THAW_MAX_DIMS];
    int64_t strides[THAW_MAX_DIMS];
};

void destroy(DLManagedTensor *tensor) { delete static_cast<Exported *>(tensor->manager_ctx); }

}  // namespace

void check_tensor(const thaw_tensor &t, uint64_t segment_bytes) {
    if (t.dtype >= kNTypes || t.n_dims > THAW_MAX_DIMS)
        throw Fault(THAW_BAD_ARGUMENT, format("a tensor of dtype %u with %u dimensions", t.dtype, t.n_dims));
    if (t.offset > segment_bytes || t.n_bytes > segment_bytes - t.offset)
        throw Fault(THAW_BAD_ARGUMENT, format("[%llu, +%llu) lies outside the segment of %llu bytes",
                                              (unsigned long long)t.offset, (unsigned long long)t.n_bytes,
                                              (unsigned long long)segment_bytes));
    uint64_t n_bytes = kTypes[t.dtype].bits / 8;
    for (uint32_t d = 0; d < t.n_dims; d++)
        if (t.shape[d] < 0 || __builtin_mul_overflow(n_bytes, uint64_t(t.shape[d]), &n_bytes))
            throw Fault(THAW_BAD_ARGUMENT, format("a tensor of %lld elements along dimension %u",
                                                  (long long)t.shape[d], d));
    if (n_bytes != t.n_bytes)
        throw Fault(THAW_BAD_ARGUMENT, format("the shape has %llu bytes, the tensor %llu", (unsigned long long)n_bytes,
                                              (unsigned long long)t.n_bytes));
}

DLManagedTensor *export_tensor(const thaw_tensor &t, void *data, DLDevice device, std::shared_ptr<void> keep) {
    auto *made = new Exported{{}, std::move(keep), {}, {}};
    uint64_t stride = 1;  // unsigned, because the product of an empty tensor's other dimensions may overflow
    for (uint32_t d = t.n_dims; d-- > 0;) {
        made->shape[d] = t.shape[d];
        made->strides[d] = int64_t(stride);
        stride *= t.shape[d] > 0 ? uint64_t(t.shape[d]) : 1;
    }
    made->managed.dl_tensor = {data, device, int32_t(t.n_dims), kTypes[t.dtype], made->shape, made->strides, 0};
    made->managed.manager_ctx = made;
    made->managed.deleter = destroy;
    return &made->managed;
}

}  // namespace thaw
