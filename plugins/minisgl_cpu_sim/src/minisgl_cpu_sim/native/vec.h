// Eight floats at a time, in GCC/Clang vector extensions: one source for AVX2, AVX-512VL and NEON.
//
// Storage types are float, bf16 and f16; arithmetic is always float32. NaN propagates through every function here.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace minisgl {

constexpr int LANES = 8;

typedef float v8 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8 __attribute__((vector_size(32)));
typedef uint16_t h8 __attribute__((vector_size(16)));

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

template <class To, class From>
inline To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast needs equal sizes");
    To to;
    std::memcpy(&to, &from, sizeof(To));
    return to;
}

// sum += a * b. GCC tuned for AMD keeps multiplication and addition apart in some loops and not in others, and equal
// sums must round equally.
inline void add_product(v8& total, v8 a, v8 b) {
#if defined(__FMA__)
    total = v8(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(total)));
#else
    total += a * b;
#endif
}

// Keeps x in a register: otherwise GCC reads it from memory again at each use, and loads become the limit.
inline void keep(v8& x) {
#if defined(__AVX__)
    asm("" : "+x"(x));
#else
    (void)x;
#endif
}

inline v8 splat(float x) { return v8{x, x, x, x, x, x, x, x}; }
inline i8 splat(int32_t x) { return i8{x, x, x, x, x, x, x, x}; }
inline u8 splat(uint32_t x) { return u8{x, x, x, x, x, x, x, x}; }

// ---- one element ----

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { return bit_cast<float>(uint32_t(x.bits) << 16); }
inline float to_float(f16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__aarch64__)
    return float(bit_cast<__fp16>(x.bits));
#else
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
    if (rest >= 0x0f800000u) return bit_cast<float>(sign | 0x70000000u | rest | 0x0f800000u);  // inf and NaN
    // Scaling by 2^112 moves the exponent bias from 15 to 127 and makes subnormals normal.
    return bit_cast<float>(bit_cast<uint32_t>(bit_cast<float>(rest) * 0x1p112f) | sign);
#endif
}

inline void from_float(float x, float* to) { *to = x; }
inline void from_float(float x, bf16* to) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    to->bits = x != x ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
}
inline void from_float(float x, f16* to) {
#if defined(__F16C__)
    to->bits = uint16_t(_cvtss_sh(x, 0));
#elif defined(__aarch64__)
    to->bits = bit_cast<uint16_t>(__fp16(x));
#else
    const uint32_t bits = bit_cast<uint32_t>(x), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    if (size > 0x7f800000u) {
        to->bits = uint16_t(sign | 0x7e00);
    } else if (size >= 0x477ff000u) {  // rounds to more than 65504
        to->bits = uint16_t(sign | 0x7c00);
    } else if (size < 0x38800000u) {  // subnormal: adding 0.5 leaves the rounded value in the low bits
        to->bits = uint16_t(sign | (bit_cast<uint32_t>(bit_cast<float>(size) + 0.5f) - 0x3f000000u));
    } else {
        to->bits = uint16_t(sign | ((size - 0x38000000u + 0xfff + ((size >> 13) & 1)) >> 13));
    }
#endif
}

// ---- eight elements at any address ----

inline v8 load8(const float* from) {
    v8 x;
    std::memcpy(&x, from, sizeof(x));
    return x;
}
inline v8 load8(const bf16* from) {
#if defined(__AVX2__)  // GCC makes four instructions of the conversion below
    const __m128i x = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return bit_cast<v8>(_mm256_slli_epi32(_mm256_cvtepu16_epi32(x), 16));
#else
    h8 x;
    std::memcpy(&x, from, sizeof(x));
    return bit_cast<v8>(__builtin_convertvector(x, u8) << 16);
#endif
}
inline v8 load8(const f16* from) {
#if defined(__F16C__)
    return bit_cast<v8>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
    v8 x;
    for (int i = 0; i < LANES; ++i) x[i] = to_float(from[i]);
    return x;
#endif
}

inline void store8(v8 x, float* to) { std::memcpy(to, &x, sizeof(x)); }
inline void store8(v8 x, bf16* to) {
    const u8 bits = bit_cast<u8>(x);
    const u8 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    const u8 nan = bit_cast<u8>(x != x);
    const h8 out = __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0), h8);
    std::memcpy(to, &out, sizeof(out));
}
inline void store8(v8 x, f16* to) {
#if defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(bit_cast<__m256>(x), 0));
#else
    for (int i = 0; i < LANES; ++i) from_float(x[i], to + i);
#endif
}

// count < 8 elements; the other lanes read as `fill` and are not written
template <class T>
inline v8 load_part(const T* from, int count, float fill) {
    v8 x = splat(fill);
    for (int i = 0; i < count; ++i) x[i] = to_float(from[i]);
    return x;
}
template <class T>
inline void store_part(v8 x, T* to, int count) {
    for (int i = 0; i < count; ++i) from_float(x[i], to + i);
}

// ---- across lanes ----

#if defined(__clang__) || __GNUC__ >= 12
#define MINISGL_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define MINISGL_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, i8{__VA_ARGS__})
#endif

inline float sum(v8 x) {
    v4 half[2];
    std::memcpy(half, &x, sizeof(x));
    const v4 four = half[0] + half[1];
    return (four[0] + four[2]) + (four[1] + four[3]);
}

// The sum of each of eight vectors, in the order of additions that `sum` has
inline v8 sum_each(const v8* x) {
    v8 half[4], quarter[2];
    for (int i = 0; i < 4; ++i) {
        const v8 low = MINISGL_SHUFFLE(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        half[i] = low + MINISGL_SHUFFLE(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 2; ++i) {
        const v8 low = MINISGL_SHUFFLE(half[2 * i], half[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13);
        quarter[i] = low + MINISGL_SHUFFLE(half[2 * i], half[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    }
    const v8 even = MINISGL_SHUFFLE(quarter[0], quarter[1], 0, 2, 8, 10, 4, 6, 12, 14);
    return even + MINISGL_SHUFFLE(quarter[0], quarter[1], 1, 3, 9, 11, 5, 7, 13, 15);
}

inline void transpose8(v8 (&r)[LANES]) {
    v8 t[LANES];
    for (int i = 0; i < LANES; i += 2) {
        t[i] = MINISGL_SHUFFLE(r[i], r[i + 1], 0, 8, 1, 9, 4, 12, 5, 13);
        t[i + 1] = MINISGL_SHUFFLE(r[i], r[i + 1], 2, 10, 3, 11, 6, 14, 7, 15);
    }
    for (int i = 0; i < LANES; i += 4) {
        for (int j = 0; j < 2; ++j) {
            r[i + 2 * j] = MINISGL_SHUFFLE(t[i + j], t[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            r[i + 2 * j + 1] = MINISGL_SHUFFLE(t[i + j], t[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    }
    for (int i = 0; i < 4; ++i) {
        const v8 low = r[i], high = r[i + 4];
        r[i] = MINISGL_SHUFFLE(low, high, 0, 1, 2, 3, 8, 9, 10, 11);
        r[i + 4] = MINISGL_SHUFFLE(low, high, 4, 5, 6, 7, 12, 13, 14, 15);
    }
}

inline bool any(i8 mask) {
    int32_t out = 0;
    for (int i = 0; i < LANES; ++i) out |= mask[i];
    return out != 0;
}

inline v8 select(i8 mask, v8 yes, v8 no) {
    return bit_cast<v8>((bit_cast<i8>(yes) & mask) | (bit_cast<i8>(no) & ~mask));
}
// The first operand's NaN is lost, the second one's stays.
inline v8 max8(v8 a, v8 b) { return select(a > b, a, b); }

// ---- exp and log: Cody-Waite reduction and the minimax polynomials of the Cephes library (expf, logf), below 2 ulp ----

inline v8 exp8(v8 x) {
    const i8 under = x < -87.33654f;  // results below the normal range are 0
    v8 bounded = select(x > 88.72283f, splat(88.72283f), select(under, splat(-87.33654f), x));
    const v8 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    v8 n = bounded * 1.44269504088896341f + magic;
    const i8 whole = bit_cast<i8>(n) - bit_cast<i8>(magic);
    n -= magic;
    const v8 r = (bounded - n * 0.693359375f) + n * 2.12194440e-4f;
    v8 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    // Two factors, for 2^128 itself is not a float.
    const i8 half = whole >> 1;
    p *= bit_cast<v8>((half + 127) << 23);
    p *= bit_cast<v8>((whole - half + 127) << 23);
    p = select(x > 88.72283f, splat(__builtin_inff()), p);
    p = select(under, splat(0.0f), p);
    return select(x != x, x, p);
}

// Positive, normal arguments.
inline v8 log8(v8 x) {
    const i8 bits = bit_cast<i8>(x);
    // Split as m * 2^e with m in [sqrt(1/2), sqrt(2)).
    const i8 shifted = bits - 0x3f3504f3;
    const v8 e = __builtin_convertvector(shifted >> 23, v8);
    const v8 m = bit_cast<v8>((shifted & 0x7fffff) + 0x3f3504f3) - 1.0f;
    const v8 square = m * m;
    v8 p = splat(7.0376836292e-2f);
    p = p * m - 1.1514610310e-1f;
    p = p * m + 1.1676998740e-1f;
    p = p * m - 1.2420140846e-1f;
    p = p * m + 1.4249322787e-1f;
    p = p * m - 1.6668057665e-1f;
    p = p * m + 2.0000714765e-1f;
    p = p * m - 2.4999993993e-1f;
    p = p * m + 3.3333331174e-1f;
    p = p * m * square - e * 2.12194440e-4f - square * 0.5f;
    return m + p + e * 0.693359375f;
}

// log(1 + x) for x > -1, exact to an ulp or two near 0 as well (Higham, Accuracy and Stability, 1.14.1).
inline v8 log1p8(v8 x) {
    const v8 y = x + 1.0f;
    const v8 grown = y - 1.0f;
    const i8 tiny = grown == 0.0f;
    return select(tiny, x, log8(y) * (x / select(tiny, splat(1.0f), grown)));
}

}  // namespace minisgl
