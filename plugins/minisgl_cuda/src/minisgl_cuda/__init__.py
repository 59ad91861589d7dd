"""minisgl-cuda: CUDA graphs, KV kernels, layer operations and decode attention for NVIDIA GPUs."""
