// All that a kernel may know of the machine, beside CUDA's own words for indices, barriers, shuffles, votes and atomics.
// The simulator of minisgl-cpu-sim brings a header of the same name that offers the same on a CPU. PTX belongs here only.
#pragma once

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
    *reinterpret_cast<uint4*>(to) = make_uint4(unit.words[0], unit.words[1], unit.words[2], unit.words[3]);
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
