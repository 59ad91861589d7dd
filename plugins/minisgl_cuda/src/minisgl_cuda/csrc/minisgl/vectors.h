// Rows as vectors of COUNT elements. One thread moves a vector of 16 bytes at once, or single elements (COUNT = 1) where
// the width, the address or a stride of a row is not a multiple of 16 bytes.
#pragma once

#include <minisgl/device.h>

namespace minisgl {

template <class T, int COUNT>
union Vector {
    static_assert(COUNT * sizeof(T) == sizeof(Bytes16), "a vector is 16 bytes or one element");
    Bytes16 bytes;
    T elements[COUNT];
};

template <class T>
union Vector<T, 1> {
    T elements[1];
};

template <int COUNT, class T>
__device__ __forceinline__ Vector<T, COUNT> load_vector(const T* from) {
    Vector<T, COUNT> vector;
    if constexpr (COUNT > 1) {
        vector.bytes = load(reinterpret_cast<const Bytes16*>(from));
    } else {
        vector.elements[0] = load(from);
    }
    return vector;
}

template <int COUNT, class T>
__device__ __forceinline__ void store_vector(T* to, const Vector<T, COUNT>& vector) {
    if constexpr (COUNT > 1) {
        store(reinterpret_cast<Bytes16*>(to), vector.bytes);
    } else {
        store(to, vector.elements[0]);
    }
}

// Loads COUNT floats that belong to a vector of another type: 16 bytes at a time if COUNT is a multiple of 4.
template <int COUNT>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[COUNT]) {
    constexpr int STEP = COUNT > 1 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < COUNT; i += STEP) {
        const Vector<float, STEP> vector = load_vector<STEP>(from + i);
#pragma unroll
        for (int j = 0; j < STEP; ++j) to[i + j] = vector.elements[j];
    }
}

template <class T, int COUNT>
__device__ __forceinline__ float sum_of_squares(const Vector<T, COUNT>& vector) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const float value = widen(vector.elements[j]);
        sum += value * value;
    }
    return sum;
}

// Sum over `lanes` adjacent threads of a warp, a power of two. The whole warp takes part.
__device__ __forceinline__ float sum_over_lanes(float value, unsigned lanes) {
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, static_cast<int>(distance));
    }
    return value;
}

}  // namespace minisgl
