// y (M, N) = x (M, K) @ w (N, K)^T + bias
#include <algorithm>

#include "call.h"
#include "gemm.h"
#include "pool.h"
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

// The work as groups of weight rows times blocks of x rows
struct Split {
    int64_t columns, rows, groups, blocks, threads;
};

Split make_split(const LinearArgs& a) {
    constexpr int64_t SKINNY_COLUMNS = 32;        // small enough to divide evenly
    constexpr int64_t MOST_ROWS = 96 * TILE_ROWS;  // between two packings of the same weights
    constexpr int64_t LEAST_ROWS = 16 * TILE_ROWS;  // packing costs as much as 4 rows
    constexpr int64_t ITEMS = 8;                    // per thread
    constexpr int64_t PARALLEL_PRODUCTS = 1 << 16;
    Split s{a.m <= SKINNY ? SKINNY_COLUMNS : GROUP, a.m, 0, 1, 1};
    s.groups = (a.n + s.columns - 1) / s.columns;
    if (a.m > SKINNY) {
        const int64_t wanted = std::min((ITEMS * a.threads + s.groups - 1) / s.groups, a.m / LEAST_ROWS);
        s.blocks = std::max({wanted, (a.m + MOST_ROWS - 1) / MOST_ROWS, int64_t(1)});
        const int64_t tiles = (a.m + TILE_ROWS - 1) / TILE_ROWS;
        s.rows = (tiles + s.blocks - 1) / s.blocks * TILE_ROWS;
    }
    if (a.m * a.n * a.k > PARALLEL_PRODUCTS) s.threads = a.threads;
    return s;
}

template <class T>
void linear(const LinearArgs& a) {
    const float* x = widen<T>(a);
    const int64_t ldx = sizeof(T) == sizeof(float) ? a.ldx : a.k;
    const T* w = static_cast<const T*>(a.w);
    const T* bias = static_cast<const T*>(a.bias);
    T* y = static_cast<T*>(a.y);
    const Split split = make_split(a);
    parallel_for(split.threads, split.groups * split.blocks, [&](int64_t item) {
        const int64_t first = item / split.blocks * split.columns, n = std::min(split.columns, a.n - first);
        const int64_t row = item % split.blocks * split.rows, m = std::min(split.rows, a.m - row);
        if (m <= 0) return;
        float* out = scratch(Scratch::y, size_t(m * GROUP));
        gemm_block(x + row * ldx, ldx, m, w + first * a.ldw, a.ldw, n, a.k, out, GROUP);
        write_rows(out, GROUP, m, n, bias ? bias + first : nullptr, y + row * a.n + first, a.n);
    });
}

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_linear(const minisgl::LinearArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { linear<decltype(type)>(*args); });
}
