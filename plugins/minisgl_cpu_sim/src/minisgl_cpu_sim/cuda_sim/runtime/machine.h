// The simulated GPU: one block at a time, its threads as fibers that switch only where they wait for each other.
//
// Races do not depend on the order in which the fibers happen to run: each access is stamped with its thread's logical
// time, and two accesses to one byte conflict if no barrier lies between them.
#pragma once

#include <ucontext.h>

#include <cstdint>
#include <string>
#include <vector>

#include <minisgl/device.h>

namespace minisgl_sim {

enum class Kind : int64_t {
    NONE = 0,
    OUT_OF_BOUNDS = 1,
    MISALIGNED = 2,
    RACE = 3,
    UNINITIALISED = 4,
    DIVERGENCE = 5,
    STUCK = 6,
    SHARED_MEMORY = 7,
};

// From Python. `rows` runs of `row_bytes`, `stride` apart; bytes [loose_begin, loose_end) from `base` may be written in
// any order.
struct Buffer {
    int64_t base, rows, row_bytes, stride, loose_begin, loose_end;
};

// From Python: all fields are 8 bytes.
struct Launch {
    void (*entry)(const int64_t*);
    const int64_t* slots;
    int64_t num_slots;
    int64_t grid[3], block[3];
    int64_t dynamic_shared;
    const Buffer* buffers;
    int64_t num_buffers;
};

// To Python: all fields are 8 bytes.
struct Fault {
    Kind kind = Kind::NONE;
    int64_t access, size, address;
    int64_t buffer = -1;  // index among the launch's buffers
    int64_t offset;  // from the base of the buffer or the shared array
    int64_t block[3], thread[3];
    int64_t other_block[3], other_thread[3];  // the other party of a race
    int64_t pc;                               // of the access, relative to the library
    const char* file;                         // of a barrier
    int64_t line;
    const char* text;
};

// When a thread touched a byte.
struct Stamp {
    uint32_t thread = 0;  // in the grid, from 1; 0 = never
    uint32_t epoch = 0;   // block barriers that it had passed
    uint32_t clock = 0;   // its own component of its warp's vector clock
    bool atomic = false;
};

// From the narrowest wait to the widest.
enum class State : uint8_t { READY, AT_WARP, AT_BLOCK_BARRIER, ENDED };

struct Thread {
    ucontext_t context;
    char* stack = nullptr;
    State state = State::READY;
    Dim3 index{};
    uint32_t linear = 0;  // in its block
    uint32_t number = 0;  // in the grid, from 1
    uint32_t epoch = 0;
    uint32_t clocks[WARP] = {};  // what it knows of the lanes of its warp
    Site site{};
    uint32_t mask = 0;
    uint64_t outbox = 0;
    uint64_t inbox[WARP] = {};
    uint64_t steps = 0;  // accesses since it last waited
};

// Of the launch. `current` is the thread that runs now; null between launches.
extern const Launch* launch;
extern Thread* current;
extern std::vector<Thread> threads;  // of the block that runs

inline uint32_t block_size() { return static_cast<uint32_t>(threads.size()); }

// machine.cpp: a thread lets others run until its state is READY again; `fail` ends the launch, and `text` adds to what
// the kind says.
void wait();
[[noreturn]] void fail(Kind kind, const Fault& fault, std::string text = {});
Fault at(Site site);
bool same(const Site& a, const Site& b);
std::string describe(const Thread& thread);
Dim3 block_of(uint32_t grid_thread);
Dim3 thread_of(uint32_t grid_thread);

// barriers.cpp
void begin_barriers();
Stamp now();
bool ordered(const Stamp& earlier);

// memory.cpp
void begin_memory();
void touch(uintptr_t at, size_t size, size_t alignment, Access access, const void* pc);

// shared.cpp
void begin_shared_memory();

constexpr size_t STACK = 128 * 1024;
bool on_stack_of_current(uintptr_t at, size_t size);

}  // namespace minisgl_sim
