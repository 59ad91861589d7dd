// Scatters rows of keys and values into the slots of a paged pool. Rows are bytes: the kernel knows no dtype.
#pragma once

#include <minisgl/device.h>

namespace minisgl {

struct StoreArgs {
    char* k_cache;
    char* v_cache;
    const char* k;
    const char* v;
    const int32_t* out_loc;  // (tokens,): the slot of each token
    int64_t k_slot_bytes, v_slot_bytes;
    int64_t k_token_bytes, v_token_bytes;
    int64_t row_units;  // of a row of K heads x D, in units
    int64_t tokens;
};

// blockDim = (threads of one row, rows of one block). A thread moves a unit of k and one of v at a time: both reads are
// under way before the first write. All lengths and addresses are multiples of sizeof(Unit).
template <class Unit>
__global__ void kv_store(const StoreArgs args) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int64_t token = static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
    if (token >= args.tokens) return;
    const int64_t slot = args.out_loc[token];
    const Unit* k = reinterpret_cast<const Unit*>(args.k + token * args.k_token_bytes);
    const Unit* v = reinterpret_cast<const Unit*>(args.v + token * args.v_token_bytes);
    Unit* k_slot = reinterpret_cast<Unit*>(args.k_cache + slot * args.k_slot_bytes);
    Unit* v_slot = reinterpret_cast<Unit*>(args.v_cache + slot * args.v_slot_bytes);
    for (int64_t i = threadIdx.x; i < args.row_units; i += blockDim.x) {
        const Unit key = load_once(k + i);
        const Unit value = load_once(v + i);
        store(k_slot + i, key);
        store(v_slot + i, value);
    }
}

}  // namespace minisgl
