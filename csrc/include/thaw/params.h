/* The parameter manager's C ABI: it gives segments (docs/formats/segment.md) as tensors, on the CPU or a CUDA device.
 *
 *   segment ── follows fetchd's watermark; read-only, contiguous
 *      └─ load ── a table of tensors, ready one by one: views of the segment (CPU) or copies on the device (CUDA)
 *            └─ DLManagedTensor ── holds the segment's mapping, or the device buffer, until its deleter ran
 *   device ── CPU, or the primary CUDA context with its copy streams;  kv ── KV blocks in and out of it
 *
 * Calls that return int return a thaw_status (except thaw_abi_version); thaw_error() is the sentence that describes
 * this thread's last failure.  Timeouts are nanoseconds from the call.  Any call may be made from any thread.  *_close
 * wakes all threads that wait on the object and refuses later calls (THAW_CLOSED).  *_free ends the handle, and then no
 * other thread may be inside a call with it.
 */
#ifndef THAW_PARAMS_H
#define THAW_PARAMS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define THAW_ABI_VERSION 1
#define THAW_API __attribute__((visibility("default")))
#define THAW_MAX_DIMS 8
#define THAW_MAX_TEXT 1500 /* bytes of a failure's message and of its hint, as in the control page */

typedef enum thaw_status {
    THAW_OK = 0,
    THAW_TIMED_OUT = 1,
    THAW_CLOSED = 2,
    THAW_BAD_ARGUMENT = 3,
    THAW_BAD_SEGMENT = 4,  /* the control page or the descriptors violate segment v1 */
    THAW_FETCH_FAILED = 5, /* thaw_segment_failure returns the error that fetchd wrote */
    THAW_FETCH_DIED = 6,   /* no heartbeat while filling */
    THAW_OUT_OF_MEMORY = 7,
    THAW_SYSTEM = 8,    /* a system call failed */
    THAW_NO_DEVICE = 9, /* there is no libcuda, it lacks a symbol, or there is no device: the feature is off */
    THAW_DEVICE = 10    /* the driver reported an error */
} thaw_status;

/* In the order of the frame format's tensor descriptors. */
typedef enum thaw_dtype {
    THAW_BOOL, THAW_U8, THAW_I8, THAW_I16, THAW_I32, THAW_I64, THAW_F16, THAW_BF16, THAW_F32, THAW_F64,
    THAW_F8_E4M3, THAW_F8_E5M2 /* both leave as u8, because DLPack 0 has no such type; the consumer views them */
} thaw_dtype;

struct DLManagedTensor;
typedef struct thaw_segment thaw_segment;
typedef struct thaw_device thaw_device;
typedef struct thaw_load thaw_load;
typedef struct thaw_kv thaw_kv;
typedef struct thaw_ticket thaw_ticket;

THAW_API int thaw_abi_version(void);
THAW_API const char *thaw_error(void);

/* ── segments ─────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct thaw_failure {
    uint32_t code; /* as on the control page */
    char message[THAW_MAX_TEXT + 1];
    char hint[THAW_MAX_TEXT + 1];
} thaw_failure;

/* fds: the control page, then the slabs in order.  The caller keeps them and may close them after the call. */
THAW_API int thaw_segment_open(const int *fds, size_t n_fds, uint64_t n_bytes, uint64_t slab_bytes,
                               thaw_segment **segment);
THAW_API uintptr_t thaw_segment_address(const thaw_segment *segment);
/* Sleeps until [0, end) has arrived; *have is the current end then, or 0 when the call fails. */
THAW_API int thaw_segment_wait(thaw_segment *segment, uint64_t end, int64_t timeout_ns, uint64_t *have);
THAW_API int thaw_segment_failure(thaw_segment *segment, thaw_failure *failure);
THAW_API int thaw_segment_close(thaw_segment *segment);
THAW_API void thaw_segment_free(thaw_segment *segment);

/* ── devices ──────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct thaw_device_config {
    int32_t cuda;             /* 0: the CPU; the fields below are for CUDA.  Zero means the default in [] */
    int32_t ordinal;          /* among the visible devices */
    const char *libcuda;      /* ["libcuda.so.1"] */
    uint64_t piece_bytes;     /* of one copy, [16 MiB] */
    uint64_t in_flight_bytes; /* per stream, [64 MiB] */
    uint64_t register_bytes;  /* pinned by one call, [64 MiB] */
    uint64_t slot_bytes;      /* of a buffer in the bounce ring, [32 MiB] */
    uint32_t n_slots;         /* [4] */
    uint32_t never_register;  /* 1: always copy through the bounce ring */
} thaw_device_config;

typedef struct thaw_device_info {
    int32_t cuda;
    int32_t ordinal;
    int32_t read_only_register; /* the device can pin read-only memory */
    int32_t driver_version;
    uint64_t context_ns; /* how long cuInit, the context and the streams took */
    uint64_t registered_bytes, bounced_bytes, copied_bytes, live_bytes;
    uintptr_t context; /* the CUcontext, for comparisons */
    char name[96];
} thaw_device_info;

/* Returns at once: a separate thread makes the context while the caller imports.  Returns THAW_NO_DEVICE when there is
 * no libcuda to load; thaw_device_ready returns the thread's result. */
THAW_API int thaw_device_open(const thaw_device_config *config, thaw_device **device);
THAW_API int thaw_device_ready(thaw_device *device, int64_t timeout_ns);
THAW_API int thaw_device_describe(thaw_device *device, thaw_device_info *info);
/* Loads, tensors, tickets and KV of the device may outlive it; the context is released with the last of them. */
THAW_API void thaw_device_free(thaw_device *device);

/* ── loads ────────────────────────────────────────────────────────────────────────────────────────────────────── */

typedef struct thaw_tensor {
    uint64_t offset; /* in the segment */
    uint64_t n_bytes;
    uint32_t dtype;
    uint32_t n_dims;
    int64_t shape[THAW_MAX_DIMS];
    uint32_t group;      /* adjacent tensors with the same number share a device buffer and an event; ascending */
    uint32_t background; /* 1: copied only while there is nothing critical to copy */
} thaw_tensor;

/* Loads the tensors in the given order.  window_bytes bounds the device memory of the groups until it is freed
 * (0: no bound).  A group that a caller waits for may exceed the bound, after all released memory has been freed. */
THAW_API int thaw_load_open(thaw_device *device, thaw_segment *segment, const thaw_tensor *tensors, size_t n,
                            uint64_t window_bytes, thaw_load **load);
/* Waits until the host can read tensor i (CPU), or until the tensor was copied (CUDA). */
THAW_API int thaw_load_wait(thaw_load *load, size_t i, int64_t timeout_ns);
/* Does the same, but later work of the CUstream waits for the copy, not this call.  On the CPU like thaw_load_wait. */
THAW_API int thaw_load_wait_stream(thaw_load *load, size_t i, uintptr_t stream, int64_t timeout_ns);
/* A new tensor, which the caller owns and whose deleter it calls.  Only after a wait for it has returned THAW_OK. */
THAW_API int thaw_load_tensor(thaw_load *load, size_t i, struct DLManagedTensor **tensor);
THAW_API int thaw_load_close(thaw_load *load);
THAW_API void thaw_load_free(thaw_load *load);

/* ── Python ───────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Takes the addresses of PyCapsule_New, PyCapsule_IsValid, PyCapsule_GetPointer, Py_IncRef and None; called once. */
THAW_API int thaw_python(void *capsule_new, void *capsule_is_valid, void *capsule_get_pointer, void *inc_ref,
                         void *none);
/* thaw_load_tensor as a "dltensor" capsule (PyObject*, a new reference), which deletes the tensor if it is not
 * consumed.  Returns None after a failure (ctypes crashes on a NULL object).  The caller holds the GIL; the call does
 * not wait. */
THAW_API void *thaw_load_capsule(thaw_load *load, size_t i);

/* ── KV blocks ────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Block b of a plane is block_bytes at base + b * block_stride.  Every layer has the same number of planes (K and V, or
 * both in one plane); planes come layer by layer. */
typedef struct thaw_kv_plane {
    uintptr_t base;
    uint64_t n_blocks;
    uint64_t block_stride;
    uint64_t block_bytes;
} thaw_kv_plane;

THAW_API int thaw_kv_open(thaw_device *device, const thaw_kv_plane *planes, size_t n_layers, size_t planes_per_layer,
                          thaw_kv **kv);
/* Bytes of n blocks of a layer; 0 for a layer that does not exist.  They lie plane by plane, and in each plane block by
 * block. */
THAW_API uint64_t thaw_kv_bytes(const thaw_kv *kv, size_t layer, size_t n_blocks);
/* Copies out of (gather) or into (scatter) the blocks, behind the CUstream's work so far, and returns at once.  The
 * host buffer belongs to the copy until the ticket is freed.  Scatter refuses a block that is named twice. */
THAW_API int thaw_kv_gather(thaw_kv *kv, size_t layer, const uint32_t *blocks, size_t n_blocks, void *to,
                            uint64_t to_bytes, uintptr_t stream, thaw_ticket **ticket);
THAW_API int thaw_kv_scatter(thaw_kv *kv, size_t layer, const uint32_t *blocks, size_t n_blocks, const void *from,
                             uint64_t from_bytes, uintptr_t stream, thaw_ticket **ticket);
THAW_API void thaw_kv_free(thaw_kv *kv);
THAW_API int thaw_ticket_wait(thaw_ticket *ticket, int64_t timeout_ns);
THAW_API int thaw_ticket_wait_stream(thaw_ticket *ticket, uintptr_t stream, int64_t timeout_ns);
/* Waits for a copy that is still running; the caller may use its buffer afterwards. */
THAW_API void thaw_ticket_free(thaw_ticket *ticket);

#ifdef __cplusplus
}
#endif
#endif
