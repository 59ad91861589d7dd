// Sampling: argmax of logits, or of (logit - max) / temperature + Gumbel noise, over all tokens or a filtered set.
//
// The noise is a function of (seed, position, token) only; minisgl_core.builtin.ops defines it. A row with a NaN gives -1.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "call.h"
#include "pool.h"
#include "scratch.h"

namespace minisgl {
namespace {

enum : int64_t { GREEDY = 0, RANDOM = 1, FILTERED = 2 };

// One value per row, at any distance from each other
template <class T>
struct Column {
    const T* data;
    int64_t stride;

    T operator[](int64_t row) const { return data[row * stride]; }
};

struct SampleArgs {
    const void* logits;
    int32_t* out;
    Column<float> temperature;
    Column<int32_t> top_k;
    Column<float> top_p;
    Column<float> min_p;
    Column<uint32_t> seed_lo;
    Column<uint32_t> seed_hi;
    Column<uint32_t> positions;
    int64_t ld, batch, vocab, mode, dtype, threads;
};

// The finaliser of MurmurHash3 (Appleby).
template <class U>
U mix(U h) {
    h ^= h >> 16;
    h *= 0x85EBCA6Bu;
    h ^= h >> 13;
    h *= 0xC2B2AE35u;
    return h ^ (h >> 16);
}

uint32_t noise_key(uint32_t seed_lo, uint32_t seed_hi, uint32_t position) {
    const uint32_t key = mix(seed_lo ^ mix(seed_hi + 0x9E3779B9u));
    return mix(key ^ mix(position + 0x7F4A7C15u));
}

constexpr float MOST_NOISE = 23.0f;  // -log of the smallest exponential: -log(-log1p(-2^-33)) = 22.87

v8 gumbel(u8 token, uint32_t key) {
    const u8 h = mix(mix(token * 0x9E3779B1u ^ key) + key);
    // uint32 to float, rounded once: the high half is exact, and so is its sum with the low half but for that rounding.
    const v8 high = __builtin_convertvector(bit_cast<i8>(h >> 16), v8);
    const v8 low = __builtin_convertvector(bit_cast<i8>(h & 0xffff), v8);
    v8 u = (high * 65536.0f + low + 0.5f) * 0x1p-32f;
    u = select(u > 1.0f - 0x1p-24f, splat(1.0f - 0x1p-24f), u);
    return -log8(-log1p8(-u));
}

// The largest value seen, and the lowest index that has it.
struct Best {
    v8 value = splat(-std::numeric_limits<float>::infinity());
    i8 index = splat(int32_t(-1));

    void add(v8 candidate, i8 at) {
        const i8 better = candidate > value;
        value = select(better, candidate, value);
        index = (at & better) | (index & ~better);
    }
    // `otherwise` if nothing is above -inf
    int32_t lowest(int32_t otherwise) const {
        int32_t best = -1;
        for (int i = 0; i < LANES; ++i) {
            if (index[i] < 0) continue;
            const bool wins = best < 0 || value[i] > value[best] || (value[i] == value[best] && index[i] < index[best]);
            if (wins) best = i;
        }
        return best < 0 ? otherwise : index[best];
    }
    float most() const {
        float out = value[0];
        for (int i = 1; i < LANES; ++i) out = std::max(out, value[i]);
        return out;
    }
};

constexpr i8 STEPS = {0, 1, 2, 3, 4, 5, 6, 7};

template <class T>
v8 load_logits(const T* row, int64_t i, int64_t vocab) {
    constexpr float LOW = -std::numeric_limits<float>::infinity();
    return i + LANES <= vocab ? load8(row + i) : load_part(row + i, int(vocab - i), LOW);
}

// Index of the largest logit and its value; -1 if there is a NaN.
template <class T>
int32_t argmax(const T* row, int64_t vocab, float& top) {
    Best best;
    i8 nan = splat(int32_t(0));
    for (int64_t i = 0; i < vocab; i += LANES) {
        const v8 x = load_logits(row, i, vocab);
        nan |= x != x;
        best.add(x, STEPS + int32_t(i));
    }
    if (any(nan)) return -1;
    const int32_t index = best.lowest(0);
    top = to_float(row[index]);
    return index;
}

template <class T>
int32_t sample_random(const T* row, int64_t vocab, float top, float temperature, uint32_t key, int32_t fallback) {
    Best best;
    float floor = -std::numeric_limits<float>::infinity();
    for (int64_t i = 0; i < vocab; i += LANES) {
        const v8 score = (load_logits(row, i, vocab) - top) / temperature;
        // Most tokens cannot win with any noise.
        if (!any(score + MOST_NOISE >= floor)) continue;
        const i8 token = STEPS + int32_t(i);
        best.add(score + gumbel(bit_cast<u8>(token), key), token);
        floor = best.most();
    }
    return best.lowest(fallback);
}

struct Candidate {
    float p;  // relative to the likeliest token's, which is 1
    int32_t token;
};

bool likelier(const Candidate& a, const Candidate& b) { return a.p > b.p || (a.p == b.p && a.token < b.token); }
bool earlier(const Candidate& a, const Candidate& b) { return a.token < b.token; }

// The tokens of at least `bound`, by token
void collect(const float* p, int64_t vocab, float bound, std::vector<Candidate>& out) {
    out.clear();
    for (int64_t i = 0; i < vocab; ++i) {
        if (p[i] >= bound) out.push_back({p[i], int32_t(i)});
    }
}

// Fewer of those, the likeliest, if they are `enough`: looking at them all is what costs.
template <class Enough>
void collect_enough(const float* p, int64_t vocab, float limit, Enough enough, std::vector<Candidate>& out) {
    for (const float bound : {1e-2f, 1e-4f, 1e-6f}) {
        if (bound <= limit) break;
        collect(p, vocab, bound, out);
        if (enough(out)) return;
    }
    collect(p, vocab, limit, out);
}

double mass(const std::vector<Candidate>& candidates) {
    double total = 0.0;
    for (const Candidate& c : candidates) total += double(c.p);
    return total;
}

// The k-th largest of p
float kth_largest(const float* p, int64_t vocab, int64_t k, std::vector<Candidate>& buffer) {
    collect_enough(p, vocab, 0.0f, [&](const auto& found) { return int64_t(found.size()) >= k; }, buffer);
    std::nth_element(buffer.begin(), buffer.begin() + (k - 1), buffer.end(), likelier);
    return buffer[size_t(k - 1)].p;
}

// In `kept`: of the tokens of at least `limit` the likeliest, until their probability reaches top_p of the whole.
void keep_top_p(const float* p, int64_t vocab, float limit, float top_p, std::vector<Candidate>& kept) {
    double wanted = 0.0;
    for (int64_t i = 0; i < vocab; ++i) wanted += p[i] >= limit ? double(p[i]) : 0.0;
    wanted *= double(top_p);
    collect_enough(p, vocab, limit, [&](const auto& found) { return mass(found) >= wanted; }, kept);
    std::sort(kept.begin(), kept.end(), likelier);
    double sum = 0.0;
    size_t count = 0;
    while (count < kept.size() && (count == 0 || sum < wanted)) sum += double(kept[count++].p);
    kept.resize(count);
    std::sort(kept.begin(), kept.end(), earlier);
}

template <class T>
int32_t sample_filtered(const SampleArgs& a, int64_t index, const T* row, float top, uint32_t key, int32_t fallback) {
    thread_local std::vector<Candidate> kept;
    const float temperature = a.temperature[index], top_p = a.top_p[index];
    float* p = scratch(Scratch::x, size_t(a.vocab + LANES));
    for (int64_t i = 0; i < a.vocab; i += LANES) {
        store8(exp8((load_logits(row, i, a.vocab) - top) / temperature), p + i);
    }
    const int64_t top_k = a.top_k[index];
    float limit = top_k > 0 && top_k < a.vocab ? kth_largest(p, a.vocab, top_k, kept) : 0.0f;
    if (top_p < 1.0f) {
        keep_top_p(p, a.vocab, limit, top_p, kept);
    } else {
        limit = std::max(limit, a.min_p[index]);
        collect(p, a.vocab, limit, kept);
    }
    Best best;
    for (size_t i = 0; i < kept.size(); i += LANES) {
        v8 score = splat(-std::numeric_limits<float>::infinity());
        i8 token = splat(int32_t(0));
        for (size_t lane = 0; lane < LANES && i + lane < kept.size(); ++lane) {
            const Candidate& c = kept[i + lane];
            if (c.p < a.min_p[index]) continue;
            token[lane] = c.token;
            score[lane] = (to_float(row[c.token]) - top) / temperature;
        }
        best.add(score + gumbel(bit_cast<u8>(token), key), token);
    }
    return best.lowest(fallback);
}

template <class T>
int32_t sample_row(const SampleArgs& a, int64_t index) {
    const T* row = static_cast<const T*>(a.logits) + index * a.ld;
    float top = 0.0f;
    const int32_t greedy = argmax(row, a.vocab, top);
    if (greedy < 0 || a.mode == GREEDY || !(a.temperature[index] > 0.0f)) return greedy;
    const uint32_t key = noise_key(a.seed_lo[index], a.seed_hi[index], a.positions[index]);
    const bool filtered = a.top_k[index] > 0 || a.top_p[index] < 1.0f || a.min_p[index] > 0.0f;
    if (a.mode == FILTERED && filtered) return sample_filtered(a, index, row, top, key, greedy);
    return sample_random(row, a.vocab, top, a.temperature[index], key, greedy);
}

template <class T>
void sample(const SampleArgs& a) {
    parallel_for(a.threads, a.batch, [&](int64_t index) { a.out[index] = sample_row<T>(a, index); });
}

}  // namespace
}  // namespace minisgl

extern "C" void minisgl_sample(const minisgl::SampleArgs* args) {
    using namespace minisgl;
    dispatch(args->dtype, [&](auto type) { sample<decltype(type)>(*args); });
}
