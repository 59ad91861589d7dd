"""The kernels of the experts and of routing, in Triton, as operations of ``torch.ops.minisgl_moe``."""
