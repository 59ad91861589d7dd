// Who touched which byte.
#pragma once

#include "machine.h"

namespace minisgl_sim {

// Of one byte: the last writer, and the last two readers since.
struct Cell {
    Stamp write;
    Stamp reads[2];
};

using Cells = std::vector<Cell>;

inline bool conflict(const Stamp& earlier, Access access) {
    return !(earlier.atomic && access == ATOMIC) && !ordered(earlier);
}

// Checks one byte against those who touched it before, and records the current thread.
inline const Stamp* visit(Cell& cell, Access access, const Stamp& stamp) {
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

// Of an access that is still to be checked; `pc` is where it returns to.
Fault fault_of(uintptr_t at, size_t size, Access access, const void* pc);

[[noreturn]] void fail_as_race(Fault fault, const Stamp& other, std::string array = {});

// Is it in shared memory? Then it has been checked.
bool touch_shared(uintptr_t at, size_t size, size_t alignment, Access access, const Fault& fault);

}  // namespace minisgl_sim
