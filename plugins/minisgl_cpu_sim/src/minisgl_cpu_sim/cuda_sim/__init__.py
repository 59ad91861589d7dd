"""Runs CUDA kernels on a CPU and says what they do wrong, where a GPU would only be wrong.

The kernels' own sources are compiled by the host's C++ compiler: a kernel that includes nothing but
``<minisgl/device.h>``, and uses CUDA's names for indices, barriers, shuffles, votes and atomics, runs here unchanged.
Blocks run one after another; the threads of a block are fibers that switch where they wait for each other. Reported
are, with the line of the source, the thread, and the buffer's name:

- reads and writes outside the arrays that were passed (also in the gaps of strided views), or outside shared arrays;
- vector accesses at addresses that are not multiples of their size;
- races: two accesses to one byte, one of them a write, from different blocks, or from one block without a barrier
  between them (``__syncwarp`` orders a warp, ``__syncthreads`` a block; shuffles order nothing, as in CUDA). They are
  found whatever the order in which threads happened to run, but for a read that two later readers have hidden;
- shared memory that is read before anything was written to it;
- barriers and shuffles that not all threads reach (this is stricter than CUDA, whose barriers no longer wait for
  threads that have ended);
- threads that spin for another thread.

Not modelled: the time anything takes, ``printf``, textures, inline PTX, ``__device__`` variables that are written,
waits between blocks (a flag and ``__threadfence``, thread-block clusters), and kernels of one stream that overlap.

    from minisgl_cpu_sim.cuda_sim import SimulatedFault, SimulatedProgram

    program = SimulatedProgram(["scale.cu"], ["scale<float>"])
    program.launch("scale<float>", grid=4, block=256, args={"x": x, "factor": 2.0, "n": x.size})

Arrays are NumPy arrays or torch tensors on the CPU, changed in place. Two arrays of one storage stay aliases.
"""

from .build import CompileError
from .fault import FaultKind, SimulatedFault, Threads
from .program import Argument, Shape, SimulatedProgram, simulate

__all__ = [
    "Argument",
    "CompileError",
    "FaultKind",
    "Shape",
    "SimulatedFault",
    "SimulatedProgram",
    "Threads",
    "simulate",
]
