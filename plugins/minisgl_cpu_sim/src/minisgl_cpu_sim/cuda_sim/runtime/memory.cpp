// What threads may touch, and in which order: bounds, alignment, races, shared memory that nobody wrote.
#include "machine.h"

#include <link.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <unordered_map>

namespace minisgl_sim {

namespace {

constexpr size_t SHARED_LIMIT = 227 * 1024;  // of one block, on the largest GPUs
constexpr uint32_t RED_ZONE = 1024;          // between shared arrays
constexpr size_t ARENA = 1024 * 1024;
constexpr uint64_t STEPS = 10'000'000;  // without waiting: a thread that spins for another block never ends
constexpr size_t PAGE = 1024;

// Who touched a byte: the last writer, and the last two readers since.
struct Cell {
    Stamp write;
    Stamp reads[2];
};

using Cells = std::vector<Cell>;

alignas(1024) char arena[ARENA];
Cells arena_cells;
std::vector<SharedArray> arrays;
uint32_t arena_used = 0;
size_t shared_bytes = 0;

std::vector<Buffer> buffers;
std::unordered_map<uintptr_t, Cells> pages;
uintptr_t last_page = UINTPTR_MAX;
Cells* last_cells = nullptr;

uintptr_t slots_begin = 0, slots_end = 0;  // the kernel's arguments
int64_t dynamic_bytes = 0;
std::vector<std::pair<uintptr_t, uintptr_t>> constants;  // read-only segments of this library
uintptr_t image = 0;

int find_image(dl_phdr_info* info, size_t, void*) {
    const auto self = reinterpret_cast<uintptr_t>(&find_image);
    bool mine = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const uintptr_t begin = info->dlpi_addr + part.p_vaddr;
        mine = mine || (part.p_type == PT_LOAD && self >= begin && self < begin + part.p_memsz);
    }
    if (!mine) return 0;
    image = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& part = info->dlpi_phdr[i];
        const bool fixed = part.p_type == PT_GNU_RELRO || (part.p_type == PT_LOAD && !(part.p_flags & PF_W));
        if (fixed) constants.emplace_back(image + part.p_vaddr, image + part.p_vaddr + part.p_memsz);
    }
    return 1;
}

Fault describe(uintptr_t at, size_t size, Access access, const void* pc) {
    Fault fault{};
    fault.access = access;
    fault.size = static_cast<int64_t>(size);
    fault.address = static_cast<int64_t>(at);
    fault.pc = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pc) - image);
    return fault;
}

int64_t end_of(const Buffer& buffer) {
    return buffer.rows == 0 ? buffer.base : buffer.base + (buffer.rows - 1) * buffer.stride + buffer.row_bytes;
}

bool holds(const Buffer& buffer, int64_t at, int64_t size) {
    if (at < buffer.base || at + size > end_of(buffer)) return false;
    return buffer.rows == 1 || (at - buffer.base) % buffer.stride + size <= buffer.row_bytes;
}

int64_t distance(const Buffer& buffer, int64_t at) {
    return std::max({buffer.base - at, at - end_of(buffer) + 1, int64_t{0}});
}

int64_t nearest(int64_t at) {
    int64_t best = -1;
    for (size_t i = 0; i < buffers.size(); ++i) {
        const bool closer = best < 0 || distance(buffers[i], at) < distance(buffers[static_cast<size_t>(best)], at);
        if (closer) best = static_cast<int64_t>(i);
    }
    return best;
}

Cell* cells_of(uintptr_t at) {
    if (at / PAGE != last_page) {
        Cells& cells = pages[at / PAGE];
        if (cells.empty()) cells.resize(PAGE);
        last_page = at / PAGE;
        last_cells = &cells;
    }
    return last_cells->data() + at % PAGE;
}

bool conflict(const Stamp& earlier, Access access) {
    return !(earlier.atomic && access == ATOMIC) && !ordered(earlier);
}

// Checks one byte against those who touched it before, and records the current thread.
const Stamp* visit(Cell& cell, Access access, const Stamp& stamp) {
    if (conflict(cell.write, access)) return &cell.write;
    if (access == READ) {
        if (cell.reads[0].thread != stamp.thread) cell.reads[1] = cell.reads[0];
        cell.reads[0] = stamp;
        return nullptr;
    }
    for (const Stamp& read : cell.reads) {
        if (conflict(read, access)) return &read;
    }
    cell.write = stamp;
    cell.reads[0] = cell.reads[1] = Stamp{};
    return nullptr;
}

[[noreturn]] void fail_as_race(Fault fault, const Stamp& other, std::string array = {}) {
    const Dim3 block = block_of(other.thread), thread = thread_of(other.thread);
    fault.other_block[0] = block.x, fault.other_block[1] = block.y, fault.other_block[2] = block.z;
    fault.other_thread[0] = thread.x, fault.other_thread[1] = thread.y, fault.other_thread[2] = thread.z;
    fail(Kind::RACE, fault, std::move(array));
}

void touch_shared(uint32_t at, size_t size, size_t alignment, Access access, Fault fault) {
    const SharedArray* nearest = nullptr;
    for (const SharedArray& array : arrays) {
        if (nearest == nullptr || at + RED_ZONE >= array.begin) nearest = &array;
    }
    if (nearest == nullptr) fail(Kind::OUT_OF_BOUNDS, fault, "shared memory");
    fault.offset = int64_t{at} - nearest->begin;
    const std::string name = nearest->name;
    if (at < nearest->begin || at + size > nearest->begin + nearest->size) fail(Kind::OUT_OF_BOUNDS, fault, name);
    if (at % alignment != 0) fail(Kind::MISALIGNED, fault, name);
    Stamp stamp = now();
    stamp.atomic = access == ATOMIC;
    for (size_t i = 0; i < size; ++i) {
        Cell& cell = arena_cells[at + i];
        if (access != WRITE && cell.write.thread == 0) fail(Kind::UNINITIALISED, fault, name);
        if (const Stamp* other = visit(cell, access, stamp)) {
            fault.offset += static_cast<int64_t>(i);
            fail_as_race(fault, *other, name);
        }
    }
}

void touch_buffer(int64_t index, uintptr_t at, size_t size, size_t alignment, Access access, Fault fault) {
    const Buffer& buffer = buffers[static_cast<size_t>(index)];
    fault.buffer = index;
    fault.offset = static_cast<int64_t>(at) - buffer.base;
    if (at % alignment != 0) fail(Kind::MISALIGNED, fault);
    if (fault.offset >= buffer.loose_begin && fault.offset + fault.size <= buffer.loose_end) return;
    Stamp stamp = now();
    stamp.atomic = access == ATOMIC;
    for (size_t i = 0; i < size; ++i) {
        if (const Stamp* other = visit(*cells_of(at + i), access, stamp)) {
            fault.offset += static_cast<int64_t>(i);
            fail_as_race(fault, *other);
        }
    }
}

void* allocate(const void* key, const char* name, size_t size) {
    if (size > SHARED_LIMIT - shared_bytes) {
        fail(Kind::SHARED_MEMORY, Fault{}, "a block has " + std::to_string(SHARED_LIMIT) + " bytes of shared memory");
    }
    shared_bytes += size;
    const uint32_t begin = arena_used + RED_ZONE;
    arrays.push_back({key, name, begin, static_cast<uint32_t>(size)});
    arena_used = static_cast<uint32_t>((begin + size + RED_ZONE - 1) / RED_ZONE * RED_ZONE);
    std::memset(arena + begin, 0xcb, size);
    return arena + begin;
}

}  // namespace

void begin_memory(const Launch& launch) {
    if (image == 0) dl_iterate_phdr(find_image, nullptr);
    buffers.assign(launch.buffers, launch.buffers + launch.num_buffers);
    slots_begin = reinterpret_cast<uintptr_t>(launch.slots);
    slots_end = slots_begin + static_cast<size_t>(launch.num_slots) * sizeof(int64_t);
    dynamic_bytes = launch.dynamic_shared;
    pages.clear();
    last_page = UINTPTR_MAX;
    arena_cells.resize(ARENA);
}

void begin_block_memory() {
    std::fill(arena_cells.begin(), arena_cells.begin() + arena_used, Cell{});
    arrays.clear();
    arena_used = 0;
    shared_bytes = 0;
}

void* shared(const void* key, const char* name, size_t size) {
    for (const SharedArray& array : arrays) {
        if (array.key == key) return arena + array.begin;
    }
    return allocate(key, name, size);
}

void* dynamic_shared() {
    static const char key = 0;
    return shared(&key, "dynamic shared memory", static_cast<size_t>(dynamic_bytes));
}

void touch(uintptr_t at, size_t size, size_t alignment, Access access, const void* pc) {
    if (current == nullptr || on_stack_of_current(at, size)) return;
    const Fault fault = describe(at, size, access, pc);
    if (++current->steps > STEPS) fail(Kind::STUCK, fault, "it spins; blocks run one after another here");
    const auto base = reinterpret_cast<uintptr_t>(arena);
    if (at >= base && at < base + ARENA) {
        return touch_shared(static_cast<uint32_t>(at - base), size, alignment, access, fault);
    }
    for (size_t i = 0; i < buffers.size(); ++i) {
        if (holds(buffers[i], static_cast<int64_t>(at), static_cast<int64_t>(size))) {
            return touch_buffer(static_cast<int64_t>(i), at, size, alignment, access, fault);
        }
    }
    if (access == READ) {
        if (at >= slots_begin && at + size <= slots_end) return;
        for (const auto& [begin, end] : constants) {
            if (at >= begin && at + size <= end) return;
        }
    }
    Fault outside = fault;
    outside.buffer = nearest(static_cast<int64_t>(at));
    if (outside.buffer >= 0) outside.offset = outside.address - buffers[static_cast<size_t>(outside.buffer)].base;
    fail(Kind::OUT_OF_BOUNDS, outside);
}

void check(const void* at, size_t size, size_t alignment, Access access) {
    touch(reinterpret_cast<uintptr_t>(at), size, alignment, access, __builtin_return_address(0));
}

}  // namespace minisgl_sim
