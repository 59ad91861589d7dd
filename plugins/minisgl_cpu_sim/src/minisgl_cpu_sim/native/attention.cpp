// Paged attention: online softmax over blocks of keys, the query heads of a kv head together.
//
// The rows of a work item are (query, head of the group) pairs that share their keys and values. A decode row's keys are
// cut into chunks at fixed positions, whose results are merged in order: it is the same whatever batch or number of
// threads it runs with.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <vector>

#include "call.h"
#include "gemm.h"
#include "pool.h"
#include "scratch.h"

namespace minisgl {
namespace {

constexpr int64_t KEYS = 64;     // keys of a block; at most GROUP
constexpr int64_t ROWS = 96;     // rows of a prefill item, about
constexpr int64_t CHUNK = 512;   // keys of a decode item
constexpr int64_t PARALLEL_PRODUCTS = 1 << 16;  // below it a second thread costs more than it does
constexpr float NONE = -std::numeric_limits<float>::infinity();

struct AttentionArgs {
    const void* q;       // (T, H, D)
    const void* k;       // slots of (K, D)
    const void* v;
    void* out;           // (T, H, D), contiguous
    const int32_t* cu_q;     // (B + 1)
    const int32_t* kv_lens;  // (B)
    const int32_t* pages;    // (B, P)
    int64_t q_token, q_head, slot, head, page_row;  // strides, in elements
    int64_t batch, heads, kv_heads, dim, page_size, window, q_dtype, kv_dtype, threads;
    double scale, softcap;
};

// Queries [first, first + count) of a row (counted within it), one kv head, keys [begin, end).
struct Item {
    int64_t row, head, first, count, begin, end;
    int64_t partial;  // where its unmerged result goes, in floats; -1 = straight to the output
};

// The chunks of one (row, kv head), to be merged.
struct Merge {
    int64_t row, head, rows, partial, chunks;
};

int64_t padded(int64_t dim) { return (dim + PANEL - 1) / PANEL * PANEL; }

// One unmerged result: rows of [mixed (padded D) | top | total]
int64_t partial_floats(int64_t rows, int64_t dim) { return rows * (padded(dim) + 2); }

struct Plan {
    std::vector<Item> items;
    std::vector<Merge> merges;
    int64_t partial_floats = 0;
    int64_t work = 0;  // scores to compute
};

void plan_decode_like(const AttentionArgs& a, int64_t row, int64_t q_len, int64_t low, int64_t kv_len, Plan& plan) {
    const int64_t rows = q_len * (a.heads / a.kv_heads);
    const int64_t first = low / CHUNK, chunks = (kv_len + CHUNK - 1) / CHUNK - first;
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        if (chunks > 1) plan.merges.push_back({row, head, rows, plan.partial_floats, chunks});
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            const int64_t begin = std::max(low, (first + chunk) * CHUNK);
            const int64_t end = std::min(kv_len, (first + chunk + 1) * CHUNK);
            plan.items.push_back({row, head, 0, q_len, begin, end, chunks > 1 ? plan.partial_floats : -1});
            if (chunks > 1) plan.partial_floats += partial_floats(rows, a.dim);
        }
    }
}

void plan_prefill(const AttentionArgs& a, int64_t row, int64_t q_len, int64_t kv_len, Plan& plan) {
    const int64_t step = std::max<int64_t>(1, ROWS / (a.heads / a.kv_heads));
    // The last queries see the most keys: the longest items go first.
    for (int64_t first = (q_len - 1) / step * step; first >= 0; first -= step) {
        const int64_t count = std::min(step, q_len - first);
        const int64_t position = kv_len - q_len + first;
        const int64_t begin = a.window ? std::max<int64_t>(0, position - a.window + 1) : 0;
        for (int64_t head = 0; head < a.kv_heads; ++head) {
            plan.items.push_back({row, head, first, count, begin, position + count, -1});
        }
    }
}

void make_plan(const AttentionArgs& a, Plan& plan) {
    plan.items.clear();
    plan.merges.clear();
    plan.partial_floats = 0;
    for (int64_t row = 0; row < a.batch; ++row) {
        const int64_t q_len = a.cu_q[row + 1] - a.cu_q[row], kv_len = a.kv_lens[row];
        if (q_len * (a.heads / a.kv_heads) <= SKINNY || q_len == 1) {
            const int64_t low = a.window ? std::max<int64_t>(0, kv_len - q_len + 1 - a.window) : 0;
            plan_decode_like(a, row, q_len, low, kv_len, plan);
        } else {
            plan_prefill(a, row, q_len, kv_len, plan);
        }
    }
    plan.work = 0;
    for (const Item& item : plan.items) plan.work += (item.end - item.begin) * item.count * (a.heads / a.kv_heads);
}

// Keys or values [begin, begin + count) of a row as float32 (count, padded D), the padding 0
template <class KV>
void gather(const AttentionArgs& a, const KV* cache, const Item& item, int64_t begin, int64_t count, float* to) {
    const int64_t ld = padded(a.dim);
    const int32_t* pages = a.pages + item.row * a.page_row;
    const KV* base = cache + item.head * a.head;
    int64_t page = begin / a.page_size, within = begin % a.page_size;
    for (int64_t i = 0; i < count; ++i) {
        convert(base + (int64_t(pages[page]) * a.page_size + within) * a.slot, a.dim, to + i * ld);
        for (int64_t d = a.dim; d < ld; ++d) to[i * ld + d] = 0.0f;
        if (++within == a.page_size) {
            within = 0;
            ++page;
        }
    }
}

// Rows of float32, `ld` apart.
struct Block {
    const float* data;
    int64_t ld;
};

// Where the slots of keys [begin, begin + count) of a row start, if they follow each other; -1 if not.
int64_t run_of_slots(const AttentionArgs& a, const Item& item, int64_t begin, int64_t count) {
    const int32_t* pages = a.pages + item.row * a.page_row;
    const int64_t first = begin / a.page_size, last = (begin + count - 1) / a.page_size;
    for (int64_t page = first; page < last; ++page) {
        if (pages[page + 1] != pages[page] + 1) return -1;
    }
    return int64_t(pages[first]) * a.page_size + begin % a.page_size;
}

// Keys or values [begin, begin + count) of a row: in place if they are float32 that can be read as whole panels.
template <class KV>
Block find(
    const AttentionArgs& a, const KV* cache, const Item& item, int64_t begin, int64_t count, int64_t run, float* copy
) {
    if (std::is_same<KV, float>::value && run >= 0 && a.dim == padded(a.dim)) {
        return {reinterpret_cast<const float*>(cache) + run * a.slot + item.head * a.head, a.slot};
    }
    gather(a, cache, item, begin, count, copy);
    return {copy, padded(a.dim)};
}

void scale_row(float* x, int64_t count, float factor) {
    for (int64_t i = 0; i < count; i += LANES) store8(load8(x + i) * factor, x + i);
}

void cap_scores(float* x, float softcap) {
    for (int64_t i = 0; i < KEYS; i += LANES) {
        const v8 e = exp8(load8(x + i) * (2.0f / softcap));
        store8((1.0f - 2.0f / (e + 1.0f)) * softcap, x + i);  // softcap * tanh(x / softcap)
    }
}

// One row's scores (KEYS) become weights exp(score - top), 0 outside [low, high); returns what its past must be scaled by.
float soften(float* scores, int64_t low, int64_t high, float& top, float& total) {
    for (int64_t i = 0; i < low; ++i) scores[i] = NONE;
    for (int64_t i = std::max<int64_t>(high, 0); i < KEYS; ++i) scores[i] = NONE;
    v8 most = splat(NONE);
    for (int64_t i = 0; i < KEYS; i += LANES) most = max8(most, load8(scores + i));
    float next = top;
    for (int i = 0; i < LANES; ++i) next = next > most[i] ? next : most[i];
    const float origin = next == NONE ? 0.0f : next;
    v8 added = splat(0.0f);
    for (int64_t i = 0; i < KEYS; i += LANES) {
        const v8 weight = exp8(load8(scores + i) - origin);
        added += weight;
        store8(weight, scores + i);
    }
    const float decay = std::exp(top - origin);
    total = total * decay + sum(added);
    top = next;
    return decay;
}

// y (rows, padded D) += weights (rows, KEYS) @ values (count, padded D)
void mix(const float* weights, int64_t rows, Block values, int64_t count, int64_t ld, float* y) {
    for (int64_t d = 0; d < ld; d += PANEL) {
        for (int64_t row = 0; row < rows; row += TILE_ROWS) {
            tile_rows(
                weights + row * KEYS, KEYS, std::min<int64_t>(TILE_ROWS, rows - row), values.data + d, values.ld, count,
                y + row * ld + d, ld, true
            );
        }
    }
}

void load_queries(const AttentionArgs& a, const Item& item, float* to) {
    const int64_t group = a.heads / a.kv_heads, ld = padded(a.dim);
    for (int64_t row = 0; row < item.count * group; ++row) {
        const int64_t token = a.cu_q[item.row] + item.first + row / group, head = item.head * group + row % group;
        dispatch(a.q_dtype, [&](auto type) {
            const auto* q = static_cast<const decltype(type)*>(a.q);
            convert(q + token * a.q_token + head * a.q_head, a.dim, to + row * ld);
        });
        for (int64_t d = a.dim; d < ld; ++d) to[row * ld + d] = 0.0f;
        scale_row(to + row * ld, ld, float(a.scale));
    }
}

void write_row(const AttentionArgs& a, const Item& item, int64_t row, float* mixed, float total) {
    const int64_t group = a.heads / a.kv_heads;
    const int64_t token = a.cu_q[item.row] + item.first + row / group, head = item.head * group + row % group;
    scale_row(mixed, padded(a.dim), total == 0.0f ? 0.0f : 1.0f / total);  // 0: a row without keys
    dispatch(a.q_dtype, [&](auto type) {
        narrow(mixed, a.dim, static_cast<decltype(type)*>(a.out) + (token * a.heads + head) * a.dim);
    });
}

template <class KV>
void attend(const AttentionArgs& a, const Item& item, float* partials) {
    const int64_t group = a.heads / a.kv_heads, rows = item.count * group, ld = padded(a.dim);
    float* queries = scratch(Scratch::x, size_t(rows * ld));
    float* key_copy = scratch(Scratch::keys, size_t(KEYS * ld));
    float* value_copy = scratch(Scratch::values, size_t(KEYS * ld));
    float* scores = scratch(Scratch::scores, size_t(rows * KEYS));
    float* mixed = scratch(Scratch::mixed, size_t(rows * (ld + 2)));
    float *top = mixed + rows * ld, *total = top + rows;
    load_queries(a, item, queries);
    std::fill(mixed, mixed + rows * ld, 0.0f);
    std::fill(top, top + rows, NONE);
    std::fill(total, total + rows, 0.0f);
    const int64_t position = a.kv_lens[item.row] - (a.cu_q[item.row + 1] - a.cu_q[item.row]) + item.first;
    for (int64_t begin = item.begin; begin < item.end; begin += KEYS) {
        const int64_t count = std::min(KEYS, item.end - begin);
        const int64_t run = run_of_slots(a, item, begin, count);
        const Block keys = find(a, static_cast<const KV*>(a.k), item, begin, count, run, key_copy);
        const Block values = find(a, static_cast<const KV*>(a.v), item, begin, count, run, value_copy);
        gemm_block(queries, ld, rows, keys.data, keys.ld, count, ld, scores, KEYS);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t here = position + row / group;
            const int64_t low = a.window ? std::clamp<int64_t>(here - a.window + 1 - begin, 0, KEYS) : 0;
            const int64_t high = std::min(count, here + 1 - begin);
            if (a.softcap != 0.0) cap_scores(scores + row * KEYS, float(a.softcap));
            const float decay = soften(scores + row * KEYS, low, high, top[row], total[row]);
            if (decay != 1.0f) scale_row(mixed + row * ld, ld, decay);
        }
        mix(scores, rows, values, count, ld, mixed);
    }
    if (item.partial >= 0) {
        std::copy(mixed, mixed + rows * (ld + 2), partials + item.partial);
    } else {
        for (int64_t row = 0; row < rows; ++row) write_row(a, item, row, mixed + row * ld, total[row]);
    }
}

void merge(const AttentionArgs& a, const Merge& merge, const float* partials) {
    const int64_t ld = padded(a.dim), step = partial_floats(merge.rows, a.dim);
    const Item item{merge.row, merge.head, 0, 0, 0, 0, -1};
    float* mixed = scratch(Scratch::mixed, size_t(ld));
    for (int64_t row = 0; row < merge.rows; ++row) {
        const float* first = partials + merge.partial;
        float top = NONE, total = 0.0f;
        for (int64_t c = 0; c < merge.chunks; ++c) {
            const float value = first[c * step + merge.rows * ld + row];
            top = top > value ? top : value;
        }
        std::fill(mixed, mixed + ld, 0.0f);
        for (int64_t c = 0; c < merge.chunks; ++c) {
            const float* chunk = first + c * step;
            const float factor = std::exp(chunk[merge.rows * ld + row] - top);
            total += factor * chunk[merge.rows * (ld + 1) + row];
            for (int64_t d = 0; d < ld; d += LANES) {
                store8(load8(mixed + d) + load8(chunk + row * ld + d) * factor, mixed + d);
            }
        }
        write_row(a, item, row, mixed, total);
    }
}

template <class KV>
void attention(const AttentionArgs& a) {
    thread_local Plan plan;
    make_plan(a, plan);
    float* partials = scratch(Scratch::partial, size_t(plan.partial_floats));
    const Item* items = plan.items.data();
    const Merge* merges = plan.merges.data();
    const int64_t threads = plan.work * a.dim > PARALLEL_PRODUCTS ? a.threads : 1;
    parallel_for(threads, int64_t(plan.items.size()), [&](int64_t i) { attend<KV>(a, items[i], partials); });
    parallel_for(threads, int64_t(plan.merges.size()), [&](int64_t i) { merge(a, merges[i], partials); });
}

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_attention(const minisgl::AttentionArgs* args) {
    using namespace minisgl;
    dispatch(args->kv_dtype, [&](auto type) { attention<decltype(type)>(*args); });
}
