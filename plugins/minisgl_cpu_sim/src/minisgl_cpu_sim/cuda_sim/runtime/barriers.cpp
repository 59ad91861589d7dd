// Where threads wait for each other, and which accesses that puts in an order.
#include "machine.h"

#include <algorithm>

namespace minisgl_sim {

namespace {

uint32_t at_cluster_barrier = 0;    // threads that have arrived at the one that is open
uint32_t cluster_barriers_done = 0;

Thread* lane_of_warp(uint32_t lane) {
    const uint32_t linear = current->linear / WARP * WARP + lane;
    return linear < block_size() ? &threads_of(current->rank)[linear] : nullptr;
}

// All lanes of `mask` are there: hands out their values and, if it `orders`, what each knows of the others.
void release_warp(uint32_t mask, bool orders) {
    uint32_t clocks[WARP] = {}, known = 0;
    for (uint32_t i = 0; i < WARP; ++i) {
        if (!(mask >> i & 1)) continue;
        const Thread& one = *lane_of_warp(i);
        for (uint32_t k = 0; k < WARP; ++k) clocks[k] = std::max(clocks[k], one.clocks[k]);
        known = std::max(known, one.known);
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
        one.known = known;
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

void begin_barriers() { at_cluster_barrier = cluster_barriers_done = 0; }

void block_barrier(Site site) {
    Thread& self = *current;
    Block& block = blocks[self.rank];
    self.site = site;
    self.mask = 0;
    self.state = State::AT_BLOCK_BARRIER;
    if (++block.at_barrier == block_size()) {
        block.at_barrier = 0;
        uint32_t known = 0;
        for (const Thread& other : threads_of(self.rank)) {
            if (!same(other.site, site)) fail(Kind::DIVERGENCE, at(site), describe(self) + ", " + describe(other));
            known = std::max(known, other.known);
        }
        for (Thread& other : threads_of(self.rank)) {
            other.state = State::READY;
            ++other.epoch;
            other.known = known;
        }
    }
    wait();
}

void warp_barrier(Site site, uint32_t mask) { meet(site, mask, 0, true); }

void cluster_arrive(Site site) {
    Thread& self = *current;
    if (self.arrived > self.waited) {
        fail(Kind::DIVERGENCE, at(site), "a thread arrives again at a cluster barrier and has not waited in between");
    }
    std::vector<uint32_t>& released = blocks[self.rank].released;
    released.resize(std::max<size_t>(released.size(), self.arrived + 1));
    released[self.arrived] = std::max(released[self.arrived], self.epoch);
    ++self.arrived;
    if (++at_cluster_barrier < threads.size()) return;
    at_cluster_barrier = 0;
    ++cluster_barriers_done;
    for (Thread& other : threads) {
        if (other.state == State::AT_CLUSTER_BARRIER) other.state = State::READY;
    }
}

void cluster_wait(Site site) {
    Thread& self = *current;
    if (self.arrived == self.waited) {
        fail(Kind::DIVERGENCE, at(site), "a thread waits at a cluster barrier at which it has not arrived");
    }
    if (cluster_barriers_done == self.waited) {
        self.site = site;
        self.state = State::AT_CLUSTER_BARRIER;
        wait();
    }
    self.known = std::max(self.known, ++self.waited);
}

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

Stamp now() { return {current->number, current->epoch, current->clocks[lane()], current->arrived, 0}; }

// Did whatever carries this stamp happen before what the current thread does now?
bool ordered(const Stamp& earlier) {
    if (earlier.thread == 0 || earlier.thread == current->number) return true;
    const uint32_t place = earlier.thread - threads.front().number;  // of an earlier cluster: very large
    if (place >= threads.size()) return false;
    if (earlier.arrived < current->known) return true;
    const Thread& other = threads[place];
    if (other.rank != current->rank) {
        // It had arrived itself, but one of its block arrived after a block barrier that it passed later.
        return current->known > 0 && earlier.epoch < blocks[other.rank].released[current->known - 1];
    }
    if (earlier.epoch < current->epoch) return true;
    return other.linear / WARP == current->linear / WARP && earlier.clock <= current->clocks[other.linear % WARP];
}

}  // namespace minisgl_sim
