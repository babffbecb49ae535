// Tensors of a segment on the CPU: views, their lifetime, and tables with false values.
#include <string.h>
#include <sys/mman.h>

#include <thread>

#include "check.h"
#include "support.h"
#include "thaw/dlpack.h"

using namespace thaw_test;

namespace {

thaw_tensor tensor(uint64_t offset, uint32_t dtype, uint64_t item_bytes, std::vector<int64_t> shape) {
    thaw_tensor t{};
    t.offset = offset, t.dtype = dtype, t.n_dims = uint32_t(shape.size()), t.n_bytes = item_bytes;
    for (size_t d = 0; d < shape.size(); d++) t.shape[d] = shape[d], t.n_bytes *= uint64_t(shape[d]);
    return t;
}

thaw_device *cpu() {
    thaw_device *device = nullptr;
    const thaw_device_config config{};
    OK(thaw_device_open(&config, &device));
    OK(thaw_device_ready(device, 0));
    return device;
}

bool mapped(uintptr_t address) {
    unsigned char resident;
    return mincore(reinterpret_cast<void *>(address), 4096, &resident) == 0;
}

}  // namespace

TEST(a_tensor_is_a_view_of_the_segment) {
    Producer producer(kSlab + 8192);
    thaw_segment *segment = producer.open();
    thaw_device *device = cpu();
    const thaw_tensor table[] = {tensor(0, THAW_BF16, 2, {4, 8}), tensor(kSlab - 6, THAW_F32, 4, {3}),
                                 tensor(4096, THAW_F8_E4M3, 1, {2, 2, 2}), tensor(5000, THAW_I64, 8, {}),
                                 tensor(6000, THAW_F16, 2, {0, 7})};
    thaw_load *load = nullptr;
    OK(thaw_load_open(device, segment, table, 5, 0, &load));
    DLManagedTensor *t = nullptr;
    REFUSED(thaw_load_tensor(load, 0, &t), THAW_BAD_ARGUMENT, "has not arrived");
    REFUSED(thaw_load_wait(load, 0, 0), THAW_TIMED_OUT, "had arrived");
    producer.complete();
    const struct {
        int code, bits, ndim;
    } wanted[] = {{kDLBfloat, 16, 2}, {kDLFloat, 32, 1}, {kDLUInt, 8, 3}, {kDLInt, 64, 0}, {kDLFloat, 16, 2}};
    for (size_t i = 0; i < 5; i++) {
        OK(thaw_load_wait(load, i, kLong));
        OK(thaw_load_tensor(load, i, &t));
        const DLTensor &d = t->dl_tensor;
        CHECK_EQ(reinterpret_cast<uintptr_t>(d.data), thaw_segment_address(segment) + table[i].offset);
        CHECK(is_pattern(d.data, table[i].offset, table[i].n_bytes));
        CHECK_EQ(int(d.dtype.code), wanted[i].code);
        CHECK_EQ(int(d.dtype.bits), wanted[i].bits);
        CHECK_EQ(int(d.ndim), wanted[i].ndim);
        CHECK_EQ(d.device.device_type, int(kDLCPU));
        for (int k = 0; k < d.ndim; k++) CHECK_EQ(d.shape[k], table[i].shape[k]);
        if (d.ndim > 0) CHECK_EQ(d.strides[d.ndim - 1], int64_t(1));
        if (i == 2) CHECK(d.strides[0] == 4 && d.strides[1] == 2);
        t->deleter(t);
        REFUSED(thaw_load_tensor(load, i, &t), THAW_BAD_ARGUMENT, "was taken before");
    }
    REFUSED(thaw_load_wait(load, 5, 0), THAW_BAD_ARGUMENT, "tensor 5 of 5");
    thaw_load_free(load);
    thaw_device_free(device);
    thaw_segment_free(segment);
}

TEST(the_mapping_stays_until_the_last_deleter_ran) {
    auto producer = std::make_unique<Producer>(kSlab);
    producer->complete();
    thaw_segment *segment = producer->open();
    thaw_device *device = cpu();
    const thaw_tensor table[] = {tensor(0, THAW_U8, 1, {4096}), tensor(4096, THAW_U8, 1, {4096})};
    thaw_load *load = nullptr;
    OK(thaw_load_open(device, segment, table, 2, 0, &load));
    DLManagedTensor *first = nullptr, *second = nullptr;
    OK(thaw_load_tensor(load, 0, &first));
    OK(thaw_load_tensor(load, 1, &second));
    const uintptr_t address = thaw_segment_address(segment);
    thaw_load_free(load);
    OK(thaw_segment_close(segment));
    thaw_segment_free(segment);
    thaw_device_free(device);
    producer.reset();
    CHECK(is_pattern(first->dl_tensor.data, 0, 4096));
    first->deleter(first);
    CHECK(is_pattern(second->dl_tensor.data, 4096, 4096));
    CHECK(mapped(address));
    std::thread([&] { second->deleter(second); }).join();
    CHECK(!mapped(address));
}

TEST(closing_a_load_wakes_who_waits_for_a_tensor) {
    Producer producer(kSlab);
    thaw_segment *segment = producer.open();
    thaw_device *device = cpu();
    const thaw_tensor table[] = {tensor(0, THAW_U8, 1, {4096})};
    thaw_load *load = nullptr;
    OK(thaw_load_open(device, segment, table, 1, 0, &load));
    int status = -1;
    std::thread waiter([&] { status = thaw_load_wait_stream(load, 0, 0, kLong); });
    OK(thaw_load_close(load));
    waiter.join();
    CHECK_EQ(status, int(THAW_CLOSED));
    uint64_t have = 0;
    OK(thaw_segment_wait(segment, 0, 0, &have));  // the segment itself stays open
    thaw_load_free(load);
    thaw_device_free(device);
    thaw_segment_free(segment);
}

TEST(a_table_that_lies_is_refused) {
    Producer producer(10000);
    thaw_segment *segment = producer.open();
    thaw_device *device = cpu();
    thaw_load *load = nullptr;
    const auto refused = [&](thaw_tensor t, const char *words) {
        REFUSED(thaw_load_open(device, segment, &t, 1, 0, &load), THAW_BAD_ARGUMENT, words);
    };
    refused(tensor(9999, THAW_BF16, 2, {1}), "outside the segment");
    refused(tensor(UINT64_MAX, THAW_U8, 1, {2}), "outside the segment");
    refused(tensor(0, 12, 1, {1}), "dtype 12");
    thaw_tensor t = tensor(0, THAW_F32, 4, {2});
    t.n_bytes = 4;
    refused(t, "the shape has 8 bytes, the tensor 4");
    t = tensor(0, THAW_U8, 1, {-1});
    refused(t, "");
    t = tensor(0, THAW_U8, 1, {INT64_MAX, INT64_MAX, 4});
    t.n_bytes = 4;
    refused(t, "elements along dimension");
    t = tensor(0, THAW_U8, 1, {1});
    t.n_dims = 9;
    refused(t, "9 dimensions");
    thaw_tensor two[] = {tensor(0, THAW_U8, 1, {1}), tensor(1, THAW_U8, 1, {1})};
    two[0].group = 1;
    REFUSED(thaw_load_open(device, segment, two, 2, 0, &load), THAW_BAD_ARGUMENT, "group 0 comes behind group 1");
    REFUSED(thaw_load_open(device, segment, nullptr, 1, 0, &load), THAW_BAD_ARGUMENT, "NULL");
    thaw_device_free(device);
    thaw_segment_free(segment);
}
