// Root-mean-square norm of rows, alone or after adding to a residual; float32 inside.
#pragma once

#include <minisgl/device.h>
#include <minisgl/pieces.h>

namespace minisgl {

struct NormArgs {
    void* out;           // (tokens, width)
    const void* x;       // (tokens, width); may be `out`
    void* residual;      // (tokens, width), += x before the norm; unused by rms_norm
    const void* weight;  // (width,)
    int64_t out_step, x_step, residual_step;  // elements from a token to the next
    int64_t width;
    int64_t tokens;
    double eps;
};

constexpr int NORM_THREADS = 512;
constexpr int NORM_HELD = 4;  // pieces that a thread keeps in registers; further ones it reads twice

// The residual is rounded to T first: the norm must see what later layers will see.
template <class T, int COUNT>
__device__ __forceinline__ Piece<T, COUNT> rounded_sum(const Piece<T, COUNT>& a, const Piece<T, COUNT>& b) {
    Piece<T, COUNT> sum;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) sum.elements[j] = narrow<T>(widen(a.elements[j]) + widen(b.elements[j]));
    return sum;
}

template <class T, int COUNT>
__device__ __forceinline__ Piece<T, COUNT> scaled(const Piece<T, COUNT>& x, float scale, const Piece<T, COUNT>& gain) {
    Piece<T, COUNT> out;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        out.elements[j] = narrow<T>(widen(x.elements[j]) * scale * widen(gain.elements[j]));
    }
    return out;
}

// Over the blockDim.x threads of a row, whole warps; all threads of the block take part.
__device__ __forceinline__ float sum_over_row(float value) {
    MINISGL_SHARED(float, parts, NORM_THREADS / 32);
    value = sum_over_lanes(value, 32);
    const unsigned warps = blockDim.x / 32;
    if (warps == 1) return value;
    const unsigned first = threadIdx.y * warps;
    if (threadIdx.x % 32 == 0) parts[first + threadIdx.x / 32] = value;
    __syncthreads();
    float sum = 0.0f;
    for (unsigned warp = 0; warp < warps; ++warp) sum += parts[first + warp];
    return sum;
}

// blockDim = (threads of one row, rows of one block).
template <class T, int COUNT, bool ADD>
__device__ __forceinline__ void normalise_rows(const NormArgs& args) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    // Rows behind the last have no pieces, but their threads meet the others at the barrier.
    const int64_t pieces = token < args.tokens ? args.width / COUNT : 0;
    const T* x = static_cast<const T*>(args.x) + token * args.x_step;
    T* residual = static_cast<T*>(args.residual) + token * args.residual_step;
    const T* weight = static_cast<const T*>(args.weight);
    T* out = static_cast<T*>(args.out) + token * args.out_step;

    // All reads are under way before the first write.
    Piece<T, COUNT> held[NORM_HELD], gains[NORM_HELD], before[NORM_HELD];
#pragma unroll
    for (int h = 0; h < NORM_HELD; ++h) {
        const int64_t i = threadIdx.x + static_cast<int64_t>(h) * blockDim.x;
        if (i >= pieces) continue;
        held[h] = load_piece<COUNT>(x + i * COUNT);
        if constexpr (ADD) before[h] = load_piece<COUNT>(residual + i * COUNT);
        gains[h] = load_piece<COUNT>(weight + i * COUNT);
    }
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < NORM_HELD; ++h) {
        const int64_t i = threadIdx.x + static_cast<int64_t>(h) * blockDim.x;
        if (i >= pieces) continue;
        if constexpr (ADD) {
            held[h] = rounded_sum(held[h], before[h]);
            store_piece(residual + i * COUNT, held[h]);
        }
        sum += sum_of_squares(held[h]);
    }
    const int64_t rest = threadIdx.x + static_cast<int64_t>(NORM_HELD) * blockDim.x;
    for (int64_t i = rest; i < pieces; i += blockDim.x) {
        Piece<T, COUNT> piece = load_piece<COUNT>(x + i * COUNT);
        if constexpr (ADD) {
            piece = rounded_sum(piece, load_piece<COUNT>(residual + i * COUNT));
            store_piece(residual + i * COUNT, piece);
        }
        sum += sum_of_squares(piece);
    }

    const float mean = sum_over_row(sum) / static_cast<float>(args.width);
    const float scale = inverse_sqrt(mean + static_cast<float>(args.eps));
#pragma unroll
    for (int h = 0; h < NORM_HELD; ++h) {
        const int64_t i = threadIdx.x + static_cast<int64_t>(h) * blockDim.x;
        if (i < pieces) store_piece(out + i * COUNT, scaled(held[h], scale, gains[h]));
    }
    const T* source = ADD ? residual : x;
    for (int64_t i = rest; i < pieces; i += blockDim.x) {
        const Piece<T, COUNT> piece = load_piece<COUNT>(source + i * COUNT);
        store_piece(out + i * COUNT, scaled(piece, scale, load_piece<COUNT>(weight + i * COUNT)));
    }
}

template <class T, int COUNT>
__global__ void __launch_bounds__(NORM_THREADS) rms_norm(const NormArgs args) {
    normalise_rows<T, COUNT, false>(args);
}

template <class T, int COUNT>
__global__ void __launch_bounds__(NORM_THREADS) add_rms_norm(const NormArgs args) {
    normalise_rows<T, COUNT, true>(args);
}

}  // namespace minisgl
