// The shared memory of the running block: bounds, alignment, races, and reads of unwritten bytes.
#include "cells.h"

namespace minisgl_sim {

namespace {

constexpr size_t SHARED_LIMIT = 227 * 1024;  // of one block, on the largest GPUs
constexpr uint32_t RED_ZONE = 1024;          // between arrays
constexpr size_t ARENA = 1024 * 1024;

struct Array {
    const void* key;
    const char* name;
    uint32_t begin, size;
};

alignas(1024) char arena[ARENA];
std::vector<Array> arrays;  // in the order in which the block's threads came to them
Cells cells;
size_t bytes = 0;

const Array& array_of(const void* key, const char* name, size_t size) {
    for (const Array& array : arrays) {
        if (array.key == key) return array;
    }
    if (size > SHARED_LIMIT - bytes) {
        fail(Kind::SHARED_MEMORY, Fault{}, "a block has " + std::to_string(SHARED_LIMIT) + " bytes of shared memory");
    }
    bytes += size;
    const auto begin = static_cast<uint32_t>(cells.size()) + RED_ZONE;
    cells.resize((begin + size + RED_ZONE - 1) / RED_ZONE * RED_ZONE);
    std::memset(arena + begin, 0xcb, size);
    return arrays.emplace_back(Array{key, name, begin, static_cast<uint32_t>(size)});
}

// The array of an access, which must be within it; from here on `fault.offset` is relative to the array.
const Array& meant(uintptr_t at, size_t size, size_t alignment, Fault& fault) {
    const auto place = static_cast<uint32_t>(at - reinterpret_cast<uintptr_t>(arena));
    const Array* nearest = nullptr;
    for (const Array& array : arrays) {
        if (nearest == nullptr || place + RED_ZONE >= array.begin) nearest = &array;
    }
    if (nearest == nullptr) fail(Kind::OUT_OF_BOUNDS, fault, "shared memory");
    fault.offset = int64_t{place} - nearest->begin;
    const bool inside = place >= nearest->begin && place + size <= nearest->begin + nearest->size;
    if (!inside) fail(Kind::OUT_OF_BOUNDS, fault, nearest->name);
    if (place % alignment != 0) fail(Kind::MISALIGNED, fault, nearest->name);
    return *nearest;
}

void visit_array(const Array& array, size_t size, Access access, Fault fault) {
    Stamp stamp = now();
    stamp.atomic = access == ATOMIC;
    for (size_t i = 0; i < size; ++i) {
        Cell& cell = cells[array.begin + static_cast<size_t>(fault.offset)];
        if (access != WRITE && cell.write.thread == 0) fail(Kind::UNINITIALISED, fault, array.name);
        if (const Stamp* other = visit(cell, access, stamp)) fail_as_race(fault, *other, array.name);
        ++fault.offset;
    }
}

}  // namespace

void begin_shared_memory() {
    cells.clear();
    arrays.clear();
    bytes = 0;
}

void* shared(const void* key, const char* name, size_t size) {
    return arena + array_of(key, name, size).begin;
}

void* dynamic_shared() {
    static const char key = 0;
    return shared(&key, "dynamic shared memory", static_cast<size_t>(launch->dynamic_shared));
}

bool touch_shared(uintptr_t at, size_t size, size_t alignment, Access access, const Fault& fault) {
    const auto base = reinterpret_cast<uintptr_t>(arena);
    if (at < base || at >= base + ARENA) return false;
    Fault there = fault;
    const Array& array = meant(at, size, alignment, there);
    visit_array(array, size, access, there);
    return true;
}

}  // namespace minisgl_sim
