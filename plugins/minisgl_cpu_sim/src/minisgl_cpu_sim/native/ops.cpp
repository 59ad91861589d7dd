// The operations between the matrix products, each in one pass over its rows.
#include <cmath>

#include "call.h"
#include "pool.h"
#include "scratch.h"

namespace minisgl {
namespace {

constexpr int64_t PARALLEL_ELEMENTS = 1 << 15;  // below it a second thread costs more than it does

struct NormArgs {
    const void* x;
    void* residual;  // or null; becomes residual + x
    const void* weight;
    void* y;
    int64_t ldx, ldr, ldy, tokens, width, dtype, threads;
    double eps;
};

struct RopeArgs {
    void* qkv;
    const void* q_weight;  // or null
    const void* k_weight;
    const int32_t* positions;
    const float* cos_sin;
    void* k_cache;
    void* v_cache;
    const int32_t* out_loc;
    int64_t ld, ld_cos, slot, head, tokens, q_heads, kv_heads, dim, rotary, dtype, kv_dtype, threads;
    double eps;
};

struct ActArgs {
    const void* x;
    void* y;
    int64_t ldx, tokens, width, dtype, threads;
};

struct RouteArgs {
    const void* logits;
    int32_t* ids;
    float* weights;
    int64_t ld, tokens, experts, top_k, renormalize, dtype, threads;
};

float inverse_rms(const float* x, int64_t width, double eps) {
    v8 squares = splat(0.0f);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) squares += load8(x + i) * load8(x + i);
    float total = sum(squares);
    for (; i < width; ++i) total += x[i] * x[i];
    return 1.0f / std::sqrt(total / float(width) + float(eps));
}

// y = x * factor * weight
template <class T, class To>
void scale(const float* x, int64_t width, float factor, const T* weight, To* y) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) store8(load8(x + i) * factor * load8(weight + i), y + i);
    for (; i < width; ++i) from_float(x[i] * factor * to_float(weight[i]), y + i);
}

// residual += x in T; `row` receives the rounded sum
template <class T>
void add_row(const T* x, T* residual, int64_t width, float* row) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) {
        store8(load8(x + i) + load8(residual + i), residual + i);
        store8(load8(residual + i), row + i);
    }
    for (; i < width; ++i) {
        from_float(to_float(x[i]) + to_float(residual[i]), residual + i);
        row[i] = to_float(residual[i]);
    }
}

template <class T>
void norm(const NormArgs& a) {
    const T* weight = static_cast<const T*>(a.weight);
    const int64_t threads = a.tokens * a.width > PARALLEL_ELEMENTS ? a.threads : 1;
    parallel_ranges(threads, a.tokens, [&](int64_t token) {
        const T* x = static_cast<const T*>(a.x) + token * a.ldx;
        float* row = scratch(Scratch::x, size_t(a.width));
        if (a.residual) {
            add_row(x, static_cast<T*>(a.residual) + token * a.ldr, a.width, row);
        } else {
            convert(x, a.width, row);
        }
        scale(row, a.width, inverse_rms(row, a.width, a.eps), weight, static_cast<T*>(a.y) + token * a.ldy);
    });
}

// Pairs (i, i + R/2) turn by the angle whose cosine and sine are at i and R/2 + i.
void rotate(float* x, int64_t rotary, const float* cos_sin) {
    const int64_t half = rotary / 2;
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        const v8 a = load8(x + i), b = load8(x + half + i);
        const v8 cos = load8(cos_sin + i), sin = load8(cos_sin + half + i);
        store8(a * cos - b * sin, x + i);
        store8(b * cos + a * sin, x + half + i);
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i], cos = cos_sin[i], sin = cos_sin[half + i];
        x[i] = a * cos - b * sin;
        x[half + i] = b * cos + a * sin;
    }
}

// One head to the cache, in the cache's dtype
void store_head(const RopeArgs& a, const float* x, void* cache, int64_t at) {
    dispatch(a.kv_dtype, [&](auto type) { narrow(x, a.dim, static_cast<decltype(type)*>(cache) + at); });
}

template <class T>
void rope_token(const RopeArgs& a, int64_t token) {
    T* row = static_cast<T*>(a.qkv) + token * a.ld;
    const float* cos_sin = a.cos_sin + a.positions[token] * a.ld_cos;
    const int64_t at = a.out_loc[token] * a.slot;
    float* x = scratch(Scratch::x, size_t(a.dim));
    for (int64_t head = 0; head < a.q_heads + a.kv_heads; ++head) {
        T* values = row + head * a.dim;
        const bool is_key = head >= a.q_heads;
        const T* weight = static_cast<const T*>(is_key ? a.k_weight : a.q_weight);
        convert(values, a.dim, x);
        if (weight) scale(x, a.dim, inverse_rms(x, a.dim, a.eps), weight, x);
        rotate(x, a.rotary, cos_sin);
        narrow(x, a.dim, values);
        if (is_key) store_head(a, x, a.k_cache, at + (head - a.q_heads) * a.head);
    }
    for (int64_t head = 0; head < a.kv_heads; ++head) {
        convert(row + (a.q_heads + a.kv_heads + head) * a.dim, a.dim, x);
        store_head(a, x, a.v_cache, at + head * a.head);
    }
}

template <class T>
void rope(const RopeArgs& a) {
    const int64_t threads = a.tokens * a.ld > PARALLEL_ELEMENTS ? a.threads : 1;
    parallel_ranges(threads, a.tokens, [&](int64_t token) { rope_token<T>(a, token); });
}

template <class T>
void act_row(const T* gate, const T* up, int64_t width, T* y) {
    for (int64_t i = 0; i < width; i += LANES) {
        const int part = int(width - i < LANES ? width - i : LANES);
        const v8 x = part == LANES ? load8(gate + i) : load_part(gate + i, part, 0.0f);
        const v8 value = x / (1.0f + exp8(-x)) * (part == LANES ? load8(up + i) : load_part(up + i, part, 0.0f));
        if (part == LANES) {
            store8(value, y + i);
        } else {
            store_part(value, y + i, part);
        }
    }
}

template <class T>
void act(const ActArgs& a) {
    const int64_t threads = a.tokens * a.width > PARALLEL_ELEMENTS ? a.threads : 1;
    parallel_ranges(threads, a.tokens, [&](int64_t token) {
        const T* x = static_cast<const T*>(a.x) + token * a.ldx;
        act_row(x, x + a.width, a.width, static_cast<T*>(a.y) + token * a.width);
    });
}

template <class T>
void route_token(const RouteArgs& a, int64_t token) {
    float* p = scratch(Scratch::x, size_t(a.experts));
    convert(static_cast<const T*>(a.logits) + token * a.ld, a.experts, p);
    float top = p[0], total = 0.0f, chosen = 0.0f;
    for (int64_t e = 1; e < a.experts; ++e) top = p[e] > top ? p[e] : top;
    for (int64_t e = 0; e < a.experts; ++e) total += p[e] = std::exp(p[e] - top);
    int32_t* ids = a.ids + token * a.top_k;
    float* weights = a.weights + token * a.top_k;
    for (int64_t k = 0; k < a.top_k; ++k) {
        int64_t best = -1;
        for (int64_t e = 0; e < a.experts; ++e) {
            // Taken ones are below 0. A row of NaN has no best: its ids are -1, its weights NaN.
            if (p[e] >= 0.0f && (best < 0 || p[e] > p[best])) best = e;
        }
        ids[k] = int32_t(best);
        weights[k] = best < 0 ? p[0] : p[best] / total;
        if (best >= 0) {
            chosen += weights[k];
            p[best] = -1.0f;
        }
    }
    for (int64_t k = 0; a.renormalize && k < a.top_k; ++k) weights[k] /= chosen;
}

template <class T>
void route(const RouteArgs& a) {
    const int64_t threads = a.tokens * a.experts > PARALLEL_ELEMENTS / 8 ? a.threads : 1;
    parallel_ranges(threads, a.tokens, [&](int64_t token) { route_token<T>(a, token); });
}

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_norm(const minisgl::NormArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { norm<decltype(type)>(*args); });
}

extern "C" void minisgl_rope(const minisgl::RopeArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { rope<decltype(type)>(*args); });
}

extern "C" void minisgl_act(const minisgl::ActArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { act<decltype(type)>(*args); });
}

extern "C" void minisgl_route(const minisgl::RouteArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { route<decltype(type)>(*args); });
}
