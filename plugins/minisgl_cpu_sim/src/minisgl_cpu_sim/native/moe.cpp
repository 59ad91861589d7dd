// Routed experts: tokens grouped by expert, gate and up with their activation, then down.
//
// Work is split by weight rows, so no two threads add to the same output, and each token's experts are added in the order
// of their ids: its result does not depend on the batch. An expert without tokens is never looked at.
#include <algorithm>
#include <vector>

#include "call.h"
#include "gemm.h"
#include "pool.h"
#include "scratch.h"

namespace minisgl {
namespace {

constexpr int64_t SLAB = 2048;               // tokens that pass through together: bounds the scratch memory
constexpr int64_t ROWS = 96 * TILE_ROWS;     // x rows of one block

struct MoEArgs {
    const void* x;
    const int32_t* ids;    // (T, k), contiguous
    const float* weights;  // (T, k), contiguous
    const void* w13;
    const void* w2;
    void* out;
    int64_t ldx, tokens, width, inner, experts, top_k, dtype, threads;
};

// One slab's (token, weight) pairs in the order of their experts
struct Groups {
    std::vector<int64_t> token;   // within the slab
    std::vector<float> weight;
    std::vector<int64_t> expert;  // the experts that have tokens
    std::vector<int64_t> bound;   // expert i owns pairs [bound[i], bound[i + 1])
    std::vector<int64_t> cursor;
};

void group(const MoEArgs& a, int64_t first, int64_t count, Groups& g) {
    g.cursor.assign(size_t(a.experts + 1), 0);
    const int32_t* ids = a.ids + first * a.top_k;
    const auto valid = [&](int32_t id) { return id >= 0 && id < a.experts; };
    for (int64_t i = 0; i < count * a.top_k; ++i) {
        if (valid(ids[i])) ++g.cursor[size_t(ids[i]) + 1];
    }
    g.expert.clear();
    g.bound.assign(1, 0);
    for (int64_t e = 0; e < a.experts; ++e) {
        const int64_t tokens = g.cursor[size_t(e) + 1];
        g.cursor[size_t(e) + 1] += g.cursor[size_t(e)];
        if (!tokens) continue;
        g.expert.push_back(e);
        g.bound.push_back(g.cursor[size_t(e) + 1]);
    }
    g.token.resize(size_t(g.bound.back()));
    g.weight.resize(size_t(g.bound.back()));
    for (int64_t i = 0; i < count * a.top_k; ++i) {
        if (!valid(ids[i])) continue;
        const size_t at = size_t(g.cursor[size_t(ids[i])]++);
        g.token[at] = i / a.top_k;
        g.weight[at] = a.weights[first * a.top_k + i];
    }
}

template <class T>
const float* gather(const MoEArgs& a, int64_t first, const Groups& g, int64_t begin, int64_t count) {
    float* x = scratch(Scratch::x, size_t(count * a.width));
    for (int64_t i = 0; i < count; ++i) {
        const int64_t token = first + g.token[size_t(begin + i)];
        convert(static_cast<const T*>(a.x) + token * a.ldx, a.width, x + i * a.width);
    }
    return x;
}

// hidden (pairs, I) = silu(gate) * up, for the columns [column, column + n) of the expert `index`
template <class T>
void gate_up(const MoEArgs& a, int64_t first, const Groups& g, int64_t index, int64_t column, float* hidden) {
    const int64_t n = std::min<int64_t>(GROUP, a.inner - column);
    const T* w = static_cast<const T*>(a.w13) + (g.expert[size_t(index)] * 2 * a.inner + column) * a.width;
    for (int64_t begin = g.bound[size_t(index)]; begin < g.bound[size_t(index) + 1]; begin += ROWS) {
        const int64_t m = std::min(ROWS, g.bound[size_t(index) + 1] - begin);
        const float* x = gather<T>(a, first, g, begin, m);
        float* gate = scratch(Scratch::y, size_t(2 * m * GROUP));
        float* up = gate + m * GROUP;
        gemm_block(x, a.width, m, w, a.width, n, a.width, gate, GROUP);
        gemm_block(x, a.width, m, w + a.inner * a.width, a.width, n, a.width, up, GROUP);
        for (int64_t row = 0; row < m; ++row) {
            for (int64_t i = 0; i < n; i += LANES) {
                const v8 value = load8(gate + row * GROUP + i);
                const v8 h = value / (1.0f + exp8(-value)) * load8(up + row * GROUP + i);
                float* to = hidden + (begin + row) * a.inner + column + i;
                if (n - i >= LANES) {
                    store8(h, to);
                } else {
                    store_part(h, to, int(n - i));
                }
            }
        }
    }
}

// out[:, column : column + n] for all tokens of the slab, expert by expert
template <class T>
void down(const MoEArgs& a, int64_t first, int64_t count, const Groups& g, int64_t column, const float* hidden) {
    const int64_t n = std::min<int64_t>(GROUP, a.width - column);
    float* total = scratch(Scratch::mixed, size_t(count * GROUP));
    std::fill(total, total + count * GROUP, 0.0f);
    for (size_t index = 0; index < g.expert.size(); ++index) {
        const T* w = static_cast<const T*>(a.w2) + (g.expert[index] * a.width + column) * a.inner;
        for (int64_t begin = g.bound[index]; begin < g.bound[index + 1]; begin += ROWS) {
            const int64_t m = std::min(ROWS, g.bound[index + 1] - begin);
            float* y = scratch(Scratch::y, size_t(m * GROUP));
            gemm_block(hidden + begin * a.inner, a.inner, m, w, a.inner, n, a.inner, y, GROUP);
            for (int64_t row = 0; row < m; ++row) {
                float* to = total + g.token[size_t(begin + row)] * GROUP;
                const float weight = g.weight[size_t(begin + row)];
                for (int64_t i = 0; i < n; ++i) to[i] += weight * y[row * GROUP + i];
            }
        }
    }
    for (int64_t token = 0; token < count; ++token) {
        T* to = static_cast<T*>(a.out) + (first + token) * a.width + column;
        for (int64_t i = 0; i < n; ++i) from_float(total[token * GROUP + i], to + i);
    }
}

template <class T>
void moe(const MoEArgs& a) {
    thread_local Groups shared;
    Groups& g = shared;  // the caller's, also in other threads
    const int64_t inner_groups = (a.inner + GROUP - 1) / GROUP, groups = (a.width + GROUP - 1) / GROUP;
    for (int64_t first = 0; first < a.tokens; first += SLAB) {
        const int64_t count = std::min(SLAB, a.tokens - first);
        group(a, first, count, g);
        const int64_t items = int64_t(g.expert.size()) * inner_groups;
        float* hidden = scratch(Scratch::partial, size_t(g.bound.back() * a.inner));
        parallel_for(a.threads, items, [&](int64_t i) {
            gate_up<T>(a, first, g, i / inner_groups, i % inner_groups * GROUP, hidden);
        });
        parallel_for(a.threads, groups, [&](int64_t i) { down<T>(a, first, count, g, i * GROUP, hidden); });
    }
}

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_moe(const minisgl::MoEArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { moe<decltype(type)>(*args); });
}
