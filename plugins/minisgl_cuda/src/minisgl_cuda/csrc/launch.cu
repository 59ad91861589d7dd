// The C interface of the compiled kernels: Python finds one by name and launches it with a packed struct.
#include <cstring>

#include "act.cuh"
#include "kv_index.cuh"
#include "kv_store.cuh"
#include "norm.cuh"
#include "rope.cuh"

namespace minisgl {
namespace {

struct Entry {
    const char* name;
    const void* kernel;
};

#define MINISGL_ENTRY(...) {#__VA_ARGS__, reinterpret_cast<const void*>(&__VA_ARGS__)}

// Every dtype, by vectors of 16 bytes and by single elements.
#define MINISGL_ENTRIES(kernel)                                                                    \
    MINISGL_ENTRY(kernel<minisgl::BFloat16, 8>), MINISGL_ENTRY(kernel<minisgl::BFloat16, 1>),      \
        MINISGL_ENTRY(kernel<minisgl::Float16, 8>), MINISGL_ENTRY(kernel<minisgl::Float16, 1>),    \
        MINISGL_ENTRY(kernel<float, 4>), MINISGL_ENTRY(kernel<float, 1>)

// Qualified names: Python looks kernels up as it would write them in C++.
const Entry ENTRIES[] = {
    MINISGL_ENTRY(minisgl::kv_store<minisgl::Bytes16>), MINISGL_ENTRY(minisgl::kv_store<uint32_t>),
    MINISGL_ENTRY(minisgl::kv_store<uint16_t>),         MINISGL_ENTRY(minisgl::kv_store<uint8_t>),
    MINISGL_ENTRY(minisgl::kv_index<minisgl::Bytes16>), MINISGL_ENTRY(minisgl::kv_index<uint32_t>),
    MINISGL_ENTRY(minisgl::kv_index<uint16_t>),         MINISGL_ENTRY(minisgl::kv_index<uint8_t>),
    MINISGL_ENTRIES(minisgl::rms_norm),                 MINISGL_ENTRIES(minisgl::add_rms_norm),
    MINISGL_ENTRIES(minisgl::qk_norm_rope_store),       MINISGL_ENTRIES(minisgl::act_and_mul),
};

}  // namespace

// As Python packs it; the kernel's one argument follows.
struct Launch {
    const void* kernel;
    cudaStream_t stream;
    int64_t blocks, threads_x, threads_y;
    int64_t dependent;  // programmatic dependent launch: may start before the stream's previous kernel has ended
};

}  // namespace minisgl

// The kernel of this name, loaded onto the current device: loading later, inside a graph capture, could fail.
// Returns a cudaError_t.
extern "C" int minisgl_cuda_find(const char* name, const void** kernel) {
    for (const minisgl::Entry& entry : minisgl::ENTRIES) {
        if (std::strcmp(entry.name, name) == 0) {
            cudaFuncAttributes attributes;
            *kernel = entry.kernel;
            return cudaFuncGetAttributes(&attributes, entry.kernel);
        }
    }
    return cudaErrorSymbolNotFound;
}

extern "C" int minisgl_cuda_launch(minisgl::Launch* launch) {
    cudaLaunchAttribute dependent;
    dependent.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    dependent.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(launch->blocks));
    config.blockDim = dim3(static_cast<unsigned>(launch->threads_x), static_cast<unsigned>(launch->threads_y));
    config.stream = launch->stream;
    config.attrs = &dependent;
    config.numAttrs = launch->dependent ? 1 : 0;
    void* args[] = {launch + 1};
    return cudaLaunchKernelExC(&config, launch->kernel, args);
}

extern "C" const char* minisgl_cuda_error(int code) { return cudaGetErrorString(static_cast<cudaError_t>(code)); }
