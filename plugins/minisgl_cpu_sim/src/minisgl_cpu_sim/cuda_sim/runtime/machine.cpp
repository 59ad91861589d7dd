// Runs the blocks of a launch: fibers, barriers, shuffles.
#include "machine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>

namespace minisgl_sim {

Thread* current = nullptr;

namespace {

const Launch* launch = nullptr;
Fault* verdict = nullptr;
std::string verdict_text;
std::vector<Thread> threads;
ucontext_t scheduler;
Dim3 block{};
uint32_t block_linear = 0;
uint32_t at_barrier = 0;
char* stacks = nullptr;
size_t stacks_size = 0;

uint32_t block_size() { return static_cast<uint32_t>(threads.size()); }

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

void start_block(uint32_t linear) {
    block_linear = linear;
    block = unravel(linear, launch->grid);
    at_barrier = 0;
    begin_block_memory();
    for (uint32_t i = 0; i < block_size(); ++i) {
        Thread& thread = threads[i];
        thread = Thread{};
        thread.linear = i;
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

std::string describe(const Thread& thread) {
    char text[160];
    const char* where[] = {"runs", "waits at a block barrier", "waits for its warp", "has ended"};
    const bool waits = thread.state == State::AT_BLOCK_BARRIER || thread.state == State::AT_WARP;
    std::snprintf(text, sizeof text, "thread (%u, %u, %u) %s", thread.index.x, thread.index.y, thread.index.z,
                  where[static_cast<int>(thread.state)]);
    return waits ? text + std::string(" in line ") + std::to_string(thread.site.line) : text;
}

bool same(const Site& a, const Site& b) { return a.line == b.line && std::strcmp(a.file, b.file) == 0; }

void put(int64_t* to, Dim3 from) { to[0] = from.x, to[1] = from.y, to[2] = from.z; }

void record(Kind kind, const Fault& fault, std::string text) {
    verdict_text = std::move(text);
    *verdict = fault;
    verdict->kind = kind;
    verdict->text = verdict_text.c_str();
    put(verdict->block, block);
    put(verdict->thread, current->index);
}

Fault at(Site site) {
    Fault fault{};
    fault.file = site.file;
    fault.line = site.line;
    return fault;
}

// Nobody can run and not all have ended: says who waits, and for whom.
void record_deadlock() {
    Thread* waiting = nullptr;
    for (Thread& thread : threads) {
        if (thread.state == State::ENDED) continue;
        waiting = &thread;
        if (thread.state == State::AT_WARP) break;
    }
    current = waiting;
    std::string text = describe(*waiting);
    for (const Thread& other : threads) {
        const bool same_warp = other.linear / WARP == waiting->linear / WARP;
        const bool needed = waiting->state == State::AT_BLOCK_BARRIER ||
                            (same_warp && (waiting->mask >> (other.linear % WARP) & 1));
        const bool here = other.state == waiting->state && other.mask == waiting->mask && same(other.site, waiting->site);
        if (needed && !here) {
            text += ", " + describe(other);
            break;
        }
    }
    record(Kind::DIVERGENCE, at(waiting->site), text);
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

void wait() {
    Thread& self = *current;
    swapcontext(&self.context, &scheduler);
}

Thread* lane_of_warp(uint32_t lane) {
    const uint32_t linear = current->linear / WARP * WARP + lane;
    return linear < block_size() ? &threads[linear] : nullptr;
}

// Lanes of `mask` meet at `site`; then each holds the values of all. `orders`: memory too.
void meet(Site site, uint32_t mask, uint64_t value, bool orders) {
    Thread& self = *current;
    self.site = site;
    self.mask = mask;
    self.outbox = value;
    if (!(mask >> (self.linear % WARP) & 1)) fail(Kind::DIVERGENCE, at(site), "a lane that is not in its own mask");
    for (uint32_t i = 0; i < WARP; ++i) {
        if ((mask >> i & 1) && lane_of_warp(i) == nullptr) fail(Kind::DIVERGENCE, at(site), "the mask names lanes that do not exist");
    }
    self.state = State::AT_WARP;
    bool complete = true;
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1)) continue;
        const Thread& other = *lane_of_warp(i);
        complete = complete && other.state == State::AT_WARP && other.mask == mask && same(other.site, site);
    }
    if (complete) {
        uint32_t joined[WARP] = {};
        for (uint32_t i = 0; i < WARP; ++i) {
            if (!(mask >> i & 1)) continue;
            for (uint32_t k = 0; k < WARP; ++k) joined[k] = std::max(joined[k], lane_of_warp(i)->clocks[k]);
        }
        for (uint32_t i = 0; i < WARP; ++i) {
            if (!(mask >> i & 1)) continue;
            Thread& other = *lane_of_warp(i);
            other.state = State::READY;
            for (uint32_t k = 0; k < WARP; ++k) {
                if (mask >> k & 1) other.inbox[k] = lane_of_warp(k)->outbox;
            }
            if (!orders) continue;
            std::memcpy(other.clocks, joined, sizeof joined);
            ++other.clocks[i];
        }
    }
    wait();
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

void block_barrier(Site site) {
    Thread& self = *current;
    self.site = site;
    self.mask = 0;
    self.state = State::AT_BLOCK_BARRIER;
    if (++at_barrier == block_size()) {
        for (const Thread& other : threads) {
            if (!same(other.site, site)) fail(Kind::DIVERGENCE, at(site), describe(self) + ", " + describe(other));
        }
        at_barrier = 0;
        for (Thread& other : threads) {
            other.state = State::READY;
            ++other.epoch;
        }
    }
    wait();
}

void warp_barrier(Site site, uint32_t mask) { meet(site, mask, 0, true); }

uint64_t exchange(Site site, uint32_t mask, uint64_t value, uint32_t source) {
    meet(site, mask, value, false);
    if (source >= WARP || !(mask >> source & 1)) fail(Kind::DIVERGENCE, at(site), "a shuffle reads a lane outside its mask");
    return current->inbox[source];
}

uint32_t vote(Site site, uint32_t mask, bool predicate) {
    meet(site, mask, predicate, false);
    uint32_t result = 0;
    for (uint32_t i = 0; i < WARP; ++i) {
        if ((mask >> i & 1) && current->inbox[i] != 0) result |= 1u << i;
    }
    return result;
}

Stamp now() {
    return {block_linear * block_size() + current->linear + 1, current->epoch, current->clocks[lane()], false};
}

// Did whatever carries this stamp happen before what the current thread does now?
bool ordered(const Stamp& earlier) {
    if (earlier.thread == 0) return true;
    const uint32_t thread = earlier.thread - 1;
    if (thread / block_size() != block_linear) return false;
    const uint32_t linear = thread % block_size();
    if (linear == current->linear || earlier.epoch < current->epoch) return true;
    return linear / WARP == current->linear / WARP && earlier.clock <= current->clocks[linear % WARP];
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
    begin_memory(*request);
    const auto blocks = static_cast<uint32_t>(request->grid[0] * request->grid[1] * request->grid[2]);
    for (uint32_t i = 0; i < blocks; ++i) {
        start_block(i);
        if (!run_block()) break;
    }
    current = nullptr;
}
