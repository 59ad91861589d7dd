// Runs the blocks of a launch: fibers, and what is said when they cannot go on.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace minisgl_sim {

const Launch* launch = nullptr;
Thread* current = nullptr;
std::vector<Thread> threads;

namespace {

Fault* verdict = nullptr;
std::string verdict_text;
ucontext_t scheduler;
Dim3 block{};
char* stacks = nullptr;
size_t stacks_size = 0;

void reserve_stacks(size_t count) {
    if (count * STACK <= stacks_size) return;
    if (stacks != nullptr) munmap(stacks, stacks_size);
    stacks_size = count * STACK;
    void* memory = mmap(nullptr, stacks_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) std::abort();
    stacks = static_cast<char*>(memory);
}

void fiber() {
    launch->entry(launch->slots);
    current->state = State::ENDED;
    setcontext(&scheduler);
}

Dim3 unravel(uint32_t linear, const int64_t* shape) {
    const auto x = static_cast<uint32_t>(shape[0]), y = static_cast<uint32_t>(shape[1]);
    return {linear % x, linear / x % y, linear / x / y};
}

void start_block(uint32_t linear_in_grid) {
    block = unravel(linear_in_grid, launch->grid);
    begin_barriers();
    begin_shared_memory();
    for (uint32_t i = 0; i < block_size(); ++i) {
        Thread& thread = threads[i];
        thread = Thread{};
        thread.linear = i;
        thread.number = linear_in_grid * block_size() + i + 1;
        thread.index = unravel(i, launch->block);
        thread.stack = stacks + i * STACK;
        thread.clocks[i % WARP] = 1;
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack;
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, fiber, 0);
    }
}

void put(int64_t* to, Dim3 from) { to[0] = from.x, to[1] = from.y, to[2] = from.z; }

void record(Kind kind, const Fault& fault, std::string text) {
    verdict_text = std::move(text);
    *verdict = fault;
    verdict->kind = kind;
    verdict->text = verdict_text.c_str();
    put(verdict->block, block);
    put(verdict->thread, current->index);
}

// Does `waiting` wait for `other`?
bool is_missed(const Thread& other, const Thread& waiting) {
    const bool same_warp = other.linear / WARP == waiting.linear / WARP;
    const bool needed = waiting.state == State::AT_BLOCK_BARRIER ||
                        (same_warp && (waiting.mask >> (other.linear % WARP) & 1));
    return needed && !(other.state == waiting.state && other.mask == waiting.mask && same(other.site, waiting.site));
}

// No thread can run and not all have ended: reports which threads wait, and for which. The narrowest is closest to the cause.
void record_deadlock() {
    const auto narrower = [](const Thread& a, const Thread& b) { return a.state < b.state; };
    current = &*std::min_element(threads.begin(), threads.end(), narrower);
    const auto is_missed_here = [](const Thread& other) { return is_missed(other, *current); };
    const auto missed = std::find_if(threads.begin(), threads.end(), is_missed_here);
    const std::string text = describe(*current) + (missed == threads.end() ? "" : ", " + describe(*missed));
    record(Kind::DIVERGENCE, at(current->site), text);
}

bool run_block() {
    for (bool progress = true; progress;) {
        progress = false;
        for (Thread& thread : threads) {
            if (thread.state != State::READY) continue;
            progress = true;
            current = &thread;
            thread.steps = 0;
            swapcontext(&scheduler, &thread.context);
            if (verdict->kind != Kind::NONE) return false;
        }
    }
    for (const Thread& thread : threads) {
        if (thread.state == State::ENDED) continue;
        record_deadlock();
        return false;
    }
    return true;
}

Dim3 shape(const int64_t* sizes) {
    return {static_cast<unsigned>(sizes[0]), static_cast<unsigned>(sizes[1]), static_cast<unsigned>(sizes[2])};
}

}  // namespace

Dim3 thread_index() { return current->index; }
Dim3 block_index() { return block; }
Dim3 block_shape() { return shape(launch->block); }
Dim3 grid_shape() { return shape(launch->grid); }
unsigned lane() { return current->linear % WARP; }

void wait() {
    Thread& self = *current;
    swapcontext(&self.context, &scheduler);
}

Fault at(Site site) {
    Fault fault{};
    fault.file = site.file;
    fault.line = site.line;
    return fault;
}

bool same(const Site& a, const Site& b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

std::string describe(const Thread& thread) {
    char text[96];
    const char* what[] = {"runs", "waits for its warp", "waits at a block barrier", "has ended"};
    std::snprintf(text, sizeof text, "thread (%u, %u, %u) %s", thread.index.x, thread.index.y, thread.index.z,
                  what[static_cast<int>(thread.state)]);
    const bool waits = thread.state != State::READY && thread.state != State::ENDED;
    return waits ? std::string(text) + " in line " + std::to_string(thread.site.line) : text;
}

Dim3 block_of(uint32_t grid_thread) { return unravel((grid_thread - 1) / block_size(), launch->grid); }
Dim3 thread_of(uint32_t grid_thread) { return unravel((grid_thread - 1) % block_size(), launch->block); }

bool on_stack_of_current(uintptr_t at, size_t size) {
    const auto begin = reinterpret_cast<uintptr_t>(current->stack);
    return at >= begin && at + size <= begin + STACK;
}

void fail(Kind kind, const Fault& fault, std::string text) {
    record(kind, fault, std::move(text));
    current = nullptr;
    setcontext(&scheduler);
    std::abort();  // setcontext does not return
}

}  // namespace minisgl_sim

// Runs every block; stops at the first fault. Not reentrant.
extern "C" void minisgl_sim_run(const minisgl_sim::Launch* request, minisgl_sim::Fault* fault) {
    using namespace minisgl_sim;
    launch = request;
    verdict = fault;
    *verdict = Fault{};
    threads.assign(static_cast<size_t>(request->block[0] * request->block[1] * request->block[2]), Thread{});
    reserve_stacks(threads.size());
    begin_memory();
    const auto count = static_cast<uint32_t>(request->grid[0] * request->grid[1] * request->grid[2]);
    for (uint32_t i = 0; i < count; ++i) {
        start_block(i);
        if (!run_block()) break;
    }
    current = nullptr;
}
