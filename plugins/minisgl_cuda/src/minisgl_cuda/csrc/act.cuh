// silu(gate) * up; float32 inside.
#pragma once

#include <minisgl/device.h>
#include <minisgl/vectors.h>

namespace minisgl {

struct ActArgs {
    void* out;      // (tokens, width), contiguous
    const void* x;  // (tokens, 2 * width), gate first
    int64_t x_stride;  // elements from a token to the next
    int64_t width;
    int64_t tokens;
    int64_t blocks_per_row;  // not 1 only if a block has one row
};

// blockDim = (threads of one row or of a part of it, rows of one block).
template <class T, int COUNT>
__global__ void __launch_bounds__(256) act_and_mul(const ActArgs args) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const auto parts = static_cast<unsigned>(args.blocks_per_row);
    const int64_t token = static_cast<int64_t>(blockIdx.x / parts) * blockDim.y + threadIdx.y;
    if (token >= args.tokens) return;
    const T* gate = static_cast<const T*>(args.x) + token * args.x_stride;
    const T* up = gate + args.width;
    T* out = static_cast<T*>(args.out) + token * args.width;
    const int64_t vectors = args.width / COUNT, step = static_cast<int64_t>(parts) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x % parts) * blockDim.x + threadIdx.x; i < vectors; i += step) {
        const Vector<T, COUNT> g = load_vector<COUNT>(gate + i * COUNT);
        const Vector<T, COUNT> u = load_vector<COUNT>(up + i * COUNT);
        Vector<T, COUNT> product;
#pragma unroll
        for (int j = 0; j < COUNT; ++j) {
            const float value = widen(g.elements[j]);
            product.elements[j] = narrow<T>(fast_divide(value, 1.0f + fast_exp(-value)) * widen(u.elements[j]));
        }
        store_vector(out + i * COUNT, product);
    }
}

}  // namespace minisgl
