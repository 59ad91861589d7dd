// All that a kernel may know of the machine, beside CUDA's own words for indices, barriers, shuffles, votes and atomics.
// The simulator of minisgl-cpu-sim brings a header of the same name that offers the same on a CPU. PTX belongs here only.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

// An array in shared memory.
#define MINISGL_SHARED(type, name, count) __shared__ type name[count]

// The launch's dynamic shared memory.
#define MINISGL_DYNAMIC_SHARED(type, name)            \
    extern __shared__ uint4 minisgl_dynamic_shared[]; \
    type* name = reinterpret_cast<type*>(minisgl_dynamic_shared)

namespace minisgl {

// The widest unit that one thread moves at once.
struct alignas(16) Bytes16 {
    uint32_t words[4];
};

// Storage of 16-bit numbers; kernels compute in float.
struct BFloat16 {
    uint16_t bits;
};

struct Float16 {
    uint16_t bits;
};

__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float widen(BFloat16 value) { return __uint_as_float(static_cast<uint32_t>(value.bits) << 16); }

__device__ __forceinline__ float widen(Float16 value) { return __half2float(__ushort_as_half(value.bits)); }

// To the nearest T, to the even one of two.
template <class T>
__device__ T narrow(float value);

template <>
__device__ __forceinline__ float narrow<float>(float value) {
    return value;
}

template <>
__device__ __forceinline__ BFloat16 narrow<BFloat16>(float value) {
    return {__bfloat16_as_ushort(__float2bfloat16_rn(value))};
}

template <>
__device__ __forceinline__ Float16 narrow<Float16>(float value) {
    return {__half_as_ushort(__float2half_rn(value))};
}

// These three are right to 1e-6 of their result.
__device__ __forceinline__ float inverse_sqrt(float value) { return rsqrtf(value); }

__device__ __forceinline__ float fast_exp(float value) { return __expf(value); }

__device__ __forceinline__ float fast_divide(float value, float by) { return __fdividef(value, by); }

// A read of global memory.
template <class Unit>
__device__ __forceinline__ Unit load(const Unit* from) {
    return *from;
}

template <>
__device__ __forceinline__ Bytes16 load<Bytes16>(const Bytes16* from) {
    const uint4 unit = *reinterpret_cast<const uint4*>(from);
    return {{unit.x, unit.y, unit.z, unit.w}};
}

// A read of global memory that nobody will repeat soon: it takes no room in the L1 cache.
template <class Unit>
__device__ __forceinline__ Unit load_once(const Unit* from) {
    return *from;
}

template <>
__device__ __forceinline__ Bytes16 load_once<Bytes16>(const Bytes16* from) {
    Bytes16 unit;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(unit.words[0]), "=r"(unit.words[1]), "=r"(unit.words[2]), "=r"(unit.words[3])
                 : "l"(__cvta_generic_to_global(from))
                 : "memory");
    return unit;
}

// A write to global memory.
template <class Unit>
__device__ __forceinline__ void store(Unit* to, const Unit& unit) {
    *to = unit;
}

template <>
__device__ __forceinline__ void store<Bytes16>(Bytes16* to, const Bytes16& unit) {
    // Said in PTX: the compiler cuts some plain stores of a uint4 into four.
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
                 :
                 : "l"(__cvta_generic_to_global(to)), "r"(unit.words[0]), "r"(unit.words[1]), "r"(unit.words[2]),
                   "r"(unit.words[3])
                 : "memory");
}

// Programmatic dependent launch, on GPUs that have it: nothing that an earlier kernel writes may be read, and nothing
// that it reads may be written, before this returns.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// From here on the next kernel of the stream may start; it sees what this one writes only after its own wait.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Thread-block clusters, on GPUs that have them: neighbours along x of the grid that run at the same time and may write
// into each other's shared memory. Without clusters, and on other GPUs, each block is a cluster of its own.

// This block's number in its cluster.
__device__ __forceinline__ unsigned cluster_rank() {
#if __CUDA_ARCH__ >= 900
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
#else
    return 0;
#endif
}

// The blocks of a cluster.
__device__ __forceinline__ unsigned cluster_size() {
#if __CUDA_ARCH__ >= 900
    unsigned size;
    asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
    return size;
#else
    return 1;
#endif
}

// A barrier of all threads of a cluster, in two steps, each taken once by each thread in turn. What a thread wrote
// before it arrived, to any memory, is seen by those that have waited. The forms without `.aligned` are right for warps
// that have diverged, too.
__device__ __forceinline__ void cluster_arrive() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}

__device__ __forceinline__ void cluster_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
    __syncthreads();  // which does for both steps: nobody waits who has not arrived
#endif
}

// Writes to block `rank` of the cluster, at the place that `at` is in this block's shared memory. That block must have
// started, which a barrier of the cluster tells, and may not end before another one. T is float or Bytes16.
template <class T>
__device__ void store_remote(T* at, unsigned rank, const T& value) = delete;

template <>
__device__ __forceinline__ void store_remote<float>(float* at, unsigned rank, const float& value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "st.shared::cluster.f32 [there], %2;\n\t"
        "}"
        :
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))), "r"(rank), "f"(value)
        : "memory");
#else
    *at = value;
#endif
}

template <>
__device__ __forceinline__ void store_remote<Bytes16>(Bytes16* at, unsigned rank, const Bytes16& value) {
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "{\n\t"
        ".reg .b32 there;\n\t"
        "mapa.shared::cluster.u32 there, %0, %1;\n\t"
        "st.shared::cluster.v4.u32 [there], {%2, %3, %4, %5};\n\t"
        "}"
        :
        : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(at))), "r"(rank), "r"(value.words[0]), "r"(value.words[1]),
          "r"(value.words[2]), "r"(value.words[3])
        : "memory");
#else
    *at = value;
#endif
}

}  // namespace minisgl
