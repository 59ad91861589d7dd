// The shared memory of each block of a cluster: bounds, bytes that nobody wrote, and writes from other blocks.
#include "cells.h"

#include <algorithm>

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

// One block's. Arrays lie in the order in which that block's threads came to them.
struct Shared {
    std::vector<Array> arrays;
    Cells cells;
    size_t bytes = 0;
};

alignas(1024) char arenas[MAX_CLUSTER][ARENA];
Shared memories[MAX_CLUSTER];

const Array& array_of(uint32_t rank, const void* key, const char* name, size_t size) {
    Shared& memory = memories[rank];
    for (const Array& array : memory.arrays) {
        if (array.key == key) return array;
    }
    if (size > SHARED_LIMIT - memory.bytes) {
        fail(Kind::SHARED_MEMORY, Fault{}, "a block has " + std::to_string(SHARED_LIMIT) + " bytes of shared memory");
    }
    memory.bytes += size;
    const auto begin = static_cast<uint32_t>(memory.cells.size()) + RED_ZONE;
    memory.cells.resize((begin + size + RED_ZONE - 1) / RED_ZONE * RED_ZONE);
    std::memset(arenas[rank] + begin, 0xcb, size);
    return memory.arrays.emplace_back(Array{key, name, begin, static_cast<uint32_t>(size)});
}

bool holds(uint32_t rank, uintptr_t at) {
    const auto base = reinterpret_cast<uintptr_t>(arenas[rank]);
    return at >= base && at < base + ARENA;
}

// The array of the current block that an access means, which must lie in it; `fault.offset` tells where from here on.
const Array& meant(uintptr_t at, size_t size, size_t alignment, Fault& fault) {
    const auto place = static_cast<uint32_t>(at - reinterpret_cast<uintptr_t>(arenas[current->rank]));
    const Array* nearest = nullptr;
    for (const Array& array : memories[current->rank].arrays) {
        if (nearest == nullptr || place + RED_ZONE >= array.begin) nearest = &array;
    }
    if (nearest == nullptr) fail(Kind::OUT_OF_BOUNDS, fault, "shared memory");
    fault.offset = int64_t{place} - nearest->begin;
    const bool inside = place >= nearest->begin && place + size <= nearest->begin + nearest->size;
    if (!inside) fail(Kind::OUT_OF_BOUNDS, fault, nearest->name);
    if (place % alignment != 0) fail(Kind::MISALIGNED, fault, nearest->name);
    return *nearest;
}

void visit_array(uint32_t rank, const Array& array, size_t size, Access access, Fault fault) {
    Stamp stamp = now();
    stamp.atomic = access == ATOMIC;
    for (size_t i = 0; i < size; ++i) {
        Cell& cell = memories[rank].cells[array.begin + static_cast<size_t>(fault.offset)];
        if (access != WRITE && cell.write.thread == 0) fail(Kind::UNINITIALISED, fault, array.name);
        if (const Stamp* other = visit(cell, access, stamp)) fail_as_race(fault, *other, array.name);
        ++fault.offset;
    }
}

[[noreturn]] void fail_remotely(int64_t pc, const std::string& what) {
    Fault fault{};
    fault.pc = pc;
    fail(Kind::REMOTE_STORE, fault, what);
}

[[noreturn]] void fail_as_absent(int64_t pc, const char* array, uint32_t rank, const char* why) {
    const std::string target = "`" + std::string(array) + "` of block " + describe(blocks[rank].index);
    fail_remotely(pc, "to " + target + ", which may have " + why);
}

constexpr const char* TOO_EARLY = "not started yet: the thread has waited at no barrier of the cluster";
constexpr const char* TOO_LATE = "ended: it waits at no barrier of the cluster at which the thread arrives afterwards";

// The other block must be there, whatever the order in which blocks run.
void check_presence(uint32_t rank, const char* array, int64_t pc) {
    if (current->known == 0) fail_as_absent(pc, array, rank, TOO_EARLY);
    Block& block = blocks[rank];
    if (block.ended == block_size()) fail_as_absent(pc, array, rank, TOO_LATE);
    if (current->arrived + 1 > block.store.until) block.store = {current, current->arrived + 1, array, pc};
}

}  // namespace

void begin_shared_memory() {
    for (Shared& memory : memories) {
        memory.cells.clear();
        memory.arrays.clear();
        memory.bytes = 0;
    }
}

// The last thread of a block has ended: were all writes from other blocks sure to come before?
void end_shared_memory(uint32_t rank) {
    const RemoteStore store = blocks[rank].store;
    for (const Thread& thread : threads_of(rank)) {
        if (thread.known >= store.until) return;
    }
    current = store.by;
    fail_as_absent(store.pc, store.array, rank, TOO_LATE);
}

void* shared(const void* key, const char* name, size_t size) {
    return arenas[current->rank] + array_of(current->rank, key, name, size).begin;
}

void* dynamic_shared() {
    static const char key = 0;
    return shared(&key, "dynamic shared memory", static_cast<size_t>(launch->dynamic_shared));
}

bool touch_shared(uintptr_t at, size_t size, size_t alignment, Access access, const Fault& fault) {
    if (!holds(current->rank, at)) return false;
    Fault there = fault;
    const Array& array = meant(at, size, alignment, there);
    visit_array(current->rank, array, size, access, there);
    return true;
}

void* remote(void* at, unsigned rank, size_t size) {
    const auto place = reinterpret_cast<uintptr_t>(at);
    Fault fault = fault_of(place, size, WRITE, __builtin_return_address(0));
    if (rank >= blocks.size()) {
        const std::string of_blocks = std::to_string(blocks.size());
        fail_remotely(fault.pc, "to rank " + std::to_string(rank) + " of a cluster of " + of_blocks);
    }
    if (!holds(current->rank, place)) fail_remotely(fault.pc, "to a place that is not in shared memory");
    const Array mine = meant(place, size, size, fault);
    if (rank != current->rank) check_presence(rank, mine.name, fault.pc);
    const Array& theirs = array_of(rank, mine.key, mine.name, mine.size);
    visit_array(rank, theirs, size, WRITE, fault);
    return arenas[rank] + theirs.begin + fault.offset;
}

}  // namespace minisgl_sim
