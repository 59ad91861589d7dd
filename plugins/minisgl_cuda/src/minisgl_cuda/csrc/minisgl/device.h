// Everything machine-specific that kernels use, except CUDA's own indices, barriers, shuffles, votes and atomics.
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

// A read of global memory that is not repeated soon: it bypasses the L1 cache.
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

}  // namespace minisgl
