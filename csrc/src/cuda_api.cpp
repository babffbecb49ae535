#include "cuda_api.h"

#include <dlfcn.h>

#include "thaw/fault.h"

namespace thaw::cuda {

namespace {

using GetProcAddress = Result (*)(const char *symbol, void **function, int version, uint64_t flags, int *status);

constexpr char kGetProcAddress[] = "cuGetProcAddress_v2";

void *resolve(GetProcAddress get, const char *name, int version) {
    void *function = nullptr;
    int status = 0;
    const Result result = get(name, &function, version, 0, &status);
    if (result != kSuccess || function == nullptr)
        throw Fault(THAW_NO_DEVICE, format("libcuda has no %s of version %d (result %d, status %d)", name, version,
                                           result, status));
    return function;
}

}  // namespace

Api load(const char *path) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) throw Fault(THAW_NO_DEVICE, format("%s", dlerror()));
    const auto get = reinterpret_cast<GetProcAddress>(dlsym(library, kGetProcAddress));
    if (get == nullptr) {
        dlclose(library);
        throw Fault(THAW_NO_DEVICE, format("%s has no %s: a driver of CUDA 12 is needed", path, kGetProcAddress));
    }
    Api api;
#define THAW_CUDA_RESOLVE(name, version, parameters) \
    api.name = reinterpret_cast<Result(*) parameters>(resolve(get, "cu" #name, version));
    THAW_CUDA_CALLS(THAW_CUDA_RESOLVE)
#undef THAW_CUDA_RESOLVE
    return api;
}

std::string Api::name_of(Result result) const {
    const char *name = nullptr;
    if (GetErrorName(result, &name) == kSuccess && name != nullptr) return format("%s (%d)", name, result);
    return format("error %d", result);
}

void Api::check(Result result, const char *call) const {
    if (result == kSuccess) return;
    const auto status = result == kOutOfMemory ? THAW_OUT_OF_MEMORY : THAW_DEVICE;
    throw Fault(status, format("cu%s: %s", call, name_of(result).c_str()));
}

}  // namespace thaw::cuda
