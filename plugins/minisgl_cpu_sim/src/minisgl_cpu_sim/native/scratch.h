// Each thread's scratch memory: grows to the largest need, is reused for ever, never shared.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <new>

namespace minisgl {

// Buffers that live at the same time have different names.
enum class Scratch { panels, pairs, x, y, keys, values, scores, mixed, partial, count };

inline float* scratch(Scratch name, size_t floats) {
    struct Buffer {
        void* data = nullptr;
        size_t bytes = 0;
        ~Buffer() { std::free(data); }
    };
    thread_local Buffer buffers[size_t(Scratch::count)];
    Buffer& buffer = buffers[size_t(name)];
    const size_t bytes = (floats * sizeof(float) + 63) / 64 * 64;
    if (bytes > buffer.bytes) {
        std::free(buffer.data);
        buffer.data = std::aligned_alloc(64, bytes);
        buffer.bytes = buffer.data ? bytes : 0;
        if (!buffer.data) throw std::bad_alloc();
    }
    return static_cast<float*>(buffer.data);
}

}  // namespace minisgl
