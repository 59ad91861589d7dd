// Where threads wait for each other, and which accesses that puts in an order.
#include "machine.h"

#include <algorithm>

namespace minisgl_sim {

namespace {

uint32_t at_barrier = 0;  // threads of the block that wait there

Thread* lane_of_warp(uint32_t lane) {
    const uint32_t linear = current->linear / WARP * WARP + lane;
    return linear < block_size() ? &threads[linear] : nullptr;
}

// All lanes of `mask` are there: hands out their values and, if it `orders`, what each knows of the others.
void release_warp(uint32_t mask, bool orders) {
    uint32_t clocks[WARP] = {};
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1)) continue;
        for (uint32_t k = 0; k < WARP; ++k) clocks[k] = std::max(clocks[k], lane_of_warp(i)->clocks[k]);
    }
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1)) continue;
        Thread& one = *lane_of_warp(i);
        one.state = State::READY;
        for (uint32_t k = 0; k < WARP; ++k) {
            if (mask >> k & 1) one.inbox[k] = lane_of_warp(k)->outbox;
        }
        if (!orders) continue;
        std::memcpy(one.clocks, clocks, sizeof clocks);
        ++one.clocks[i];
    }
}

// Lanes of `mask` meet at `site`; then each holds the values of all. `orders`: memory too.
void meet(Site site, uint32_t mask, uint64_t value, bool orders) {
    Thread& self = *current;
    self.site = site;
    self.mask = mask;
    self.outbox = value;
    if (!(mask >> (self.linear % WARP) & 1)) fail(Kind::DIVERGENCE, at(site), "a lane that is not in its own mask");
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1) || lane_of_warp(i) != nullptr) continue;
        fail(Kind::DIVERGENCE, at(site), "the mask names lanes that do not exist");
    }
    self.state = State::AT_WARP;
    bool complete = true;
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1)) continue;
        const Thread& other = *lane_of_warp(i);
        complete = complete && other.state == State::AT_WARP && other.mask == mask && same(other.site, site);
    }
    if (complete) release_warp(mask, orders);
    wait();
}

}  // namespace

void begin_barriers() { at_barrier = 0; }

void block_barrier(Site site) {
    Thread& self = *current;
    self.site = site;
    self.mask = 0;
    self.state = State::AT_BLOCK_BARRIER;
    if (++at_barrier == block_size()) {
        at_barrier = 0;
        for (const Thread& other : threads) {
            if (!same(other.site, site)) fail(Kind::DIVERGENCE, at(site), describe(self) + ", " + describe(other));
        }
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

Stamp now() { return {current->number, current->epoch, current->clocks[lane()], false}; }

// Did whatever carries this stamp happen before what the current thread does now?
bool ordered(const Stamp& earlier) {
    if (earlier.thread == 0 || earlier.thread == current->number) return true;
    const uint32_t linear = earlier.thread - threads.front().number;  // of an earlier block: very large
    if (linear >= block_size()) return false;
    if (earlier.epoch < current->epoch) return true;
    return linear / WARP == current->linear / WARP && earlier.clock <= current->clocks[linear % WARP];
}

}  // namespace minisgl_sim
