// y (M, N) = x (M, K) @ w (N, K)^T + bias
#include <algorithm>

#include "call.h"
#include "gemm.h"
#include "scratch.h"

namespace minisgl {
namespace {

struct LinearArgs {
    const void* x;
    const void* w;
    const void* bias;  // or null
    void* y;
    int64_t ldx, m, n, k, ldw, dtype, threads;
};

template <class T>
void write_rows(const float* from, int64_t ld, int64_t m, int64_t n, const T* bias, T* to, int64_t ldto) {
    for (int64_t row = 0; row < m; ++row) {
        for (int64_t i = 0; i < n; i += LANES) {
            const int part = int(std::min<int64_t>(LANES, n - i));
            v8 value = load8(from + row * ld + i);
            if (bias) value += part == LANES ? load8(bias + i) : load_part(bias + i, part, 0.0f);
            if (part == LANES) {
                store8(value, to + row * ldto + i);
            } else {
                store_part(value, to + row * ldto + i, part);
            }
        }
    }
}

// x as float32 with row stride K
template <class T>
const float* widen(const LinearArgs& a) {
    const T* x = static_cast<const T*>(a.x);
    float* out = scratch(Scratch::x, size_t(a.m * a.k));
    for (int64_t row = 0; row < a.m; ++row) convert(x + row * a.ldx, a.k, out + row * a.k);
    return out;
}
template <>
const float* widen<float>(const LinearArgs& a) {
    return static_cast<const float*>(a.x);
}

template <class T>
void linear(const LinearArgs& a) {
    const float* x = widen<T>(a);
    const int64_t ldx = sizeof(T) == sizeof(float) ? a.ldx : a.k;
    const T* w = static_cast<const T*>(a.w);
    const T* bias = static_cast<const T*>(a.bias);
    T* y = static_cast<T*>(a.y);
    constexpr int64_t ROWS = 96 * TILE_ROWS;  // the most x rows between two packings of the same weights
    const int64_t groups = (a.n + GROUP - 1) / GROUP;
#pragma omp parallel for num_threads(int(a.threads)) schedule(static) if (a.threads > 1)
    for (int64_t group = 0; group < groups; ++group) {
        const int64_t first = group * GROUP, n = std::min<int64_t>(GROUP, a.n - first);
        for (int64_t row = 0; row < a.m; row += ROWS) {
            const int64_t m = std::min(ROWS, a.m - row);
            float* out = scratch(Scratch::y, size_t(m * GROUP));
            gemm_block(x + row * ldx, ldx, m, w + first * a.ldw, a.ldw, n, a.k, out, GROUP);
            write_rows(out, GROUP, m, n, bias ? bias + first : nullptr, y + row * a.n + first, a.n);
        }
    }
}

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_linear(const minisgl::LinearArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { linear<decltype(type)>(*args); });
}
