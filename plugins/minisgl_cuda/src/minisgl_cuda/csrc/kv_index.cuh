// Gathers rows of one rank's part of a vocabulary table; ids of other ranks' parts give zeros. Rows are bytes.
#pragma once

#include <minisgl/device.h>

namespace minisgl {

struct IndexArgs {
    char* out;               // (tokens, row), contiguous
    const char* table;       // row r holds id `start + r`
    const int32_t* ids;      // (tokens,): any numbers
    int64_t start, rows;     // this rank's ids
    int64_t table_row_bytes;
    int64_t row_units;  // in units
    int64_t tokens;
};

// blockDim = (threads of one row, rows of one block). All lengths and addresses are multiples of sizeof(Unit).
template <class Unit>
__global__ void kv_index(const IndexArgs args) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= args.tokens) return;
    const int64_t row = args.ids[token] - args.start;
    const bool mine = row >= 0 && row < args.rows;
    const Unit* from = reinterpret_cast<const Unit*>(args.table + (mine ? row * args.table_row_bytes : 0));
    Unit* to = reinterpret_cast<Unit*>(args.out) + token * args.row_units;
    for (int64_t i = threadIdx.x; i < args.row_units; i += blockDim.x) {
        store(to + i, mine ? load_once(from + i) : Unit{});
    }
}

}  // namespace minisgl
