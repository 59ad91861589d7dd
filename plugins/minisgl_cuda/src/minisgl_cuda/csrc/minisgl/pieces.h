// Rows cut into pieces of COUNT elements: 16 bytes that one thread moves at once, or single elements where a row's width,
// address or stride forbids that.
#pragma once

#include <minisgl/device.h>

namespace minisgl {

template <class T, int COUNT>
union Piece {
    static_assert(COUNT * sizeof(T) == sizeof(Bytes16), "a piece is 16 bytes or one element");
    Bytes16 bytes;
    T elements[COUNT];
};

template <class T>
union Piece<T, 1> {
    T elements[1];
};

template <int COUNT, class T>
__device__ __forceinline__ Piece<T, COUNT> load_piece(const T* from) {
    Piece<T, COUNT> piece;
    if constexpr (COUNT > 1) {
        piece.bytes = load(reinterpret_cast<const Bytes16*>(from));
    } else {
        piece.elements[0] = load(from);
    }
    return piece;
}

template <int COUNT, class T>
__device__ __forceinline__ void store_piece(T* to, const Piece<T, COUNT>& piece) {
    if constexpr (COUNT > 1) {
        store(reinterpret_cast<Bytes16*>(to), piece.bytes);
    } else {
        store(to, piece.elements[0]);
    }
}

// COUNT floats beside a piece of another type: 16 bytes at a time if COUNT is a multiple of 4.
template <int COUNT>
__device__ __forceinline__ void load_floats(const float* from, float (&to)[COUNT]) {
    constexpr int STEP = COUNT > 1 ? 4 : 1;
#pragma unroll
    for (int i = 0; i < COUNT; i += STEP) {
        const Piece<float, STEP> piece = load_piece<STEP>(from + i);
#pragma unroll
        for (int j = 0; j < STEP; ++j) to[i + j] = piece.elements[j];
    }
}

template <class T, int COUNT>
__device__ __forceinline__ float sum_of_squares(const Piece<T, COUNT>& piece) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        const float value = widen(piece.elements[j]);
        sum += value * value;
    }
    return sum;
}

// Over `lanes` neighbouring threads of a warp, a power of two; the whole warp takes part.
__device__ __forceinline__ float sum_over_lanes(float value, unsigned lanes) {
    for (unsigned distance = lanes / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(0xffffffffu, value, static_cast<int>(distance));
    }
    return value;
}

}  // namespace minisgl
