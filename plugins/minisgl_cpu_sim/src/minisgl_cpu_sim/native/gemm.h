// y (M, n) = x (M, K) @ w (n, K)^T in float32, for a few weight rows: the building block of linear, moe and attention.
#pragma once

#include <cstdint>

#include "vec.h"

namespace minisgl {

constexpr int PANEL = 2 * LANES;  // columns of one tile of outer products
constexpr int GROUP = 4 * PANEL;  // weight rows of a block: packed together, they share the x rows in the L1 cache
constexpr int TILE_ROWS = 6;      // x rows of a tile: 6 * 2 accumulators + 2 weights + 1 x fill 16 registers
constexpr int SKINNY = 16;        // up to this many x rows, dot products are faster than packing

// n <= GROUP weight rows of float, bf16 or f16. y has room for n rounded up to PANEL columns.
template <class W>
void gemm_block(
    const float* x, int64_t ldx, int64_t m, const W* w, int64_t ldw, int64_t n, int64_t k_len, float* y, int64_t ldy
);

// y (m, PANEL) (+)= x (m, K) @ b (K, PANEL), m <= TILE_ROWS; rows of b are ldb apart
void tile_rows(
    const float* x, int64_t ldx, int64_t m, const float* b, int64_t ldb, int64_t k_len, float* y, int64_t ldy,
    bool accumulate
);

}  // namespace minisgl
