#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace minisgl {
namespace {

// A worker stays awake this long for the next call: longer than the host's time between two kernels of a step.
constexpr auto AWAKE = std::chrono::microseconds(60);
constexpr int64_t MOST_THREADS = 512;

struct Job {
    ItemBody body;
    const void* context;
    int64_t items;
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> seats;  // for workers

    void work() {
        for (int64_t i = next.fetch_add(1); i < items; i = next.fetch_add(1)) body(context, i);
    }
};

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // `yield` does not pause on most cores
#endif
}

class Pool {
public:
    void run(int64_t threads, int64_t items, ItemBody body, const void* context) {
        Job job{body, context, items, {0}, {std::min({threads, items, MOST_THREADS}) - 1}};
        if (!caller_.try_lock()) return job.work();  // another thread's call has the workers
        while (int64_t(workers_) < job.seats) start_worker();
        job_ = &job;
        generation_.fetch_add(1);
        if (asleep_ > 0) {
            const std::lock_guard<std::mutex> lock(mutex_);
            wake_.notify_all();
        }
        job.work();
        job_ = nullptr;
        // A worker counts itself in before it looks for the job: it has found none, or it is waited for.
        for (int spins = 0; inside_ > 0; ++spins) spins < 1000 ? relax() : void(sched_yield());
        caller_.unlock();
    }

private:
    void start_worker() {
        std::thread([this, seen = generation_.load()] { serve(seen); }).detach();
        ++workers_;
    }

    void serve(uint64_t seen) {
        for (;;) {
            await(seen);
            seen = generation_;
            inside_.fetch_add(1);
            Job* job = job_;
            if (job && job->seats.fetch_sub(1) > 0) job->work();
            inside_.fetch_sub(1);
        }
    }

    // Until there is a job newer than `seen`
    void await(uint64_t seen) {
        const auto bedtime = std::chrono::steady_clock::now() + AWAKE;
        do {
            for (int i = 0; i < 32; ++i) {
                if (generation_ != seen) return;
                relax();
            }
        } while (std::chrono::steady_clock::now() < bedtime);
        std::unique_lock<std::mutex> lock(mutex_);
        asleep_.fetch_add(1);
        wake_.wait(lock, [&] { return generation_ != seen; });
        asleep_.fetch_sub(1);
    }

    std::mutex caller_, mutex_;
    std::condition_variable wake_;
    std::atomic<Job*> job_{nullptr};
    std::atomic<uint64_t> generation_{0};
    std::atomic<int> inside_{0}, asleep_{0};
    int workers_ = 0;  // guarded by caller_
};

// Never destroyed: workers use it to the end of the process. A forked child has no workers and starts anew.
Pool* pool = nullptr;

Pool& the_pool() {
    static const bool registered = [] {
        pool = new Pool;
        pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
        return true;
    }();
    (void)registered;
    return *pool;
}

}  // namespace

void run_items(int64_t threads, int64_t items, ItemBody body, const void* context) {
    the_pool().run(threads, items, body, context);
}

}  // namespace minisgl
