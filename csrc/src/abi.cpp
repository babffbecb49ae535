// The C ABI: handles are heap objects that hold shared objects, and no exception leaves a call.
#include <new>

#include "cuda_load.h"
#include "kv.h"
#include "load.h"
#include "segment.h"
#include "thaw/params.h"

struct thaw_segment {
    std::shared_ptr<thaw::Segment> it;
};

struct thaw_device {
    std::shared_ptr<thaw::Device> it;
};

struct thaw_load {
    std::unique_ptr<thaw::Load> it;
};

struct thaw_kv {
    thaw::Kv it;
};

struct thaw_ticket {
    std::shared_ptr<thaw::Device> device;  // must outlive the ticket
    std::shared_ptr<thaw::Ticket> it;
};

namespace {

using thaw::Deadline;
using thaw::Fault;

thread_local std::string last_error;

int fail(thaw_status status, std::string message) {
    last_error = std::move(message);
    return status;
}

template <typename Do>
int guard(Do &&run) {
    try {
        run();
        return THAW_OK;
    } catch (const Fault &fault) {
        return fail(fault.status, fault.message);
    } catch (const std::bad_alloc &) {
        return fail(THAW_OUT_OF_MEMORY, "out of memory");
    } catch (const std::exception &e) {
        return fail(THAW_SYSTEM, e.what());  // for example, a thread cannot be started
    }
}

void need(bool there) {
    if (!there) throw Fault(THAW_BAD_ARGUMENT, "an argument is NULL");
}

}  // namespace

int thaw_abi_version(void) { return THAW_ABI_VERSION; }

const char *thaw_error(void) { return last_error.c_str(); }

// ── segments ─────────────────────────────────────────────────────────────────────────────────────────────────────

int thaw_segment_open(const int *fds, size_t n_fds, uint64_t n_bytes, uint64_t slab_bytes, thaw_segment **segment) {
    return guard([&] {
        need(fds != nullptr && segment != nullptr);
        *segment = new thaw_segment{std::make_shared<thaw::Segment>(fds, n_fds, n_bytes, slab_bytes)};
    });
}

uintptr_t thaw_segment_address(const thaw_segment *segment) { return reinterpret_cast<uintptr_t>(segment->it->at(0)); }

int thaw_segment_wait(thaw_segment *segment, uint64_t end, int64_t timeout_ns, uint64_t *have) {
    const int status = guard([&] {
        need(segment != nullptr && have != nullptr);
        *have = segment->it->wait(end, Deadline(timeout_ns));
    });
    if (status != THAW_OK && have != nullptr) *have = 0;
    return status;
}

int thaw_segment_failure(thaw_segment *segment, thaw_failure *failure) {
    return guard([&] {
        need(segment != nullptr && failure != nullptr);
        segment->it->failure(failure);
    });
}

int thaw_segment_close(thaw_segment *segment) {
    return guard([&] {
        need(segment != nullptr);
        segment->it->close();
    });
}

void thaw_segment_free(thaw_segment *segment) { delete segment; }

// ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────────

int thaw_device_open(const thaw_device_config *config, thaw_device **device) {
    return guard([&] {
        need(config != nullptr && device != nullptr);
        *device = new thaw_device{config->cuda != 0 ? thaw::open_cuda(*config) : thaw::open_cpu()};
    });
}

int thaw_device_ready(thaw_device *device, int64_t timeout_ns) {
    return guard([&] {
        need(device != nullptr);
        device->it->ready(Deadline(timeout_ns));
    });
}

int thaw_device_describe(thaw_device *device, thaw_device_info *info) {
    return guard([&] {
        need(device != nullptr && info != nullptr);
        device->it->describe(info);
    });
}

void thaw_device_free(thaw_device *device) { delete device; }

// ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────────

int thaw_load_open(thaw_device *device, thaw_segment *segment, const thaw_tensor *tensors, size_t n,
                   uint64_t window_bytes, thaw_load **load) {
    return guard([&] {
        need(device != nullptr && segment != nullptr && load != nullptr && (tensors != nullptr || n == 0));
        std::vector<thaw_tensor> table(tensors, tensors + n);
        const auto cuda = std::dynamic_pointer_cast<thaw::CudaDevice>(device->it);
        auto opened = cuda ? thaw::open_cuda_load(cuda, segment->it, std::move(table), window_bytes)
                           : thaw::open_cpu_load(segment->it, std::move(table));
        *load = new thaw_load{std::move(opened)};
    });
}

int thaw_load_wait(thaw_load *load, size_t i, int64_t timeout_ns) {
    return guard([&] {
        need(load != nullptr);
        load->it->wait(i, Deadline(timeout_ns));
    });
}

int thaw_load_wait_stream(thaw_load *load, size_t i, uintptr_t stream, int64_t timeout_ns) {
    return guard([&] {
        need(load != nullptr);
        load->it->wait_on_stream(i, stream, Deadline(timeout_ns));
    });
}

int thaw_load_tensor(thaw_load *load, size_t i, DLManagedTensor **tensor) {
    return guard([&] {
        need(load != nullptr && tensor != nullptr);
        *tensor = load->it->take(i);
    });
}

int thaw_load_close(thaw_load *load) {
    return guard([&] {
        need(load != nullptr);
        load->it->close();
    });
}

void thaw_load_free(thaw_load *load) { delete load; }

// ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────────

namespace {

constexpr char kCapsuleName[] = "dltensor";  // a consumer renames the capsule, and then owns the tensor

struct PythonApi {
    void *(*capsule_new)(void *pointer, const char *name, void (*destructor)(void *));
    int (*capsule_is_valid)(void *capsule, const char *name);
    void *(*capsule_get_pointer)(void *capsule, const char *name);
    void (*inc_ref)(void *object);
    void *none;
} python;

void destroy_capsule(void *capsule) {
    if (!python.capsule_is_valid(capsule, kCapsuleName)) return;
    auto *tensor = static_cast<DLManagedTensor *>(python.capsule_get_pointer(capsule, kCapsuleName));
    tensor->deleter(tensor);
}

}  // namespace

int thaw_python(void *capsule_new, void *capsule_is_valid, void *capsule_get_pointer, void *inc_ref, void *none) {
    return guard([&] {
        need(capsule_new && capsule_is_valid && capsule_get_pointer && inc_ref && none);
        python.capsule_new = reinterpret_cast<decltype(python.capsule_new)>(capsule_new);
        python.capsule_is_valid = reinterpret_cast<decltype(python.capsule_is_valid)>(capsule_is_valid);
        python.capsule_get_pointer = reinterpret_cast<decltype(python.capsule_get_pointer)>(capsule_get_pointer);
        python.inc_ref = reinterpret_cast<decltype(python.inc_ref)>(inc_ref);
        python.none = none;
    });
}

void *thaw_load_capsule(thaw_load *load, size_t i) {
    DLManagedTensor *tensor = nullptr;
    if (thaw_load_tensor(load, i, &tensor) == THAW_OK) {
        void *capsule = python.capsule_new(tensor, kCapsuleName, destroy_capsule);
        if (capsule != nullptr) return capsule;
        tensor->deleter(tensor);
        fail(THAW_OUT_OF_MEMORY, "no memory for a capsule");
    }
    python.inc_ref(python.none);
    return python.none;
}

// ── KV blocks ────────────────────────────────────────────────────────────────────────────────────────────────────

int thaw_kv_open(thaw_device *device, const thaw_kv_plane *planes, size_t n_layers, size_t planes_per_layer,
                 thaw_kv **kv) {
    return guard([&] {
        need(device != nullptr && planes != nullptr && kv != nullptr && n_layers > 0 && planes_per_layer > 0);
        *kv = new thaw_kv{thaw::Kv(device->it, planes, n_layers, planes_per_layer)};
    });
}

uint64_t thaw_kv_bytes(const thaw_kv *kv, size_t layer, size_t n_blocks) { return kv->it.bytes(layer, n_blocks); }

namespace {

int copy_blocks(thaw_kv *kv, thaw::Direction direction, size_t layer, const uint32_t *blocks, size_t n_blocks,
                const void *host, uint64_t host_bytes, uintptr_t stream, thaw_ticket **ticket) {
    return guard([&] {
        need(kv != nullptr && ticket != nullptr && (n_blocks == 0 || (blocks != nullptr && host != nullptr)));
        auto *bytes = static_cast<char *>(const_cast<void *>(host));
        auto made = std::make_unique<thaw_ticket>();
        made->device = kv->it.device();
        made->it = kv->it.copy(direction, layer, blocks, n_blocks, bytes, host_bytes, stream);
        *ticket = made.release();
    });
}

}  // namespace

int thaw_kv_gather(thaw_kv *kv, size_t layer, const uint32_t *blocks, size_t n_blocks, void *to, uint64_t to_bytes,
                   uintptr_t stream, thaw_ticket **ticket) {
    return copy_blocks(kv, thaw::Direction::kToHost, layer, blocks, n_blocks, to, to_bytes, stream, ticket);
}

int thaw_kv_scatter(thaw_kv *kv, size_t layer, const uint32_t *blocks, size_t n_blocks, const void *from,
                    uint64_t from_bytes, uintptr_t stream, thaw_ticket **ticket) {
    return copy_blocks(kv, thaw::Direction::kToDevice, layer, blocks, n_blocks, from, from_bytes, stream, ticket);
}

void thaw_kv_free(thaw_kv *kv) { delete kv; }

int thaw_ticket_wait(thaw_ticket *ticket, int64_t timeout_ns) {
    return guard([&] {
        need(ticket != nullptr);
        ticket->it->wait_done(Deadline(timeout_ns));
    });
}

int thaw_ticket_wait_stream(thaw_ticket *ticket, uintptr_t stream, int64_t timeout_ns) {
    return guard([&] {
        need(ticket != nullptr);
        ticket->device->wait_on_stream(stream, *ticket->it, Deadline(timeout_ns));
    });
}

void thaw_ticket_free(thaw_ticket *ticket) {
    if (ticket == nullptr) return;
    ticket->it->wait_ended();
    delete ticket;
}
