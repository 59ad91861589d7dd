// Row scatter and gather, and the length of a common prefix. Rows are moved as bytes, whatever their dtype.
#include <algorithm>

#include "call.h"
#include "pool.h"

namespace minisgl {
namespace {

struct StoreArgs {
    char* k_cache;
    char* v_cache;
    const char* k;
    const char* v;
    const int32_t* out_loc;
    int64_t slot, k_token, v_token, row, tokens, threads;  // strides and row length, in bytes
};

struct IndexArgs {
    const char* table;
    const int32_t* ids;
    char* out;
    int64_t table_row, row, start, rows, tokens, threads;
};

struct MatchArgs {
    const int32_t* a;
    const int32_t* b;
    int64_t length;
    int64_t* out;
};

constexpr int64_t PARALLEL_BYTES = 1 << 18;  // below it a second thread costs more than it moves

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_store(const minisgl::StoreArgs* args) {
    const minisgl::StoreArgs& a = *args;
    const int64_t threads = a.tokens * a.row > minisgl::PARALLEL_BYTES ? a.threads : 1;
    minisgl::parallel_ranges(threads, a.tokens, [&](int64_t token) {
        const int64_t at = int64_t(a.out_loc[token]) * a.slot;
        std::memcpy(a.k_cache + at, a.k + token * a.k_token, size_t(a.row));
        std::memcpy(a.v_cache + at, a.v + token * a.v_token, size_t(a.row));
    });
}

extern "C" void minisgl_index(const minisgl::IndexArgs* args) {
    const minisgl::IndexArgs& a = *args;
    const int64_t threads = a.tokens * a.row > minisgl::PARALLEL_BYTES ? a.threads : 1;
    minisgl::parallel_ranges(threads, a.tokens, [&](int64_t token) {
        const int64_t id = int64_t(a.ids[token]) - a.start;
        char* to = a.out + token * a.row;
        if (id >= 0 && id < a.rows) {
            std::memcpy(to, a.table + id * a.table_row, size_t(a.row));
        } else {
            std::memset(to, 0, size_t(a.row));
        }
    });
}

extern "C" void minisgl_match_len(const minisgl::MatchArgs* args) {
    const minisgl::MatchArgs& a = *args;
    constexpr int64_t BLOCK = 64;
    int64_t i = 0;
    while (i + BLOCK <= a.length && !std::memcmp(a.a + i, a.b + i, BLOCK * sizeof(int32_t))) i += BLOCK;
    while (i < a.length && a.a[i] == a.b[i]) ++i;
    *a.out = i;
}
