// What a kernel may know of the machine, on a CPU: CUDA's words for indices, barriers, shuffles, votes and atomics, and
// the helpers of the header of the same name that minisgl-cuda compiles with nvcc. Plain loads and stores need no help:
// the compiler's thread-sanitizer instrumentation reports each of them to the simulator.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ const
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

namespace minisgl_sim {

struct Dim3 {
    unsigned x, y, z;
};

// A line of a kernel. Lanes meet at lines, not at instructions: the compiler may have copied those.
struct Site {
    const char* file;
    int line;
};

enum Access : int { READ = 0, WRITE = 1, ATOMIC = 2 };

Dim3 thread_index();
Dim3 block_index();
Dim3 block_shape();
Dim3 grid_shape();

void block_barrier(Site site);
void warp_barrier(Site site, uint32_t mask);
uint64_t exchange(Site site, uint32_t mask, uint64_t value, uint32_t source);  // the value of lane `source`
uint32_t vote(Site site, uint32_t mask, bool predicate);                       // the lanes of mask where it holds
unsigned lane();

void check(const void* at, size_t size, size_t alignment, Access access);
void* shared(const void* key, const char* name, size_t size);
void* dynamic_shared();

inline constexpr unsigned WARP = 32;

// Memory is touched here behind the instrumentation's back: `check` has reported the access.
template <class T>
__attribute__((noinline, no_sanitize("thread"))) T raw_load(const T* from) {
    return *from;
}

template <class T>
__attribute__((noinline, no_sanitize("thread"))) void raw_store(T* to, T value) {
    *to = value;
}

template <class T>
uint64_t to_bits(T value) {
    static_assert(sizeof(T) <= 8 && std::is_trivially_copyable_v<T>, "a shuffle moves 8 bytes at most");
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(T));
    return bits;
}

template <class T>
T from_bits(uint64_t bits) {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
}

template <class T>
T take(Site site, uint32_t mask, T value, unsigned source) {
    return from_bits<T>(exchange(site, mask, to_bits(value), source));
}

template <class T>
T shuffle(Site site, uint32_t mask, T value, int source, unsigned width = WARP) {
    return take(site, mask, value, (lane() & ~(width - 1)) | (static_cast<unsigned>(source) & (width - 1)));
}

template <class T>
T shuffle_xor(Site site, uint32_t mask, T value, int bits, unsigned width = WARP) {
    const unsigned from = lane() ^ static_cast<unsigned>(bits);
    return take(site, mask, value, from < (lane() & ~(width - 1)) + width ? from : lane());
}

template <class T>
T shuffle_down(Site site, uint32_t mask, T value, unsigned by, unsigned width = WARP) {
    const unsigned from = lane() + by;
    return take(site, mask, value, from < (lane() & ~(width - 1)) + width ? from : lane());
}

template <class T>
T shuffle_up(Site site, uint32_t mask, T value, unsigned by, unsigned width = WARP) {
    return take(site, mask, value, (lane() & (width - 1)) >= by ? lane() - by : lane());
}

template <class T, class Change>
T atomic(T* at, Change change) {
    check(at, sizeof(T), sizeof(T), ATOMIC);
    const T old = raw_load(at);
    raw_store(at, static_cast<T>(change(old)));
    return old;
}

// One 8-byte slot of Python's: an integer, a pointer, a double for any floating parameter; a struct takes several.
template <class T>
T unpack(const int64_t*& slots) {
    std::conditional_t<std::is_floating_point_v<T>, double, T> value;
    std::memcpy(&value, slots, sizeof(value));
    slots += (sizeof(value) + 7) / 8;
    return static_cast<T>(value);
}

template <class... Parameters>
void call(void (*kernel)(Parameters...), const int64_t* slots) {
    const std::tuple<std::decay_t<Parameters>...> arguments{unpack<std::decay_t<Parameters>>(slots)...};
    std::apply(kernel, arguments);
}

}  // namespace minisgl_sim

#define threadIdx (::minisgl_sim::thread_index())
#define blockIdx (::minisgl_sim::block_index())
#define blockDim (::minisgl_sim::block_shape())
#define gridDim (::minisgl_sim::grid_shape())
#define warpSize 32

#define MINISGL_SITE (::minisgl_sim::Site{__FILE__, __LINE__})
#define __syncthreads() (::minisgl_sim::block_barrier(MINISGL_SITE))
#define MINISGL_FIRST(first, ...) first
#define __syncwarp(...) (::minisgl_sim::warp_barrier(MINISGL_SITE, (MINISGL_FIRST(__VA_ARGS__ __VA_OPT__(, ) 0xffffffffu))))
#define __shfl_sync(...) (::minisgl_sim::shuffle(MINISGL_SITE, __VA_ARGS__))
#define __shfl_xor_sync(...) (::minisgl_sim::shuffle_xor(MINISGL_SITE, __VA_ARGS__))
#define __shfl_down_sync(...) (::minisgl_sim::shuffle_down(MINISGL_SITE, __VA_ARGS__))
#define __shfl_up_sync(...) (::minisgl_sim::shuffle_up(MINISGL_SITE, __VA_ARGS__))
#define __ballot_sync(mask, predicate) (::minisgl_sim::vote(MINISGL_SITE, mask, (predicate) != 0))
#define __any_sync(mask, predicate) (__ballot_sync(mask, predicate) != 0)
#define __all_sync(mask, predicate) (__ballot_sync(mask, !(predicate)) == 0)

template <class T>
T atomicAdd(T* at, std::common_type_t<T> value) {
    return minisgl_sim::atomic(at, [value](T old) { return old + value; });
}

template <class T>
T atomicMax(T* at, std::common_type_t<T> value) {
    return minisgl_sim::atomic(at, [value](T old) { return old > value ? old : value; });
}

template <class T>
T atomicMin(T* at, std::common_type_t<T> value) {
    return minisgl_sim::atomic(at, [value](T old) { return old < value ? old : value; });
}

template <class T>
T atomicExch(T* at, std::common_type_t<T> value) {
    return minisgl_sim::atomic(at, [value](T) { return value; });
}

template <class T>
T atomicCAS(T* at, std::common_type_t<T> expected, std::common_type_t<T> value) {
    return minisgl_sim::atomic(at, [=](T old) { return old == expected ? value : old; });
}

// Each use is an array of its own, found by the address of a constant of its own.
#define MINISGL_SHARED(type, name, count)   \
    static const char minisgl_key_##name{}; \
    auto& name = *static_cast<type(*)[count]>(::minisgl_sim::shared(&minisgl_key_##name, #name, sizeof(type) * (count)))

#define MINISGL_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(::minisgl_sim::dynamic_shared())

namespace minisgl {

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

inline float widen(float value) { return value; }

inline float widen(BFloat16 value) { return minisgl_sim::from_bits<float>(static_cast<uint32_t>(value.bits) << 16); }

// 10 bits of fraction; below 2**-14 in steps of 2**-24.
inline float widen(Float16 value) {
    const int exponent = value.bits >> 10 & 31, fraction = value.bits & 1023;
    float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -24)
                               : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
    if (exponent == 31) size = fraction != 0 ? NAN : INFINITY;
    return std::copysign(size, value.bits >> 15 != 0 ? -1.0f : 1.0f);
}

// To the nearest T, to the even one of two.
template <class T>
T narrow(float value);

template <>
inline float narrow<float>(float value) {
    return value;
}

template <>
inline BFloat16 narrow<BFloat16>(float value) {
    const auto bits = static_cast<uint32_t>(minisgl_sim::to_bits(value));
    if (std::isnan(value)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <>
inline Float16 narrow<Float16>(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const float size = std::fabs(value);
    if (std::isnan(value)) return {0x7fff};
    if (size >= 65520.0f) return {static_cast<uint16_t>(sign | 0x7c00)};
    if (size < 0x1p-14f) return {static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(size * 0x1p24f)))};
    const int exponent = std::ilogb(size);
    const auto steps = static_cast<int>(std::nearbyint(std::ldexp(size, 10 - exponent)));  // 1024 to 2048
    return {static_cast<uint16_t>(sign | ((exponent + 14) * 1024 + steps))};
}

inline float inverse_sqrt(float value) { return 1.0f / std::sqrt(value); }

inline float fast_exp(float value) { return std::exp(value); }

inline float fast_divide(float value, float by) { return value / by; }

template <class Unit>
Unit load(const Unit* from) {
    minisgl_sim::check(from, sizeof(Unit), sizeof(Unit), minisgl_sim::READ);
    return minisgl_sim::raw_load(from);
}

template <class Unit>
Unit load_once(const Unit* from) {
    minisgl_sim::check(from, sizeof(Unit), sizeof(Unit), minisgl_sim::READ);
    return minisgl_sim::raw_load(from);
}

template <class Unit>
void store(Unit* to, const Unit& unit) {
    minisgl_sim::check(to, sizeof(Unit), sizeof(Unit), minisgl_sim::WRITE);
    minisgl_sim::raw_store(to, unit);
}

// The launches of a simulation follow one another: there is nothing to wait for.
inline void wait_for_previous_kernel() {}

inline void let_next_kernel_start() {}

}  // namespace minisgl
