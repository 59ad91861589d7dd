// The calling convention: every entry point takes one pointer to a struct of 8-byte fields, which Python packs.
#pragma once

#include <cstdint>

#include "vec.h"

namespace minisgl {

enum : int64_t { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <class Body>
inline void dispatch(int64_t dtype, Body body) {
    switch (dtype) {
        case FLOAT32: return body(float{});
        case BFLOAT16: return body(bf16{});
        default: return body(f16{});
    }
}

template <class T>
inline void convert(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store8(load8(from + i), to + i);
    for (; i < count; ++i) to[i] = to_float(from[i]);
}

template <class T>
inline void narrow(const float* from, int64_t count, T* to) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store8(load8(from + i), to + i);
    for (; i < count; ++i) from_float(from[i], to + i);
}

}  // namespace minisgl
