// Per-head q and k norm, rotary embedding and KV store in one pass over the projection's output; float32 inside.
#pragma once

#include <minisgl/device.h>
#include <minisgl/vectors.h>

namespace minisgl {

struct RopeArgs {
    void* qkv;                // (tokens, q_heads + 2 * kv_heads, width): q and k are changed in place
    const void* q_weight;     // (width,) or null: no norm
    const void* k_weight;     // the same for k
    const int32_t* positions;  // (tokens,)
    const float* cos_sin;     // (positions, rotary): cosines, then sines
    void* k_cache;
    void* v_cache;
    const int32_t* out_loc;  // (tokens,): the slot of each token
    int64_t qkv_stride, angle_stride;  // elements from a token, or a position, to the next
    int64_t k_slot_stride, k_head_stride, v_slot_stride, v_head_stride;  // in elements
    int64_t q_heads, kv_heads;
    int64_t width, rotary;  // elements of a head, and how many of them are rotated
    int64_t tokens;
    int64_t blocks_per_token;
    double eps;
};

// What one thread rotates: dimensions i and i + rotary / 2 for each i of a vector; or one vector that is only copied.
template <class T, int COUNT>
struct Pair {
    Vector<T, COUNT> a, b;
};

// The vectors of pair `i` of a head. Pairs from `turning` on are not rotated and have no a.
template <class T, int COUNT>
__device__ __forceinline__ Pair<T, COUNT> load_pair(const T* head, int i, int turning) {
    Pair<T, COUNT> pair;
    if (i < turning) pair.a = load_vector<COUNT>(head + i * COUNT);
    pair.b = load_vector<COUNT>(head + (i + turning) * COUNT);
    return pair;
}

template <class T, int COUNT>
__device__ __forceinline__ void store_pair(T* head, int i, int turning, const Pair<T, COUNT>& pair) {
    if (i < turning) store_vector(head + i * COUNT, pair.a);
    store_vector(head + (i + turning) * COUNT, pair.b);
}

template <class T, int COUNT>
__device__ __forceinline__ float sum_of_squares(const Pair<T, COUNT>& pair, int i, int turning) {
    return sum_of_squares(pair.b) + (i < turning ? sum_of_squares(pair.a) : 0.0f);
}

template <class T, int COUNT>
__device__ __forceinline__ void scale_vector(
    const Vector<T, COUNT>& vector, float scale, const T* weight, float (&out)[COUNT]) {
#pragma unroll
    for (int j = 0; j < COUNT; ++j) out[j] = widen(vector.elements[j]);
    if (weight == nullptr) return;
    const Vector<T, COUNT> weights = load_vector<COUNT>(weight);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) out[j] = out[j] * scale * widen(weights.elements[j]);
}

// Norm (none if weight is null) and rotation. `angles`: the token's row of cosines, then sines.
template <class T, int COUNT>
__device__ __forceinline__ Pair<T, COUNT> turned(
    const Pair<T, COUNT>& pair, int i, int turning, float scale, const T* weight, const float* angles) {
    Pair<T, COUNT> out;
    float b[COUNT];
    scale_vector(pair.b, scale, weight == nullptr ? nullptr : weight + (i + turning) * COUNT, b);
    if (i >= turning) {
#pragma unroll
        for (int j = 0; j < COUNT; ++j) out.b.elements[j] = narrow<T>(b[j]);
        return out;
    }
    float a[COUNT], cosines[COUNT], sines[COUNT];
    scale_vector(pair.a, scale, weight == nullptr ? nullptr : weight + i * COUNT, a);
    load_floats(angles + i * COUNT, cosines);
    load_floats(angles + (i + turning) * COUNT, sines);
#pragma unroll
    for (int j = 0; j < COUNT; ++j) {
        out.a.elements[j] = narrow<T>(a[j] * cosines[j] - b[j] * sines[j]);
        out.b.elements[j] = narrow<T>(b[j] * cosines[j] + a[j] * sines[j]);
    }
    return out;
}

// blockDim = (threads of one head: a power of two up to 32, heads of one block), whole warps. Each thread reads and
// writes dimensions that no other thread touches, so the update in place is safe.
template <class T, int COUNT>
__global__ void __launch_bounds__(256) qk_norm_rope_store(const RopeArgs args) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const auto blocks = static_cast<unsigned>(args.blocks_per_token);
    const int64_t token = blockIdx.x / blocks;
    const int index = static_cast<int>(blockIdx.x % blocks * blockDim.y + threadIdx.y);
    const int q_heads = static_cast<int>(args.q_heads), kv_heads = static_cast<int>(args.kv_heads);
    const bool is_q = index < q_heads, is_v = index >= q_heads + kv_heads;
    const int turning = static_cast<int>(args.rotary) / 2 / COUNT;
    // Threads past the last head have no pairs, but they must take part in the shuffles of the sum.
    const int pairs = index < q_heads + 2 * kv_heads ? static_cast<int>(args.width) / COUNT - turning : 0;
    const int first = static_cast<int>(threadIdx.x), step = static_cast<int>(blockDim.x);
    T* head = static_cast<T*>(args.qkv) + token * args.qkv_stride + index * args.width;
    const float* angles = args.cos_sin + args.positions[token] * args.angle_stride;
    const int64_t slot = args.out_loc[token];
    const int64_t kv_head = index - q_heads - (is_v ? kv_heads : 0);
    T* cached = is_v ? static_cast<T*>(args.v_cache) + slot * args.v_slot_stride + kv_head * args.v_head_stride
                     : static_cast<T*>(args.k_cache) + slot * args.k_slot_stride + kv_head * args.k_head_stride;
    const T* weight = is_v ? nullptr : static_cast<const T*>(is_q ? args.q_weight : args.k_weight);

    // The first pair stays in registers; usually there is no other.
    Pair<T, COUNT> own{};
    if (first < pairs) own = load_pair<T, COUNT>(head, first, turning);
    float scale = 1.0f;
    if (args.q_weight != nullptr || args.k_weight != nullptr) {
        float sum = first < pairs ? sum_of_squares(own, first, turning) : 0.0f;
        for (int i = first + step; i < pairs; i += step) {
            sum += sum_of_squares(load_pair<T, COUNT>(head, i, turning), i, turning);
        }
        const float mean = sum_over_lanes(sum, blockDim.x) / static_cast<float>(args.width);
        scale = inverse_sqrt(mean + static_cast<float>(args.eps));
    }
    for (int i = first; i < pairs; i += step) {
        Pair<T, COUNT> pair = i == first ? own : load_pair<T, COUNT>(head, i, turning);
        if (!is_v) {
            pair = turned(pair, i, turning, scale, weight, angles);
            store_pair(head, i, turning, pair);
        }
        if (!is_q) store_pair(cached, i, turning, pair);
    }
}

}  // namespace minisgl
