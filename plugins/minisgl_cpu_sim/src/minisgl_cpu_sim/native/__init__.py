"""C++ kernels, compiled for this machine at first use and called through ctypes."""
