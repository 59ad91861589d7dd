// Where the compiler's thread-sanitizer instrumentation arrives: each load and store of a kernel calls one of these.
// The sanitizer's own runtime is not linked.
#include <cstddef>
#include <cstring>

#include "machine.h"

using namespace minisgl_sim;

namespace {

void seen(const void* at, size_t size, size_t alignment, Access access, const void* pc) {
    touch(reinterpret_cast<uintptr_t>(at), size, alignment, access, pc);
}

}  // namespace

extern "C" {

void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

#define MINISGL_HOOKS(size)                                                                            \
    void __tsan_read##size(void* at) { seen(at, size, size, READ, __builtin_return_address(0)); }      \
    void __tsan_write##size(void* at) { seen(at, size, size, WRITE, __builtin_return_address(0)); }    \
    void __tsan_unaligned_read##size(void* at) { seen(at, size, 1, READ, __builtin_return_address(0)); } \
    void __tsan_unaligned_write##size(void* at) { seen(at, size, 1, WRITE, __builtin_return_address(0)); }

MINISGL_HOOKS(1)
MINISGL_HOOKS(2)
MINISGL_HOOKS(4)
MINISGL_HOOKS(8)
MINISGL_HOOKS(16)

void __tsan_read_range(void* at, size_t size) { seen(at, size, 1, READ, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t size) { seen(at, size, 1, WRITE, __builtin_return_address(0)); }

void* __tsan_memcpy(void* to, const void* from, size_t size) {
    seen(from, size, 1, READ, __builtin_return_address(0));
    seen(to, size, 1, WRITE, __builtin_return_address(0));
    return std::memcpy(to, from, size);
}

void* __tsan_memmove(void* to, const void* from, size_t size) {
    seen(from, size, 1, READ, __builtin_return_address(0));
    seen(to, size, 1, WRITE, __builtin_return_address(0));
    return std::memmove(to, from, size);
}

void* __tsan_memset(void* to, int value, size_t size) {
    seen(to, size, 1, WRITE, __builtin_return_address(0));
    return std::memset(to, value, size);
}

}  // extern "C"
