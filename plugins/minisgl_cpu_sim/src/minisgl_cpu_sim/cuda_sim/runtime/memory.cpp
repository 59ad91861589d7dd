// What threads may touch, and in which order: bounds, alignment and races in the arrays that were passed.
#include "cells.h"

#include <link.h>

#include <algorithm>
#include <unordered_map>

namespace minisgl_sim {

namespace {

constexpr uint64_t STEPS = 10'000'000;  // without waiting: a thread that spins for another never ends
constexpr size_t PAGE = 1024;

std::vector<Buffer> buffers;
std::unordered_map<uintptr_t, Cells> pages;
uintptr_t last_page = UINTPTR_MAX;
Cells* last_cells = nullptr;

uintptr_t slots_begin = 0, slots_end = 0;  // the kernel's arguments
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

}  // namespace

Fault fault_of(uintptr_t at, size_t size, Access access, const void* pc) {
    Fault fault{};
    fault.access = access;
    fault.size = static_cast<int64_t>(size);
    fault.address = static_cast<int64_t>(at);
    fault.pc = static_cast<int64_t>(reinterpret_cast<uintptr_t>(pc) - image);
    return fault;
}

void fail_as_race(Fault fault, const Stamp& other, std::string array) {
    const Dim3 block = block_of(other.thread), thread = thread_of(other.thread);
    fault.other_block[0] = block.x, fault.other_block[1] = block.y, fault.other_block[2] = block.z;
    fault.other_thread[0] = thread.x, fault.other_thread[1] = thread.y, fault.other_thread[2] = thread.z;
    fail(Kind::RACE, fault, std::move(array));
}

void begin_memory() {
    if (image == 0) dl_iterate_phdr(find_image, nullptr);
    buffers.assign(launch->buffers, launch->buffers + launch->num_buffers);
    slots_begin = reinterpret_cast<uintptr_t>(launch->slots);
    slots_end = slots_begin + static_cast<size_t>(launch->num_slots) * sizeof(int64_t);
    pages.clear();
    last_page = UINTPTR_MAX;
}

void touch(uintptr_t at, size_t size, size_t alignment, Access access, const void* pc) {
    if (current == nullptr || on_stack_of_current(at, size)) return;
    const Fault fault = fault_of(at, size, access, pc);
    if (++current->steps > STEPS) fail(Kind::STUCK, fault, "it spins; threads take turns at barriers only here");
    if (touch_shared(at, size, alignment, access, fault)) return;
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
