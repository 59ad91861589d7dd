"""CPU backends for every role: native C++ kernels for production, and pure torch ones as a reference.

This package imports nothing; ``minisgl_cpu_sim.plugin`` is the entry point.
"""
