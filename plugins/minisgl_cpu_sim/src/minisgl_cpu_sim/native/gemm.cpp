#include "gemm.h"

#include <algorithm>
#include <cstring>

#include "scratch.h"

namespace minisgl {
namespace {

constexpr int DEPTH = 512;  // K of one packed group: GROUP * DEPTH floats stay in the L2 cache

// ---- dot products: R weight rows by C x rows ----
// Each result has one accumulator whatever R and C are, so that it does not depend on the size of the batch.

// Weights as float32, a step at a time. bfloat16 comes in pairs, even elements in the low halves and odd ones in the high
// halves of 32-bit words: two instructions widen 16 of them, if x is laid out likewise (`pair_rows`).
template <class W>
struct Step {
    static constexpr int VECTORS = 1;
    static void load(const W* from, v8 (&to)[1]) { to[0] = load8(from); }
};
template <>
struct Step<bf16> {
    static constexpr int VECTORS = 2;
    static void load(const bf16* from, v8 (&to)[2]) {
        u8 pairs;
        std::memcpy(&pairs, from, sizeof(pairs));
        to[0] = bit_cast<v8>(pairs << 16);
        to[1] = bit_cast<v8>(pairs & 0xffff0000u);
    }
};

template <int R, int C, class W>
inline void tile_dot(const float* x, int64_t ldx, const W* w, int64_t ldw, int64_t k_len, float* y, int64_t ldy) {
    constexpr int VECTORS = Step<W>::VECTORS, WIDTH = VECTORS * LANES;
    v8 acc[C][R] = {};
    int64_t k = 0;
    for (; k + WIDTH <= k_len; k += WIDTH) {
        v8 weight[R][VECTORS];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            Step<W>::load(w + r * ldw + k, weight[r]);
            __builtin_prefetch(w + (r + R) * ldw + k);
        }
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
#pragma GCC unroll 2
            for (int half = 0; half < VECTORS; ++half) {
                v8 value = load8(x + c * ldx + k + half * LANES);
                if (R > 1) keep(value);
#pragma GCC unroll 8
                for (int r = 0; r < R; ++r) add_product(acc[c][r], weight[r][half], value);
            }
        }
    }
    for (; k < k_len; k += LANES) {
        const int count = int(std::min<int64_t>(LANES, k_len - k));
        for (int r = 0; r < R; ++r) {
            const v8 weight = load_part(w + r * ldw + k, count, 0.0f);
            for (int c = 0; c < C; ++c) add_product(acc[c][r], weight, load_part(x + c * ldx + k, count, 0.0f));
        }
    }
    constexpr int WHOLE = R * C / LANES * LANES;
    v8* flat = &acc[0][0];
#pragma GCC unroll 8
    for (int i = 0; i < WHOLE; i += LANES) {
        const v8 sums = sum_each(flat + i);
        for (int j = 0; j < LANES; ++j) y[(i + j) / R * ldy + (i + j) % R] = sums[j];
    }
#pragma GCC unroll 8
    for (int i = WHOLE; i < R * C; ++i) y[i / R * ldy + i % R] = sum(flat[i]);
}

// R weight rows by all m x rows
template <int R, class W>
inline void rows_dot(
    const float* x, int64_t ldx, int64_t m, const W* w, int64_t ldw, int64_t k_len, float* y, int64_t ldy
) {
    while (m > 0) {
        // 5 and 6 in halves: 4 + 1 would leave most of the registers idle.
        const int64_t count = m == 5 || m == 6 ? 3 : std::min<int64_t>(m, 4);
        switch (count) {
            case 1: tile_dot<R, 1>(x, ldx, w, ldw, k_len, y, ldy); break;
            case 2: tile_dot<R, 2>(x, ldx, w, ldw, k_len, y, ldy); break;
            case 3: tile_dot<R, 3>(x, ldx, w, ldw, k_len, y, ldy); break;
            default: tile_dot<R, 4>(x, ldx, w, ldw, k_len, y, ldy); break;
        }
        x += count * ldx;
        y += count * ldy;
        m -= count;
    }
}

template <int R, class W>
inline void skinny_rows(
    const float* x, int64_t ldx, int64_t m, const W* w, int64_t ldw, int64_t n, int64_t k_len, float* y, int64_t ldy
) {
    int64_t row = 0;
    for (; row + R <= n; row += R) rows_dot<R>(x, ldx, m, w + row * ldw, ldw, k_len, y + row, ldy);
    for (; row < n; ++row) rows_dot<1>(x, ldx, m, w + row * ldw, ldw, k_len, y + row, ldy);
}

// Evens, then odds of each 16 elements; a last part of fewer stays as it is.
inline const float* pair_rows(const float* x, int64_t ldx, int64_t m, int64_t k_len) {
    float* out = scratch(Scratch::pairs, size_t(m * k_len));
    for (int64_t row = 0; row < m; ++row) {
        const float* from = x + row * ldx;
        float* to = out + row * k_len;
        int64_t k = 0;
        for (; k + 2 * LANES <= k_len; k += 2 * LANES) {
            const v8 a = load8(from + k), b = load8(from + k + LANES);
            store8(MINISGL_SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14), to + k);
            store8(MINISGL_SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15), to + k + LANES);
        }
        std::copy(from + k, from + k_len, to + k);
    }
    return out;
}

template <class W>
inline void skinny(
    const float* x, int64_t ldx, int64_t m, const W* w, int64_t ldw, int64_t n, int64_t k_len, float* y, int64_t ldy
) {
    if (Step<W>::VECTORS == 2) {
        x = pair_rows(x, ldx, m, k_len);
        ldx = k_len;
    }
    if (m == 1) {
        skinny_rows<8>(x, ldx, m, w, ldw, n, k_len, y, ldy);
    } else if (m == 2) {
        skinny_rows<4>(x, ldx, m, w, ldw, n, k_len, y, ldy);
    } else {
        skinny_rows<Step<W>::VECTORS == 2 ? 2 : 3>(x, ldx, m, w, ldw, n, k_len, y, ldy);
    }
}

// ---- outer products: ROWS x rows by PANEL columns of b (K, PANEL) with row stride ldb ----

template <int ROWS>
inline void tile_nn(
    const float* x, int64_t ldx, const float* b, int64_t ldb, int64_t k_len, float* y, int64_t ldy, bool accumulate
) {
    v8 acc[ROWS][2];
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < 2; ++c) acc[r][c] = accumulate ? load8(y + r * ldy + c * LANES) : splat(0.0f);
    }
#pragma GCC unroll 4
    for (int64_t k = 0; k < k_len; ++k) {
        const v8 b0 = load8(b + k * ldb), b1 = load8(b + k * ldb + LANES);
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            const v8 value = splat(x[r * ldx + k]);
            add_product(acc[r][0], value, b0);
            add_product(acc[r][1], value, b1);
        }
    }
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < 2; ++c) store8(acc[r][c], y + r * ldy + c * LANES);
    }
}

// ---- packing: w (n <= PANEL, K) -> panel (K, PANEL), float32, missing rows 0 ----

template <class W>
inline void pack_panel(const W* w, int64_t ldw, int64_t n, int64_t k_len, float* panel) {
    for (int half = 0; half < PANEL; half += LANES) {
        const int64_t rows = std::clamp<int64_t>(n - half, 0, LANES);
        const W* from = w + half * ldw;
        int64_t k = 0;
        if (rows == LANES) {
            for (; k + LANES <= k_len; k += LANES) {
                v8 block[LANES];
#pragma GCC unroll 8
                for (int r = 0; r < LANES; ++r) block[r] = load8(from + r * ldw + k);
                transpose8(block);
#pragma GCC unroll 8
                for (int r = 0; r < LANES; ++r) store8(block[r], panel + (k + r) * PANEL + half);
            }
        }
        for (; k < k_len; ++k) {
            for (int64_t r = 0; r < LANES; ++r) {
                panel[k * PANEL + half + r] = r < rows ? to_float(from[r * ldw + k]) : 0.0f;
            }
        }
    }
}

// ---- the block ----

template <class W>
inline void packed(
    const float* x, int64_t ldx, int64_t m, const W* w, int64_t ldw, int64_t n, int64_t k_len, float* y, int64_t ldy
) {
    float* panels = scratch(Scratch::panels, GROUP * DEPTH);
    for (int64_t k = 0; k < k_len || k == 0; k += DEPTH) {
        const int64_t depth = std::min<int64_t>(DEPTH, k_len - k);
        for (int64_t c = 0; c < n; c += PANEL) pack_panel(w + c * ldw + k, ldw, n - c, depth, panels + c * depth);
        for (int64_t row = 0; row < m; row += TILE_ROWS) {
            const int64_t rows = std::min<int64_t>(TILE_ROWS, m - row);
            for (int64_t c = 0; c < n; c += PANEL) {
                tile_rows(
                    x + row * ldx + k, ldx, rows, panels + c * depth, PANEL, depth, y + row * ldy + c, ldy, k > 0
                );
            }
        }
    }
}

}  // namespace

void tile_rows(
    const float* x, int64_t ldx, int64_t m, const float* b, int64_t ldb, int64_t k_len, float* y, int64_t ldy,
    bool accumulate
) {
    switch (m) {
        case 1: return tile_nn<1>(x, ldx, b, ldb, k_len, y, ldy, accumulate);
        case 2: return tile_nn<2>(x, ldx, b, ldb, k_len, y, ldy, accumulate);
        case 3: return tile_nn<3>(x, ldx, b, ldb, k_len, y, ldy, accumulate);
        case 4: return tile_nn<4>(x, ldx, b, ldb, k_len, y, ldy, accumulate);
        case 5: return tile_nn<5>(x, ldx, b, ldb, k_len, y, ldy, accumulate);
        default: return tile_nn<6>(x, ldx, b, ldb, k_len, y, ldy, accumulate);
    }
}

template <class W>
void gemm_block(
    const float* x, int64_t ldx, int64_t m, const W* w, int64_t ldw, int64_t n, int64_t k_len, float* y, int64_t ldy
) {
    if (m <= SKINNY) {
        skinny(x, ldx, m, w, ldw, n, k_len, y, ldy);
    } else {
        packed(x, ldx, m, w, ldw, n, k_len, y, ldy);
    }
}

template void gemm_block<float>(
    const float*, int64_t, int64_t, const float*, int64_t, int64_t, int64_t, float*, int64_t
);
template void gemm_block<bf16>(
    const float*, int64_t, int64_t, const bf16*, int64_t, int64_t, int64_t, float*, int64_t
);
template void gemm_block<f16>(
    const float*, int64_t, int64_t, const f16*, int64_t, int64_t, int64_t, float*, int64_t
);

}  // namespace minisgl
