// Compares our driver types and numbers with cuda.h, if there is one: this file only has to compile.
#include "../src/cuda_api.h"

#include <type_traits>

#if defined(__has_include)
#if __has_include(<cuda.h>)
#include <cuda.h>
#define THAW_HAS_CUDA_H 1
#endif
#endif

#ifdef THAW_HAS_CUDA_H

using namespace thaw;

static_assert(sizeof(cuda::Result) == sizeof(CUresult) && sizeof(cuda::Device) == sizeof(CUdevice), "");
static_assert(sizeof(cuda::Pointer) == sizeof(CUdeviceptr) && sizeof(cuda::Context) == sizeof(CUcontext), "");
static_assert(sizeof(cuda::Stream) == sizeof(CUstream) && sizeof(cuda::Event) == sizeof(CUevent), "");
static_assert(cuda::kSuccess == CUDA_SUCCESS && cuda::kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY, "");
static_assert(cuda::kAlreadyRegistered == CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "");
static_assert(cuda::kReadOnlyHostRegisterSupported == CU_DEVICE_ATTRIBUTE_READ_ONLY_HOST_REGISTER_SUPPORTED, "");
static_assert(cuda::kHostRegisterPortable == CU_MEMHOSTREGISTER_PORTABLE, "");
static_assert(cuda::kHostRegisterReadOnly == CU_MEMHOSTREGISTER_READ_ONLY, "");
static_assert(cuda::kHostAllocPortable == CU_MEMHOSTALLOC_PORTABLE, "");
static_assert(cuda::kStreamNonBlocking == CU_STREAM_NON_BLOCKING, "");
static_assert(cuda::kEventBlockingSync == CU_EVENT_BLOCKING_SYNC, "");
static_assert(cuda::kEventDisableTiming == CU_EVENT_DISABLE_TIMING, "");

// Uses each call by its current name, with our types in place of theirs: the number and kinds of parameters must match.
template <typename Ours, typename Theirs>
struct Fits;

template <typename A, typename B>
constexpr bool kSameKind = sizeof(A) == sizeof(B) && std::is_pointer<A>::value == std::is_pointer<B>::value;

template <typename... Ours, typename... Theirs>
struct Fits<int (*)(Ours...), CUresult(Theirs...)> {
    static constexpr bool value = (kSameKind<Ours, Theirs> && ...);
};

#define THAW_FITS(name, version, parameters) \
    static_assert(Fits<decltype(cuda::Api::name), decltype(cu##name)>::value, "cu" #name);
THAW_CUDA_CALLS(THAW_FITS)

extern const int kCudaVersionChecked;
const int kCudaVersionChecked = CUDA_VERSION;

#endif
