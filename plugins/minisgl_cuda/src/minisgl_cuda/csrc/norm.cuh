// Root-mean-square norm of rows, alone or after adding to a residual; float32 inside.
#pragma once

#include <minisgl/device.h>
#include <minisgl/vectors.h>

namespace minisgl {

struct NormArgs {
    void* out;           // (tokens, width)
    const void* x;       // (tokens, width); may be `out`
    void* residual;      // (tokens, width), += x before the norm; unused by rms_norm
    const void* weight;  // (width,)
    int64_t out_stride, x_stride, residual_stride;  // elements from a token to the next
    int64_t width;
    int64_t tokens;
    double eps;
};

constexpr int NORM_THREADS = 512;
constexpr int NORM_HELD = 4;  // vectors that a thread keeps in registers; it reads the others twice

// The residual is rounded to T first: the norm must see what later layers will see.
template <class T, int COUNT>
__device__ __forceinline__ Vector<T, COUNT> rounded_sum(const Vector<T, COUNT>& a, const Vector<T, COUNT>& b) {
    Vector<T, COUNT> sum;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) sum.elements[j] = narrow<T>(widen(a.elements[j]) + widen(b.elements[j]));
    return sum;
}

template <class T, int COUNT>
__device__ __forceinline__ Vector<T, COUNT> scaled(const Vector<T, COUNT>& x, float scale, const Vector<T, COUNT>& weights) {
    Vector<T, COUNT> out;
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        out.elements[j] = narrow<T>(widen(x.elements[j]) * scale * widen(weights.elements[j]));
    }
    return out;
}

// Sum over the blockDim.x threads of a row, which are whole warps. All threads of the block take part.
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
    // Threads past the last row have no vectors, but they must reach the barrier.
    const int64_t vectors = token < args.tokens ? args.width / COUNT : 0;
    const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
    T* residual = static_cast<T*>(args.residual) + token * args.residual_stride;
    const T* weight = static_cast<const T*>(args.weight);
    T* out = static_cast<T*>(args.out) + token * args.out_stride;

    // Issue all reads before the first write, so that their latencies overlap.
    Vector<T, COUNT> held[NORM_HELD], weights[NORM_HELD], before[NORM_HELD];
#pragma unroll
    for (int h = 0; h < NORM_HELD; ++h) {
        const int64_t i = threadIdx.x + static_cast<int64_t>(h) * blockDim.x;
        if (i >= vectors) continue;
        held[h] = load_vector<COUNT>(x + i * COUNT);
        if constexpr (ADD) before[h] = load_vector<COUNT>(residual + i * COUNT);
        weights[h] = load_vector<COUNT>(weight + i * COUNT);
    }
    float sum = 0.0f;
#pragma unroll
    for (int h = 0; h < NORM_HELD; ++h) {
        const int64_t i = threadIdx.x + static_cast<int64_t>(h) * blockDim.x;
        if (i >= vectors) continue;
        if constexpr (ADD) {
            held[h] = rounded_sum(held[h], before[h]);
            store_vector(residual + i * COUNT, held[h]);
        }
        sum += sum_of_squares(held[h]);
    }
    const int64_t rest = threadIdx.x + static_cast<int64_t>(NORM_HELD) * blockDim.x;
    for (int64_t i = rest; i < vectors; i += blockDim.x) {
        Vector<T, COUNT> vector = load_vector<COUNT>(x + i * COUNT);
        if constexpr (ADD) {
            vector = rounded_sum(vector, load_vector<COUNT>(residual + i * COUNT));
            store_vector(residual + i * COUNT, vector);
        }
        sum += sum_of_squares(vector);
    }

    const float mean = sum_over_row(sum) / static_cast<float>(args.width);
    const float scale = inverse_sqrt(mean + static_cast<float>(args.eps));
#pragma unroll
    for (int h = 0; h < NORM_HELD; ++h) {
        const int64_t i = threadIdx.x + static_cast<int64_t>(h) * blockDim.x;
        if (i < vectors) store_vector(out + i * COUNT, scaled(held[h], scale, weights[h]));
    }
    const T* source = ADD ? residual : x;
    for (int64_t i = rest; i < vectors; i += blockDim.x) {
        const Vector<T, COUNT> vector = load_vector<COUNT>(source + i * COUNT);
        store_vector(out + i * COUNT, scaled(vector, scale, load_vector<COUNT>(weight + i * COUNT)));
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
