// Work shared by threads: items are claimed one by one, and the caller waits for items, not for threads.
//
// On a machine with other work a thread may be without a core for milliseconds. A fork-join runtime waits for it in every
// region, even if it had nothing to do; here the running threads take all items.
#pragma once

#include <algorithm>
#include <cstdint>

namespace minisgl {

using ItemBody = void (*)(const void* context, int64_t item);

// body(context, 0 .. items - 1), each once, by up to `threads` threads, the caller's included
void run_items(int64_t threads, int64_t items, ItemBody body, const void* context);

// f(0) .. f(count - 1); f must not depend on the order
template <class F>
void parallel_for(int64_t threads, int64_t count, const F& f) {
    if (threads <= 1 || count <= 1) {
        for (int64_t i = 0; i < count; ++i) f(i);
    } else {
        run_items(threads, count, [](const void* context, int64_t i) { (*static_cast<const F*>(context))(i); }, &f);
    }
}

// As `parallel_for`, for items that take little time: a few claims per thread
template <class F>
void parallel_ranges(int64_t threads, int64_t count, const F& f) {
    const int64_t ranges = threads <= 1 ? 1 : std::min(count, 4 * threads);
    parallel_for(threads, ranges, [&](int64_t range) {
        for (int64_t i = range * count / ranges; i < (range + 1) * count / ranges; ++i) f(i);
    });
}

}  // namespace minisgl
