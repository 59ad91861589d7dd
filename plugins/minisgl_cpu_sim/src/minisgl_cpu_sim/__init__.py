"""CPU backends for every role: native C++ kernels that people use, and pure torch ones that check others.

This package imports nothing; ``minisgl_cpu_sim.plugin`` is the entry point.
"""
