// Kernels for clusters of blocks, right and wrong ones.
#include <minisgl/device.h>

using namespace minisgl;

__device__ void meet() {
    cluster_arrive();
    cluster_wait();  // of all
}

__device__ unsigned next() { return (cluster_rank() + 1) % cluster_size(); }

__global__ void places(int* ranks, int* sizes) {
    ranks[blockIdx.y * gridDim.x + blockIdx.x] = cluster_rank();
    sizes[blockIdx.y * gridDim.x + blockIdx.x] = cluster_size();
}

// Block 0 of each cluster adds up what all of them hold.
template <bool BARRIER>
__global__ void sum(float* out, const float* in) {
    MINISGL_SHARED(float, parts, 256);
    float value = in[blockIdx.x * blockDim.x + threadIdx.x];
    if (BARRIER) meet();
    store_remote(&parts[cluster_rank() * blockDim.x + threadIdx.x], 0, value);
    meet();
    if (cluster_rank() != 0 || threadIdx.x != 0) return;
    float total = 0;
    for (int i = 0; i < cluster_size() * blockDim.x; ++i) total += parts[i];
    out[blockIdx.x / cluster_size()] = total;
}

// Vectors and a number go round the cluster; arrays lie at other places in block 0 than in the others.
__global__ void ring(float* out) {
    MINISGL_DYNAMIC_SHARED(Bytes16, inbox);
    if (cluster_rank() == 0) {
        MINISGL_SHARED(float, extra, 8);
        if (threadIdx.x < 8) extra[threadIdx.x] = 1;
    }
    MINISGL_SHARED(float, number, 1);
    meet();
    store_remote(&inbox[threadIdx.x], next(), Bytes16{{threadIdx.x, blockIdx.x, 7, 9}});
    if (threadIdx.x == 0) store_remote(number, next(), 0.5f);
    cluster_arrive();
    cluster_wait();
    const Bytes16 got = inbox[threadIdx.x];
    out[blockIdx.x * blockDim.x + threadIdx.x] = 100 * got.words[1] + got.words[0] + number[0];
}

// Three rounds through one place: a barrier after the read guards it against the next write.
template <bool GUARDED>
__global__ void rounds(float* out) {
    MINISGL_SHARED(float, place, 1);
    if (threadIdx.x == 0) place[0] = -1;
    __syncthreads();
    meet();
    for (int round = 0; round < 3; ++round) {
        if (threadIdx.x == 1) store_remote(place, next(), 10.0f * round + cluster_rank());
        meet();
        out[(round * gridDim.x + blockIdx.x) * blockDim.x + threadIdx.x] = place[0];
        if (GUARDED) meet();
    }
}

template <bool WARP>
__device__ void meet_near() {
    if (WARP) __syncwarp(); else __syncthreads();
}

// One thread waits at the cluster's barriers and tells the others of its warp or block.
template <bool WARP>
__global__ void by_others(float* out) {
    MINISGL_SHARED(float, place, 64);
    cluster_arrive();
    if (threadIdx.x == 0) cluster_wait();
    meet_near<WARP>();
    store_remote(&place[threadIdx.x], next(), 1.0f * threadIdx.x);
    if (threadIdx.x != 0) cluster_wait();
    cluster_arrive();
    if (threadIdx.x == blockDim.x - 1) cluster_wait();
    meet_near<WARP>();
    out[blockIdx.x * blockDim.x + threadIdx.x] = place[threadIdx.x];
}

// Is the store before the arrival that makes it known, and the read behind the wait?
template <bool LATE_STORE, bool EARLY_READ>
__global__ void between_steps(float* out) {
    MINISGL_SHARED(float, place, 1);
    if (threadIdx.x == 0) place[0] = 1;
    meet();
    if (!LATE_STORE && threadIdx.x == 0) store_remote(place, next(), 2.0f);
    cluster_arrive();
    if (LATE_STORE && threadIdx.x == 0) store_remote(place, next(), 2.0f);
    float got = 0;
    if (EARLY_READ) got = place[0];
    cluster_wait();
    if (!EARLY_READ) got = place[0];
    meet();
    out[blockIdx.x * blockDim.x + threadIdx.x] = got;
}

// Warp 1 arrives, then writes, and warp 0 arrives only after the block's barrier.
__global__ void release_by_others(int* data, int* out) {
    if (threadIdx.x == 32) cluster_arrive();
    if (blockIdx.x == 0 && threadIdx.x == 32) data[0] = 5;
    __syncthreads();
    if (threadIdx.x != 32) cluster_arrive();
    cluster_wait();
    if (blockIdx.x == 1 && threadIdx.x == 0) out[0] = data[0];
}

template <bool BARRIER>
__global__ void through_global(float* data, float* out) {
    data[blockIdx.x * blockDim.x + threadIdx.x] = blockIdx.x;
    if (BARRIER) meet(); else __syncthreads();
    out[blockIdx.x * blockDim.x + threadIdx.x] = data[(blockIdx.x ^ 1) * blockDim.x + threadIdx.x];
}

// The other block ends before the writer comes to its store, or just as well afterwards.
template <int WRITER, bool LATER>
__global__ void ended() {
    MINISGL_SHARED(float, place, 1);
    meet();
    if (LATER != (cluster_rank() == WRITER)) __syncthreads();
    if (cluster_rank() == WRITER && threadIdx.x == 0) store_remote(place, next(), 4.0f);
}

// One block writes into the other while that uses the place itself, behind a barrier of its own.
template <bool READS, int WRITER>
__global__ void beside(float* out) {
    MINISGL_SHARED(float, place, 1);
    if (threadIdx.x == 0) place[0] = 1;
    meet();
    if (cluster_rank() == WRITER && threadIdx.x == 0) store_remote(place, next(), 2.0f);
    __syncthreads();
    if (cluster_rank() != WRITER && threadIdx.x == 0) {
        if (READS) out[0] = place[0]; else place[0] = 3;
    }
    meet();
}

__global__ void two_writers() {
    MINISGL_SHARED(float, place, 1);
    meet();
    if (threadIdx.x == 0) store_remote(place, 0, 1.0f * cluster_rank());
    meet();
}

__global__ void unwritten(float* out) {
    MINISGL_SHARED(float, place, 2);
    meet();
    if (threadIdx.x == 0) store_remote(place, next(), 1.0f);
    meet();
    out[0] = place[1];
}

__global__ void leaves(int rank, int thread) {
    if (cluster_rank() == rank && threadIdx.x >= thread) return;
    meet();
}

__global__ void half_stays(float* out) {
    meet();
    if (cluster_rank() == 0 && threadIdx.x < 16) __syncthreads();
    meet();
}

__global__ void arrives_twice() {
    cluster_arrive();
    cluster_arrive();  // again
    cluster_wait();
}

__global__ void never_arrives() { cluster_wait(); }

template <class T>
__global__ void store_at(int index, int rank) {
    MINISGL_SHARED(T, place, 32);
    MINISGL_SHARED(T, behind, 32);
    meet();
    if (threadIdx.x == 0) store_remote(reinterpret_cast<T*>(reinterpret_cast<float*>(place) + index), rank, T{});
    meet();
}

__global__ void store_at_global(float* x) {
    meet();
    store_remote(x, 0, 1.0f);
    meet();
}
